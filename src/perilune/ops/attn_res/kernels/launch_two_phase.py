"""The kernels of the two phases as functions of tensors."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from perilune.ops.attn_res.kernels.two_phase import bank_kernel, merge_kernel, score_kernel

BLOCK = 64  # rows of a product
TILE = {torch.bfloat16: 128, torch.float32: 32}  # columns of a product, by what is multiplied
COLUMNS = 1024  # of a sum over the bank: a program's


def bank(queries: Tensor, sources: Sequence[Tensor], key_weights: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """m, l [Q, R] and o [Q, R, D] of sources [R, D], whose rows are dense, for queries, key_weights [Q, D]."""
    N, Q, (R, D), dtype = len(sources), len(queries), sources[0].shape, sources[0].dtype
    m, l = torch.empty(2, Q, R, dtype=torch.float32, device=queries.device).unbind()
    o = torch.empty(Q, R, D, dtype=torch.float32, device=queries.device)
    if not o.numel():
        return m, l, o
    score = torch.empty(R, Q, N, dtype=torch.float32, device=queries.device)
    parts = split(queries.float() * key_weights.float(), dtype)
    rows, strides = tuple(sources), tuple(x.stride(0) for x in sources)
    score_kernel[(triton.cdiv(R, BLOCK) * N,)](
        rows, strides, parts, score, R, Q, eps,
        N=N, D=D, PARTS=len(parts), BLOCK=BLOCK, COUNT=max(16, triton.next_power_of_2(Q)), TILE=TILE[parts.dtype],
        STAGES=3, num_warps=4,
    )  # fmt: skip
    tile = min(COLUMNS, triton.next_power_of_2(D))
    tiles = triton.cdiv(D, tile)
    bank_kernel[(R * tiles,)](
        rows, strides, score, m, l, o, R, Q, N=N, D=D, TILE=tile, TILES=tiles, num_warps=max(1, tile // 256)
    )
    return m, l, o


def split(w: Tensor, dtype: torch.dtype) -> Tensor:
    """w: [Q, D] float32 as [parts, Q, D] whose sum it is: for bfloat16 sources three of bfloat16, all its bits."""
    if dtype != torch.bfloat16:
        return w.unsqueeze(0)
    parts = []
    for _ in range(3):
        parts.append(w.to(dtype))
        w = w - parts[-1].float()
    return torch.stack(parts)


def merge(
    m: Tensor, l: Tensor, o: Tensor, live: Tensor, update: Tensor | None, query: Tensor, key_weight: Tensor,
    norm_weight: Tensor | None, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The mixture of a partial one (m, l [R], o [R, D]) and live + update [R, D]; and that sum, or None."""
    R, D = live.shape
    out = live.new_empty(R, D)
    summed = None if update is None else live.new_empty(R, D)
    if out.numel():
        width = triton.next_power_of_2(D)
        merge_kernel[(R,)](
            m, l, o, live, live.stride(0), update, 0 if update is None else update.stride(0), query, key_weight,
            norm_weight, out, summed, eps, norm_eps, D=D, WIDTH=width, num_warps=min(16, max(1, width // 512)),
        )  # fmt: skip
    return out, summed

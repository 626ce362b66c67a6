"""The kernels over a bank in float8 as functions of tensors."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from perilune.ops.attn_res.kernels.float8 import mix_float8_kernel, unmix_float8_kernel
from perilune.ops.attn_res.kernels.launch import bits
from perilune.ops.fused import processors

PROGRAMS = 4  # on a processor: nothing else hides the time that a row is under way
ACROSS = 32  # elements to a thread, about


def plan(R: int, D: int, device: torch.device) -> tuple[int, int, int]:
    """Programs, the width of a row and warps."""
    width = triton.next_power_of_2(D)
    return min(R, processors(device) * PROGRAMS), width, min(8, max(1, width // (32 * ACROSS)))


def mix_float8(
    query: Tensor, key_weight: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], live: Tensor | None,
    eps: float, like: Tensor, kept: Tensor | None,
) -> Tensor:  # fmt: skip
    """The mixture in the dtype of `like`.  codes: [R, D] bytes, scales: [R], live: [R, D]; kept: [2, R, sources]."""
    R, D = codes[0].shape
    out = torch.empty(R, D, dtype=like.dtype, device=codes[0].device)
    score, inverse_rms = (None, None) if kept is None else kept.unbind()
    if out.numel():
        programs, width, warps = plan(R, D, out.device)
        mix_float8_kernel[(programs,)](
            tuple(codes), tuple(scales), live, 0 if live is None else live.stride(0), query, key_weight, out,
            score, inverse_rms, R, eps, N=len(codes), D=D, WIDTH=width, num_warps=warps,
        )  # fmt: skip
    return out


def unmix_float8(
    query: Tensor, key_weight: Tensor, codes: Sequence[Tensor], scales: Sequence[Tensor], live: Tensor | None,
    kept: Tensor, dout: Tensor, places: Sequence[Tensor | None], adds: Sequence[bool],
) -> Tensor:  # fmt: skip
    """Writes the gradients [R, D] that are wanted, or adds to them; that of query * key_weight, [D]."""
    R, D = codes[0].shape
    programs, width, warps = plan(R, D, dout.device)
    dw = query.new_zeros(programs, D, dtype=torch.float32)
    if dout.numel():
        unmix_float8_kernel[(programs,)](
            tuple(codes), tuple(scales), live, 0 if live is None else live.stride(0), dout, dout.stride(0),
            tuple(dout if place is None else place for place in places), query, key_weight, *kept.unbind(), dw,
            R, bits(place is not None for place in places), bits(adds),
            N=len(codes), D=D, WIDTH=width, COUNT=triton.next_power_of_2(len(places)), num_warps=warps,
        )  # fmt: skip
    return dw.sum(0)

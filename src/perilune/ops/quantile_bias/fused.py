"""The histogram on a GPU, in one pass over the scores.  The kernel is imported when it is first needed."""

import torch
from torch import Tensor

from perilune.ops.fused import DTYPES, out_of_reach
from perilune.ops.quantile_bias.groups import Groups

WIDEST = 1 << 14  # experts: a token's scores are held in registers


def add_counts_(
    counts: Tensor, scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None, groups: Groups | None
) -> None:
    """Adds the histogram of `scores` to `counts: [E, bins]` int64; see `score_histogram`."""
    assert groups is None, groups
    from perilune.ops.quantile_bias.kernels import histogram_kernel

    (M, E), bins = scores.shape, counts.shape[1]
    if not M:
        return
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    block = 1 << (E - 1).bit_length()
    histogram_kernel[(M,)](
        scores, bias.contiguous(), None if mask is None else mask.contiguous(), counts,
        E, scores.stride(0), bins, float(bins), top_k,
        BLOCK=block, num_warps=max(block // 1024, 1),
    )  # fmt: skip


def refuses(
    counts: Tensor, scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None, groups: Groups | None
) -> str | None:
    """Why the kernel cannot serve a call, or None."""
    if (reason := out_of_reach(scores)) is not None:
        return reason
    if groups is not None:
        return f"it knows one cutoff a token, and experts come in {groups.number} groups"
    if scores.dtype not in DTYPES or bias.dtype != torch.float32:
        return f"it computes in float32, and scores and bias are {scores.dtype} and {bias.dtype}"
    if scores.shape[1] > WIDEST:
        return f"it holds a token's scores in registers, {WIDEST} at most, and there are {scores.shape[1]}"
    return None

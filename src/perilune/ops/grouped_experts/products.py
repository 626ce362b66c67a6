"""Matrix products of rows sorted by group, each group with a matrix of its own.

`rows: [P, ...]` hold group 0's rows first, then group 1's; `counts: [E]` integers say how many each has, sum P.
torch's grouped kernels serve where they can.  Where they cannot (float64, widths that are no multiple of 16 bytes),
groups of like size are padded to one batched product; as sizes within a batch differ by less than two, padding never
doubles the work, however uneven the groups, and there are at most log2 P batches.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """rows[i] @ matrices[group of i]: `[P, K] x [E, K, N] -> [P, N]`."""
    if _kernel_serves(rows, matrices):
        return grouped_mm(rows, matrices, offs=_ends(counts))
    out = rows.new_zeros(rows.shape[0] + 1, matrices.shape[-1])
    padded = _with_zero_row(rows)
    for groups, index in _batches(counts):
        out[index] = padded[index] @ matrices[groups]
    return out[:-1]


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Sum of left[i]^T right[i] over each group: `[P, K] x [P, N] -> [E, K, N]`, zero for an empty group."""
    if _kernel_serves(left, right):
        out = grouped_mm(left.mT, right, offs=_ends(counts))
        empty = (counts == 0).nonzero().flatten()
        return out.index_fill_(0, empty, 0) if empty.numel() else out  # some kernels leave these unwritten
    out = left.new_zeros(counts.numel(), left.shape[-1], right.shape[-1])
    left, right = _with_zero_row(left), _with_zero_row(right)
    for groups, index in _batches(counts):
        out[groups] = left[index].mT @ right[index]
    return out


def _kernel_serves(*operands: Tensor) -> bool:
    return all(x.dtype != torch.float64 and x.numel() > 0 and _aligned(x) for x in operands)


def _aligned(x: Tensor) -> bool:
    """Whether one axis is contiguous and the others step by multiples of 16 bytes."""
    *others, innermost = sorted(x.stride(), reverse=True)
    return innermost == 1 and all(stride * x.element_size() % 16 == 0 for stride in others)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])


def _batches(counts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(groups [G], row numbers [G, capacity]) for groups whose sizes share a power of two; P stands for padding."""
    start = counts.cumsum(0) - counts
    total = int(counts.sum())
    power = torch.frexp(counts.double()).exponent  # counts in [2^(power-1), 2^power)
    batches = []
    for p in power[counts > 0].unique().tolist():
        groups = (power == p).nonzero().flatten()
        size = counts[groups, None]
        rank = torch.arange(int(size.max()), device=counts.device)
        batches.append((groups, torch.where(rank < size, start[groups, None] + rank, total)))
    return batches

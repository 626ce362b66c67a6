"""The oracle: loops over tokens and experts, in the dtype of the input."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.ops.quantile_bias.groups import Groups


def quantile_bias_reference(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    mask: Tensor | None = None,
    bins: int | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """See `quantile_bias`."""
    E = bias.numel()
    b = bias.tolist()
    tokens = [row for i, row in enumerate(scores.tolist()) if mask is None or mask[i]]
    if top_k == E or not tokens:
        return bias.clone()
    cutoffs = [_cutoffs([s + x for s, x in zip(row, b)], top_k, groups) for row in tokens]
    q = len(tokens) * top_k / E
    estimate = []
    for j in range(E):
        required = sorted(cutoff[j] - row[j] for cutoff, row in zip(cutoffs, tokens))  # rising: the neediest last
        if groups is not None:
            required = [min(max(r, min(b) - 1), max(b) + 1) for r in required]
        estimate.append(required[math.floor(q)] if bins is None else _from_bins(required, b, q, bins))
    mean = sum(estimate) / E
    return torch.tensor([x - mean for x in estimate], dtype=bias.dtype, device=bias.device)


def add_counts_(
    counts: Tensor, scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None, groups: Groups | None
) -> None:
    """See `score_histogram`; every number is a tensor of its own, so that it is rounded as in the other forms."""
    bins = counts.shape[1]
    low = min(bias) - 1
    width = (max(bias) - min(bias) + 2) / bins
    for i, row in enumerate(scores.to(bias.dtype)):
        if mask is None or mask[i]:
            cutoffs = _cutoffs([s + b for s, b in zip(row, bias)], top_k, groups)
            for j, (cutoff, score) in enumerate(zip(cutoffs, row)):
                at = (max(cutoff - score, low) - low) / width
                counts[j, min(max(math.floor(at), 0), bins - 1)] += 1


def _cutoffs(biased: Sequence[Any], top_k: int, groups: Groups | None) -> list[Any]:
    """What each expert's s + b must exceed for this token to choose it; numbers, or tensors of one each."""
    E = len(biased)
    if groups is None:
        return [sorted(biased, reverse=True)[top_k]] * E
    size = E // groups.number
    best = min(groups.best, size)

    def total(values: Sequence[Any]) -> Any:  # of the `best` largest; a group with fewer cannot pass
        return sum(sorted(values, reverse=True)[:best]) if len(values) >= best else -math.inf

    runs = [biased[g * size : (g + 1) * size] for g in range(groups.number)]
    order = sorted(range(groups.number), key=lambda g: -total(runs[g]))
    visible = sorted((value for g in order[: groups.kept] for value in runs[g]), reverse=True)
    alpha = visible[top_k] if top_k < len(visible) else -math.inf
    gamma = total(runs[order[groups.kept]])
    cutoffs = []
    for j in range(E):
        others = sorted((runs[j // size][i] for i in range(size) if i != j % size), reverse=True)
        lift = -math.inf if total(others) > gamma else gamma - sum(others[: best - 1])
        cutoffs.append(max(alpha, lift))
    return cutoffs


def _from_bins(required: list[float], b: list[float], q: float, bins: int) -> float:
    low = min(b) - 1
    width = (max(b) - min(b) + 2) / bins
    histogram = [0] * bins
    for r in required:
        histogram[min(max(math.floor((r - low) / width), 0), bins - 1)] += 1
    before = 0
    for i, count in enumerate(histogram):
        if before + count >= math.ceil(q):
            return low + (i + min(max((q - before) / count, 0), 1)) * width
        before += count
    raise AssertionError("the histogram holds every token")

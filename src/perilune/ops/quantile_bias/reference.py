"""The oracle: loops over tokens and experts, in the dtype of the input."""

import math

import torch
from torch import Tensor


def quantile_bias_reference(
    scores: Tensor, bias: Tensor, top_k: int, *, mask: Tensor | None = None, bins: int | None = None
) -> Tensor:
    """See `quantile_bias`."""
    E = bias.numel()
    b = bias.tolist()
    tokens = [row for i, row in enumerate(scores.tolist()) if mask is None or mask[i]]
    if top_k == E or not tokens:
        return bias.clone()
    cutoffs = [sorted((s + x for s, x in zip(row, b)), reverse=True)[top_k] for row in tokens]
    q = len(tokens) * top_k / E
    estimate = []
    for j in range(E):
        required = sorted(cutoff - row[j] for cutoff, row in zip(cutoffs, tokens))  # rising: the neediest last
        estimate.append(required[math.floor(q)] if bins is None else _from_bins(required, b, q, bins))
    mean = sum(estimate) / E
    return torch.tensor([x - mean for x in estimate], dtype=bias.dtype, device=bias.device)


def add_counts_(counts: Tensor, scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None) -> None:
    """See `score_histogram`; every number is a tensor of its own, so that it is rounded as in the other forms."""
    bins = counts.shape[1]
    low = min(bias) - 1
    width = (max(bias) - min(bias) + 2) / bins
    for i, row in enumerate(scores.to(bias.dtype)):
        if mask is None or mask[i]:
            cutoff = sorted((s + b for s, b in zip(row, bias)), reverse=True)[top_k]
            for j, score in enumerate(row):
                at = (cutoff - score - low) / width
                counts[j, min(max(math.floor(at), 0), bins - 1)] += 1


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

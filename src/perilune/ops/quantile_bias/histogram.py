"""The estimate from counts: what production uses, because counts of micro-batches and ranks simply add."""

import torch
from torch import Tensor

from perilune.ops.quantile_bias.exact import centred, required_bias


def score_histogram(scores: Tensor, bias: Tensor, top_k: int, bins: int = 1000, mask: Tensor | None = None) -> Tensor:
    """How many tokens need which bias, for every expert: `[E, bins]` int64, each row summing to the real tokens.

    r_ij = cutoff_i - s_ij lies in [min b - 1, max b + 1], which is cut into `bins` equal parts.  The bias must stay the
    same for all histograms that are to be added.

    scores: `[M, E]` sigmoid scores.  bias: `[E]`, with which they were routed.  mask: `[M]` bool, True for real tokens.
    """
    scores, bias = scores.detach(), bias.detach()
    if mask is not None:
        scores = scores[mask]
    E = bias.numel()
    dtype = torch.promote_types(torch.promote_types(scores.dtype, bias.dtype), torch.float32)
    scores, bias = scores.to(dtype), bias.to(dtype)
    low, width = _range(bias, bins)
    # In place: for all experts of all tokens this is the largest tensor of the router.
    index = required_bias(scores, bias, top_k).sub_(low).div_(width).floor_().clamp_(0, bins - 1).long()
    index += torch.arange(E, device=index.device) * bins
    return torch.bincount(index.flatten(), minlength=E * bins).view(E, bins)


def bias_from_histogram(counts: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The mean-centred bias from pooled counts, linear inside a bin: `[E, bins], [E] -> [E]` in bias's dtype.

    Counts without a token give the bias back as it was.  bias must be the one the counts were taken with.
    """
    E, bins = counts.shape
    tokens = int(counts[0].sum())
    if tokens == 0 or top_k == E:
        return bias.detach().clone()
    wide = bias.detach().double()
    low, width = _range(wide, bins)
    q = tokens * top_k / E
    cumulative = counts.cumsum(-1)  # [E, bins]
    at_least = torch.full((E, 1), -(-tokens * top_k // E), dtype=cumulative.dtype, device=counts.device)  # ceil(q)
    bin_ = torch.searchsorted(cumulative, at_least)  # [E, 1], the first bin whose cumulative count reaches it
    inside = counts.gather(-1, bin_)
    before = cumulative.gather(-1, bin_) - inside
    part = ((q - before.double()) / inside.double()).clamp(0, 1)
    return centred((low + (bin_ + part) * width).flatten()).to(bias.dtype)


def _range(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(lower end, bin width) of the biases that can be required."""
    low, high = bias.aminmax()
    return low - 1, (high - low + 2) / bins

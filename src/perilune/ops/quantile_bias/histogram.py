"""The estimate from counts: what production uses, because counts of micro-batches and ranks simply add."""

import torch
from torch import Tensor

from perilune.ops.quantile_bias.exact import centred, required_bias


def score_histogram(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    bins: int = 1000,
    mask: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """How many tokens need which bias, for every expert: `[E, bins]` int64, each row summing to the real tokens.

    r_ij = cutoff_i - s_ij lies in [min b - 1, max b + 1], which is cut into `bins` equal parts.  The bias must stay the
    same for all histograms that are to be added.

    scores: `[M, E]` sigmoid scores.  bias: `[E]`, with which they were routed.  mask: `[M]` bool, True for real tokens.
    ids: `[M, top_k]`, what routing chose, if at hand: it spares a search and changes no count.
    """
    scores, bias = scores.detach(), bias.detach()
    if mask is not None:
        scores, ids = scores[mask], None if ids is None else ids[mask]
    E = bias.numel()
    dtype = torch.promote_types(torch.promote_types(scores.dtype, bias.dtype), torch.float32)
    scores, bias = scores.to(dtype), bias.to(dtype)
    low, width = _range(bias, bins)
    # In place: for all experts of all tokens this is the largest tensor of the router.  Clamped as integers: the NaN of
    # a step that diverged lands in some bin, and it is the loss that says so.
    index = required_bias(scores, bias, top_k, ids).sub_(low).div_(width).floor_().long().clamp_(0, bins - 1)
    index += torch.arange(E, device=index.device) * bins
    return torch.bincount(index.flatten(), minlength=E * bins).view(E, bins)


def bias_from_histogram(counts: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The mean-centred bias from pooled counts, linear inside a bin: `[E, bins], [E] -> [E]` in bias's dtype.

    Counts are integers, or weighted ones of any float dtype.  Counts without a token give the bias back as it was.
    bias must be the one the counts were taken with.
    """
    E, bins = counts.shape
    tokens = counts[0].sum().item()
    if tokens == 0 or top_k == E:
        return bias.detach().clone()
    wide = bias.detach().double()
    low, width = _range(wide, bins)
    q = tokens * top_k / E
    cumulative = counts.cumsum(-1, dtype=torch.float64)  # [E, bins]
    bin_ = torch.searchsorted(cumulative, cumulative.new_full((E, 1), q))  # the first whose cumulative count reaches q
    inside = counts.gather(-1, bin_).double()
    before = cumulative.gather(-1, bin_) - inside
    part = ((q - before) / inside).clamp(0, 1)
    return centred((low + (bin_ + part) * width).flatten()).to(bias.dtype)


def rebin(counts: Tensor, bias: Tensor, new_bias: Tensor) -> Tensor:
    """Counts taken with `bias`, spread over the bins that `new_bias` has: `[E, bins]` float64, the same row sums.

    Counts are taken to lie evenly inside their bin; those beyond the new range go to its end bins.
    """
    bins = counts.shape[1]
    low, width = _range(bias.detach().double(), bins)
    new_low, new_width = _range(new_bias.detach().double(), bins)
    below = counts.new_zeros(len(counts), bins + 1, dtype=torch.float64)  # [E, bins + 1], counts below each edge
    torch.cumsum(counts, -1, dtype=torch.float64, out=below[:, 1:])
    edges = new_low + new_width * torch.arange(1, bins, device=counts.device)  # the inner ones
    position = ((edges - low) / width).clamp(0, bins)  # in the old bins
    left = position.floor().clamp(max=bins - 1).long()
    moved = below.clone()
    moved[:, 1:-1] = torch.lerp(below.index_select(1, left), below.index_select(1, left + 1), position - left)
    return moved.diff(dim=-1)


def _range(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(lower end, bin width) of the biases that can be required."""
    low, high = bias.aminmax()
    return low - 1, (high - low + 2) / bins

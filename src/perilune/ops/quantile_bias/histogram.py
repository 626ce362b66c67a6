"""The estimate from counts: what production uses, because counts of micro-batches and ranks simply add.

Nothing here reads a tensor back, and no shape depends on a value: on a GPU the host runs ahead.
"""

import torch
from torch import Tensor

from perilune.ops.quantile_bias.exact import centred, required_bias
from perilune.ops.quantile_bias.groups import Groups

PART = 1 << 20  # scores at a time: the bins and weights of so many are all that is allocated


def add_counts_(
    counts: Tensor, scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None, groups: Groups | None
) -> None:
    """Adds the histogram of `scores` to `counts: [E, bins]` int64; see `score_histogram`.

    Tokens go by in parts of fixed size.  Masked ones are binned with the others and weigh 0.
    """
    E, bins = counts.shape
    low, width = bin_range(bias, bins)
    first = torch.arange(0, E * bins, bins, device=counts.device)  # each expert's first bin in the flat counts
    flat, one = counts.view(-1), first.new_ones(())
    rows = max(PART // E, 1)
    for start in range(0, len(scores), rows):
        part = slice(start, start + rows)
        # Clamped as integers: the NaN of a step that diverged lands in some bin, and it is the loss that says so.
        required = required_bias(scores[part].to(bias.dtype), bias, top_k, groups)
        index = required.sub_(low).div_(width).floor_().long().clamp_(0, bins - 1).add_(first)
        weight = one if mask is None else mask[part, None].long()
        flat.index_add_(0, index.reshape(-1), weight.expand_as(index).reshape(-1))


def bias_from_histogram(counts: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The mean-centred bias from pooled counts, linear inside a bin: `[..., E, bins], [..., E] -> [..., E]` in bias's
    dtype; leading axes are layers.

    Counts are integers, or weighted ones of any float dtype.  Counts without a token give the bias back as it was.
    bias must be the one the counts were taken with.
    """
    E, bins = counts.shape[-2:]
    bias = bias.detach()
    if top_k == E:
        return bias.clone()
    tokens = counts[..., :1, :].sum(-1).double()  # [..., 1]
    wide = bias.double()
    low, width = bin_range(wide, bins)
    q = tokens * top_k / E
    cumulative = counts.cumsum(-1, dtype=torch.float64)  # [..., E, bins]
    every = q.unsqueeze(-1).expand(*bias.shape, 1).contiguous()
    bin_ = torch.searchsorted(cumulative, every)  # [..., E, 1], the first whose cumulative count reaches q
    inside = counts.gather(-1, bin_).double()
    before = cumulative.gather(-1, bin_) - inside
    part = ((every - before) / inside).clamp(0, 1)
    estimate = centred(low + (bin_ + part).squeeze(-1) * width).to(bias.dtype)
    return torch.where(tokens > 0, estimate, bias)


def rebin(counts: Tensor, bias: Tensor, new_bias: Tensor) -> Tensor:
    """Counts taken with `bias`, spread over the bins that `new_bias` has: `[..., E, bins]` float64, the same row sums.

    Counts are taken to lie evenly inside their bin; those beyond the new range go to its end bins.
    """
    *rows, bins = counts.shape
    low, width = bin_range(bias.detach().double(), bins)
    new_low, new_width = bin_range(new_bias.detach().double(), bins)
    below = counts.new_zeros(*rows, bins + 1, dtype=torch.float64)  # [..., E, bins + 1], counts below each edge
    torch.cumsum(counts, -1, dtype=torch.float64, out=below[..., 1:])
    edges = new_low + new_width * torch.arange(1, bins, device=counts.device)  # [..., bins - 1], the inner ones
    position = ((edges - low) / width).clamp(0, bins).unsqueeze(-2)  # in the old bins, of all experts alike
    left = position.floor().clamp(max=bins - 1).long()
    every = left.expand(*rows, bins - 1)
    moved = below.clone()
    moved[..., 1:-1] = torch.lerp(below.gather(-1, every), below.gather(-1, every + 1), position - left)
    return moved.diff(dim=-1)


def bin_range(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(lower end, bin width) of the biases `[..., E]` that can be required, both `[..., 1]`."""
    low, high = bias.aminmax(dim=-1, keepdim=True)
    span = high - low + 2
    return low - 1, span / torch.full_like(span, bins)  # by a number a GPU would multiply by one over it

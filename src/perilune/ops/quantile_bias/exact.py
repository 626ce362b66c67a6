"""The estimate from order statistics: every margin is kept, nothing is binned."""

import torch
from torch import Tensor

from perilune.ops.quantile_bias.groups import Groups, required_in_groups


def cutoffs(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The (k+1)-th largest biased score of each token, which an expert must exceed to be chosen: `[M, E] -> [M, 1]`."""
    return (scores + bias).topk(top_k + 1, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def required_bias(scores: Tensor, bias: Tensor, top_k: int, groups: Groups | None = None) -> Tensor:
    """r_ij, the bias from which expert j is chosen by token i: its cutoff less the raw score, `[M, E]`."""
    if groups is not None:
        return required_in_groups(scores, bias, top_k, groups)
    return cutoffs(scores, bias, top_k) - scores


def bias_from_required(required: Tensor, top_k: int, mask: Tensor | None = None) -> Tensor:
    """The mean-centred bias that lets floor(q) tokens of each column pass, q = M k / E: `[M, E] -> [E]`.

    mask: `[M]` bool, True for the real tokens, of which M is then the number; NaN if there is none.  Nothing is read
    back for it: masked tokens come last in every column, and the rank is looked up there.
    """
    if mask is not None:
        return _from_masked(required, top_k, mask)
    M, E = required.shape
    rank = M * top_k // E
    estimate = required.mT.topk(rank + 1, dim=-1, largest=False, sorted=False).values.amax(-1)
    return centred(estimate)


def _from_masked(required: Tensor, top_k: int, mask: Tensor) -> Tensor:
    M, E = required.shape
    last = required.masked_fill(~mask.unsqueeze(-1), torch.inf)
    rising = last.mT.topk(M * top_k // E + 1, dim=-1, largest=False).values  # [E, the highest rank there can be + 1]
    rank = mask.sum() * top_k // E
    return centred(rising.gather(-1, rank.expand(E, 1)).squeeze(-1))


def centred(bias: Tensor) -> Tensor:
    """The same selection `[..., E]` with mean zero (summed in float64, so that the mean stays there)."""
    wide = bias.double()
    return (wide - wide.mean(-1, keepdim=True)).to(bias.dtype)

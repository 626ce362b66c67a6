"""The estimate from order statistics: every margin is kept, nothing is binned."""

import torch
from torch import Tensor


def cutoffs(scores: Tensor, bias: Tensor, top_k: int, ids: Tensor | None = None) -> Tensor:
    """The (k+1)-th largest biased score of each token, which an expert must exceed to be chosen: `[M, E] -> [M, 1]`.

    ids `[M, top_k]`, if these are the largest as routing found them, save finding them again.
    """
    biased = scores + bias
    if ids is not None:
        rest = biased.scatter(-1, ids, -torch.inf).amax(-1, keepdim=True)
        if (biased.gather(-1, ids) >= rest).all():  # not so where groups of experts were ruled out
            return rest
    return biased.topk(top_k + 1, dim=-1).values[:, -1:]


def required_bias(scores: Tensor, bias: Tensor, top_k: int, ids: Tensor | None = None) -> Tensor:
    """r_ij, the bias from which expert j is chosen by token i: its cutoff less the raw score, `[M, E]`."""
    return cutoffs(scores, bias, top_k, ids) - scores


def bias_from_required(required: Tensor, top_k: int) -> Tensor:
    """The mean-centred bias that lets floor(q) tokens of each column pass, q = M k / E: `[M, E] -> [E]`."""
    M, E = required.shape
    rank = M * top_k // E
    estimate = required.mT.topk(rank + 1, dim=-1, largest=False, sorted=False).values.amax(-1)
    return centred(estimate)


def centred(bias: Tensor) -> Tensor:
    """The same selection with mean zero (summed in float64, so that the mean stays there)."""
    wide = bias.double()
    return (wide - wide.mean()).to(bias.dtype)

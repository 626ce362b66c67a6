"""The public function."""

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.quantile_bias.exact import bias_from_required, required_bias
from perilune.ops.quantile_bias.histogram import bias_from_histogram, score_histogram
from perilune.ops.quantile_bias.reference import quantile_bias_reference


def _quantile_bias(
    scores: Tensor, bias: Tensor, top_k: int, *, mask: Tensor | None = None, bins: int | None = None
) -> Tensor:
    if bins is not None and top_k < bias.numel():
        return bias_from_histogram(score_histogram(scores, bias, top_k, bins, mask), bias, top_k)
    if mask is not None:
        scores = scores[mask]
    if top_k == bias.numel() or scores.shape[0] == 0:
        return bias.clone()
    return bias_from_required(required_bias(scores, bias, top_k), top_k).to(bias.dtype)


BACKENDS = Backends("quantile_bias")
BACKENDS.register("chunked", _quantile_bias)
BACKENDS.register("reference", quantile_bias_reference)


@torch.no_grad()
def quantile_bias(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    mask: Tensor | None = None,
    bins: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The selection bias under which this batch would have loaded every expert alike (K3 report, 2.3.3).

    Token i takes the top_k experts of s_i + b; the next one's biased score is its cutoff alpha_i.  Expert j needs the
    bias r_ij = alpha_i - s_ij to be taken.  With q = M k / E tokens for each expert,

        b'_j = the (floor(q)+1)-th smallest r_ij over the tokens i,      result = b' - mean(b').

    Exact when `bins` is None; otherwise from a histogram of r with that many bins over [min b - 1, max b + 1], linear
    inside a bin, within a bin's width of the exact one for large M (`score_histogram`, `bias_from_histogram`).  Apply
    the result from the next batch on, never to the batch it came from.

    scores: `[M, E]` sigmoid scores in (0, 1).  bias: `[E]`, used for routing this batch.  mask: `[M]` bool, True for
    real tokens.  Returns `[E]` in bias's dtype, float32 at least; mutates nothing and carries no gradient.  With
    top_k == E or without a real token the bias comes back unchanged.  For q < 1 the estimate is a minimum over
    tokens, hence noisy: pool more tokens.  Raises ShapeError.
    """
    _check(scores, bias, top_k, mask, bins)
    dtype = torch.promote_types(bias.dtype, torch.float32)
    compute = torch.promote_types(scores.dtype, dtype)
    run = BACKENDS.pick(backend, scores, bias, top_k, mask=mask, bins=bins)
    return run(scores.to(compute), bias.to(compute), top_k, mask=mask, bins=bins).to(dtype)


def _check(scores: Tensor, bias: Tensor, top_k: int, mask: Tensor | None, bins: int | None) -> None:
    if scores.dim() != 2:
        raise ShapeError(f"scores: expected [M, E], got {list(scores.shape)}; flatten the tokens to one axis")
    M, E = scores.shape
    if list(bias.shape) != [E]:
        raise ShapeError(f"bias: expected [{E}], got {list(bias.shape)}; one for every expert")
    if not 1 <= top_k <= E:
        raise ShapeError(f"top_k: expected 1 to {E}, got {top_k}; choose among the experts there are")
    if mask is not None and (list(mask.shape) != [M] or mask.dtype != torch.bool):
        raise ShapeError(f"mask: expected bool [{M}], got {mask.dtype} {list(mask.shape)}; True marks real tokens")
    if bins is not None and bins < 1:
        raise ShapeError(f"bins: expected 1 or more, got {bins}; 1000 serves well")

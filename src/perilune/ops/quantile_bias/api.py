"""The public functions."""

from functools import partial

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.quantile_bias import fused, reference
from perilune.ops.quantile_bias.exact import bias_from_required, required_bias
from perilune.ops.quantile_bias.groups import Groups, limiting
from perilune.ops.quantile_bias.histogram import add_counts_, bias_from_histogram

HISTOGRAM = Backends("score_histogram")  # best first
HISTOGRAM.register("triton", fused.add_counts_, fused.refuses)
HISTOGRAM.register("chunked", add_counts_)
HISTOGRAM.register("reference", reference.add_counts_)


@torch.no_grad()
def score_histogram(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    bins: int = 1000,
    mask: Tensor | None = None,
    *,
    groups: Groups | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """How many tokens need which bias, for every expert: `[E, bins]` int64, each row summing to the real tokens.

    r_ij = alpha_i - s_ij, the bias from which token i takes expert j (`quantile_bias`), lies in
    [min b - 1, max b + 1], which is cut into `bins` equal parts.  The bias must stay the same for all histograms that
    are to be added.  All backends give the same counts.

    scores: `[M, E]` sigmoid scores.  bias: `[E]`, with which they were routed.  top_k: below E.  mask: `[M]` bool, True
    for real tokens.  groups: where a token sees only its best groups of experts.  out: `[E, bins]` int64, contiguous;
    if given, it is added to and returned.  Nothing waits for the device.  backend: "auto", "triton" (a GPU, float32 or
    less, no groups), "chunked" or "reference".  Raises ShapeError.
    """
    _check(scores, bias, top_k, mask, bins)
    E = bias.numel()
    if top_k == E:
        raise ShapeError(f"top_k: expected fewer than {E} experts, got all; no token leaves a next one to count by")
    dtype = torch.promote_types(torch.promote_types(scores.dtype, bias.dtype), torch.float32)
    counts = torch.zeros(E, bins, dtype=torch.int64, device=scores.device) if out is None else out
    if counts.dtype != torch.int64 or list(counts.shape) != [E, bins] or not counts.is_contiguous():
        raise ShapeError(
            f"out: expected contiguous int64 [{E}, {bins}], got {counts.dtype} {list(counts.shape)}; "
            "make it with torch.zeros"
        )
    args = (counts, scores.detach(), bias.detach().to(dtype), top_k, mask, limiting(groups, E, top_k))
    HISTOGRAM.pick(backend, *args)(*args)
    return counts


def _quantile_bias(
    backend: str,
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    mask: Tensor | None,
    bins: int | None,
    groups: Groups | None,
) -> Tensor:
    """backend: the histogram's."""
    if top_k == bias.numel() or scores.shape[0] == 0:
        return bias.clone()
    if bins is not None:
        counts = score_histogram(scores, bias, top_k, bins, mask, groups=groups, backend=backend)
        return bias_from_histogram(counts, bias, top_k)
    estimate = bias_from_required(required_bias(scores, bias, top_k, groups), top_k, mask).to(bias.dtype)
    return estimate if mask is None else torch.where(mask.any(), estimate, bias)


def _refuses(
    scores: Tensor, bias: Tensor, top_k: int, *, mask: Tensor | None, bins: int | None, groups: Groups | None
) -> str | None:
    """Why Triton cannot serve a call, or None."""
    return "without bins nothing is counted" if bins is None else fused.refuses(bias, scores, bias, top_k, mask, groups)


BACKENDS = Backends("quantile_bias")  # best first
BACKENDS.register("triton", partial(_quantile_bias, "triton"), _refuses)
BACKENDS.register("chunked", partial(_quantile_bias, "chunked"))
BACKENDS.register("reference", reference.quantile_bias_reference)


@torch.no_grad()
def quantile_bias(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    mask: Tensor | None = None,
    bins: int | None = None,
    groups: Groups | None = None,
    backend: str = "auto",
) -> Tensor:
    """The selection bias under which this batch would have loaded every expert alike (K3 report, 2.3.3).

    Token i takes the top_k experts of s_i + b; the next one's biased score is its cutoff alpha_i.  Expert j needs the
    bias r_ij = alpha_i - s_ij to be taken.  With q = M k / E tokens for each expert,

        b'_j = the (floor(q)+1)-th smallest r_ij over the tokens i,      result = b' - mean(b').

    Exact when `bins` is None; otherwise from a histogram of r with that many bins over [min b - 1, max b + 1], linear
    inside a bin, within a bin's width of the exact one for large M (`score_histogram`, `bias_from_histogram`).  Apply
    the result from the next batch on, never to the batch it came from.  Where a token sees only its best groups of
    experts, say so with `groups`: an expert's group has a cutoff too (`required_in_groups`).

    scores: `[M, E]` sigmoid scores in (0, 1).  bias: `[E]`, used for routing this batch.  mask: `[M]` bool, True for
    real tokens.  Returns `[E]` in bias's dtype, float32 at least; mutates nothing, carries no gradient and waits for no
    device.  With top_k == E or without a real token the bias comes back unchanged.  For q < 1 the estimate is a minimum
    over tokens, hence noisy: pool more tokens.  Raises ShapeError.
    """
    _check(scores, bias, top_k, mask, bins)
    dtype = torch.promote_types(bias.dtype, torch.float32)
    compute = torch.promote_types(scores.dtype, dtype)
    scores, bias = scores.detach().to(compute), bias.detach().to(compute)
    options = {"mask": mask, "bins": bins, "groups": limiting(groups, bias.numel(), top_k)}
    run = BACKENDS.pick(backend, scores, bias, top_k, **options)
    return run(scores, bias, top_k, **options).to(dtype)


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

"""The public calls: checks, the choice of backend."""

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.route import fused, packed, reference

TOPK = Backends("stable_topk")  # best first
TOPK.register("triton", fused.stable_topk, fused.topk_refuses)
TOPK.register("chunked", packed.stable_topk, packed.refuses)
TOPK.register("reference", reference.stable_topk)

ROUTE = Backends("route")  # best first
ROUTE.register("triton", fused.route, fused.refuses)
ROUTE.register("chunked", packed.route, packed.refuses)
ROUTE.register("reference", reference.route)


def stable_topk(scores: Tensor, k: int, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """The k largest along the last axis, falling; among equals the lowest index first, on every device and every run.

    `[..., E] -> values [..., k], ids [..., k]` (int64).  Values carry the gradient of `scores`; 16-bit scores are
    compared as float32.  What is no number has a place too, in float32 and less: above all others, or, where its sign
    bit is set, below.

    backend: "auto", "triton" (on a GPU, k up to 32 of 1,024; first order only), "chunked" (float32 or less) or
    "reference".
    Raises ShapeError unless 1 <= k <= E, BackendError for a backend that cannot serve the call.
    """
    check(scores, k)
    return TOPK.pick(backend, scores, k)(scores, k)


def route(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    ids: Tensor | None = None,
    renormalize: bool = True,
    scaling: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Chooses by s + b, weighs by s: `perilune.nn.routing.route` without groups of experts.

    scores: `[..., E]`; bias: `[E]`, without a gradient.  ids: `[..., top_k]` int64, if they are chosen already, which
    are only weighed then.  Returns ids, weights `[..., top_k]`, the weights in float32 (float64 for float64).
    backend: as of `stable_topk`.
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    check(scores, top_k)
    if bias.shape != scores.shape[-1:]:
        raise ShapeError(f"bias: expected [{scores.shape[-1]}], got {list(bias.shape)}; one for every expert")
    if ids is not None and (ids.shape != (*scores.shape[:-1], top_k) or ids.dtype != torch.int64):
        raise ShapeError(
            f"ids: expected int64 {[*scores.shape[:-1], top_k]}, got {ids.dtype} {list(ids.shape)}; top_k of every row"
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    arguments = (scores, bias.detach(), top_k, renormalize, scaling, ids)
    return ROUTE.pick(backend, *arguments)(*arguments)


def check(scores: Tensor, k: int) -> None:
    E = scores.shape[-1]
    if not 1 <= k <= E:
        raise ShapeError(f"k: expected 1 to {E}, got {k}; choose among the scores there are")

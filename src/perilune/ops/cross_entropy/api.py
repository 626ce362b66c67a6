"""The public call: checks, the choice of backend."""

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.autocast import autocast_dtype, without_autocast
from perilune.ops.cross_entropy import chunked, fused, reference

IGNORED = -100  # a target that is not predicted

BACKENDS = Backends("linear_cross_entropy")  # best first
BACKENDS.register("triton", fused.linear_cross_entropy, fused.refuses)
BACKENDS.register("chunked", chunked.linear_cross_entropy)
BACKENDS.register("reference", reference.linear_cross_entropy)


def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor, *, backend: str = "auto") -> Tensor:
    """The summed cross-entropy of a linear head, without ever holding all logits.

        sum over i with targets_i != -100 of   logsumexp(W h_i) - (W h_i)[targets_i]          (in nats)

    h: `[M, D]`; weight: `[V, D]` of h's dtype; targets: `[M]` int64 in 0..V-1, or -100 for a row without a loss.
    Returns a scalar in float32 (float64 for float64); divide by the number of targets for the mean.  Under autocast h
    and weight are cast as a linear layer would.  Gradients are first order only.

    backend: "auto", "triton" (on a GPU, at most float32), "chunked" or "reference".
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    if h.dim() != 2 or weight.dim() != 2 or h.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"h: expected [M, D] and weight [V, D], got {list(h.shape)} and {list(weight.shape)}; flatten the tokens"
        )
    if targets.shape != h.shape[:1] or targets.dtype != torch.int64:
        raise ShapeError(
            f"targets: expected int64 [{h.shape[0]}], got {targets.dtype} {list(targets.shape)}; one target a row"
        )
    if (dtype := autocast_dtype(h)) is not None:
        h, weight = h.to(dtype), weight.to(dtype)
    with without_autocast(h):
        return BACKENDS.pick(backend, h, weight, targets, IGNORED)(h, weight, targets, IGNORED)

"""The public calls: check the tensors, pick a backend, run it."""

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.rms_norm import fused, reference

NORM = Backends("rms_norm")  # best first
NORM.register("triton", fused.rms_norm, fused.refuses)
NORM.register("reference", reference.rms_norm)

GATED = Backends("gated_rms_norm")
GATED.register("triton", fused.gated_rms_norm, fused.refuses_gated)
GATED.register("reference", reference.gated_rms_norm)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None, backend: str = "auto"
) -> Tensor:
    """The root-mean-square norm of the last axis, scaled.

        y = w x / sqrt(mean(x^2) + eps)                                         (Zhang & Sennrich, 2019)

    x: [..., D].  weight: [D].  Returns [..., D] in x's dtype, or in `dtype`: what a caller under autocast, who would
    cast the result anyway, asks for.  Statistics are float32 (float64 for float64); the normalized row is rounded to
    x's dtype before it is scaled by the weight in x's dtype, so 16-bit inputs are rounded twice.
    On "triton" the backward pass keeps x and the weight, nothing else, and gradients are first order only.

    backend: "auto", "triton" (on a GPU) or "reference".
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    _check(x, weight)
    dtype = x.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ShapeError(f"dtype: expected a floating dtype, got {dtype}; cast the result yourself")
    return NORM.pick(backend, x, weight, eps, dtype)(x, weight, eps, dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, *, backend: str = "auto") -> Tensor:
    """The norm of each head's channels behind a sigmoid gate, one weight for all heads.

        y = sigmoid(gate) w x / sqrt(mean(x^2) + eps)                           (K3 report, section 2.1.1)

    x, gate: [..., D] of one shape.  weight: [D].  Returns [..., D] in the gate's dtype, computed in float32 (float64
    for float64) and rounded once.  On "triton" the backward pass keeps the inputs, nothing else, and gradients are
    first order only.

    backend: "auto", "triton" (on a GPU) or "reference".
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    _check(x, weight)
    if gate.shape != x.shape or not gate.is_floating_point():
        raise ShapeError(
            f"gate: expected a floating tensor {list(x.shape)} like x, got {gate.dtype} {list(gate.shape)}; "
            "give one logit for each channel"
        )
    return GATED.pick(backend, x, weight, gate, eps)(x, weight, gate, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() == 0 or not x.is_floating_point():
        raise ShapeError(f"x: expected a floating tensor [..., D], got {x.dtype} {list(x.shape)}; cast or widen it")
    if weight.shape != x.shape[-1:] or not weight.is_floating_point():
        raise ShapeError(
            f"weight: expected a floating tensor [{x.shape[-1]}] for x's last axis, got {weight.dtype} "
            f"{list(weight.shape)}; give one factor for each channel"
        )

"""Both norms as their equations read; autograd differentiates them."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in at least float32, which is also the result's dtype."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Statistics wide, cast back, then scaled: so the released models were trained."""
    return (rms_normalize(x, eps).to(x.dtype) * weight.to(x.dtype)).to(dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Wide throughout, one rounding at the end."""
    return (rms_normalize(x, eps) * weight * wide(gate).sigmoid()).to(gate.dtype)

"""What the peer takes from flash-linear-attention, so that something else of the same signatures can stand in."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from torch import Tensor, nn

PACKAGES = ("flash-linear-attention", "fla-core", "torch", "triton")
"""Whose versions a figure of the peer belongs to."""


@dataclass(frozen=True)
class Parts:
    """Each is called as flash-linear-attention's own, of which the names are given."""

    attention: Callable[..., nn.Module]
    """`layers.KimiDeltaAttention`"""
    norm: Callable[..., nn.Module]
    """`modules.RMSNorm`"""
    feed_forward: Callable[..., nn.Module]
    """`modules.GatedMLP`"""
    swiglu: Callable[[Tensor, Tensor], Tensor]
    """`modules.activations.swiglu`"""
    mixture: Callable[..., Tensor]
    """`ops.attnres.fused_attnres`"""
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`modules.FusedLinearCrossEntropyLoss()`, of features, targets and the head's weight"""


def missing() -> str:
    """Why the parts are not here, or nothing."""
    return "" if find_spec("fla") else "flash-linear-attention is not installed"


def from_fla() -> Parts:
    from fla.layers import KimiDeltaAttention
    from fla.modules import FusedLinearCrossEntropyLoss, GatedMLP, RMSNorm
    from fla.modules.activations import swiglu
    from fla.ops.attnres import fused_attnres

    return Parts(KimiDeltaAttention, RMSNorm, GatedMLP, swiglu, fused_attnres, FusedLinearCrossEntropyLoss())

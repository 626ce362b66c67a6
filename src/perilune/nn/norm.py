"""Root-mean-square normalisation, and the gated per-head form that closes a KDA layer."""

import torch
from torch import Tensor, nn

from perilune.nn.precision import Float32Parameters, at_least_float32


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in at least float32, which is also the result's dtype."""
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps): statistics in float32, cast back, then scaled.  `[..., D]` to `[..., D]`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps).to(x.dtype) * self.weight.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedHeadNorm(Float32Parameters):
    """sigmoid(gate) * RMSNorm(x) over each head's channels, one weight for all heads, float32 inside.

    `x, gate: [..., H, D]`; the result takes the gate's dtype.
    """

    float32 = ("weight",)

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (rms_normalize(x, self.eps) * self.weight * at_least_float32(gate).sigmoid()).to(gate.dtype)

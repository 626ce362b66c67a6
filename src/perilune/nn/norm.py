"""Root-mean-square normalisation, and the gated per-head form that closes a KDA layer."""

import torch
from torch import Tensor, nn

from perilune.nn.precision import Float32Parameters
from perilune.ops import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps): statistics in float32, cast back, then scaled.  `[..., D]` to `[..., D]`.

    In x's dtype, or in `dtype` where the caller would cast to it anyway.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return rms_norm(x, self.weight, self.eps, dtype=dtype)

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
        return gated_rms_norm(x, self.weight, gate, self.eps)

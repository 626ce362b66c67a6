"""Decay gates of KDA: raw logits in, natural-log decay out.

Both take `z: [..., H, K]`, add `dt_bias: [H, K]` first and then scale by `exp(A_log)`, `A_log: [H]`.  Computed in
float32 (float64 for float64 inputs).  The logarithm of the logistic function keeps values and derivatives accurate in
both tails, where `s * (1 - s)` and `log(1 + exp(x))` cancel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.core.errors import ShapeError


@dataclass(frozen=True, eq=False)
class BoundedGate:
    """`g = g_min * sigmoid(exp(A_log) * (z + dt_bias))`, in (g_min, 0): the gate of Kimi K3 (its report, KDA section).

    Not a clamp: the bound is approached smoothly and `exp(A_log)` is a slope.
    """

    A_log: Tensor
    dt_bias: Tensor
    g_min: float = -5.0

    def __post_init__(self) -> None:
        _check_parameters(self.A_log, self.dt_bias)
        if not self.g_min < 0:
            raise ShapeError(f"g_min: expected a negative log decay, got {self.g_min}; -5.0 is the released value")

    def __call__(self, z: Tensor) -> Tensor:
        rate, biased = _rate_and_biased(z, self.A_log, self.dt_bias)
        return self.g_min * F.logsigmoid(rate * biased).exp()

    @property
    def floor(self) -> float | None:
        """No value is below it."""
        return self.g_min


@dataclass(frozen=True, eq=False)
class SoftplusGate:
    """`g = -exp(A_log) * softplus(z + dt_bias)`, in (-inf, 0): the gate of Kimi Linear (its paper, section on KDA)."""

    A_log: Tensor
    dt_bias: Tensor

    def __post_init__(self) -> None:
        _check_parameters(self.A_log, self.dt_bias)

    def __call__(self, z: Tensor) -> Tensor:
        rate, biased = _rate_and_biased(z, self.A_log, self.dt_bias)
        return rate * F.logsigmoid(-biased)

    @property
    def floor(self) -> float | None:
        """There is none."""
        return None


Gate = BoundedGate | SoftplusGate


def _check_parameters(A_log: Tensor, dt_bias: Tensor) -> None:
    if A_log.dim() != 1:
        raise ShapeError(f"A_log: expected [H], got {list(A_log.shape)}; give one value a head, without padding")
    if dt_bias.dim() != 2 or dt_bias.shape[0] != A_log.shape[0]:
        raise ShapeError(
            f"dt_bias: expected [{A_log.shape[0]}, K], got {list(dt_bias.shape)}; view it as [H, K] with A_log's H"
        )


def _rate_and_biased(z: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    if z.dim() < 2 or z.shape[-2:] != dt_bias.shape:
        raise ShapeError(
            f"g: expected logits [..., {', '.join(map(str, dt_bias.shape))}] for this gate, got {list(z.shape)}; "
            "the gate's heads are those of g"
        )
    dtype = torch.promote_types(torch.promote_types(z.dtype, A_log.dtype), torch.float32)
    return A_log.to(dtype).exp()[:, None], z.to(dtype) + dt_bias.to(dtype)

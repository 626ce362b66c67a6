"""The gated activations inside an expert, with their derivatives in closed form."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Activation = Literal["situ", "swiglu"]


@dataclass(frozen=True)
class GatedActivation:
    """f(g, u) = opened(g) * raised(u), by name.

    situ:   opened(g) = beta_gate tanh(g / beta_gate) sigmoid(g),   raised(u) = beta_up tanh(u / beta_up)
    swiglu: opened(g) = g sigmoid(g),                               raised(u) = u

    Methods take r = raised(u): it is all of u that the backward needs, and tanh is what costs time.
    """

    name: Activation
    beta_gate: float
    beta_up: float

    def raised(self, up: Tensor) -> Tensor:
        return up if self.name == "swiglu" else torch.tanh(up / self.beta_up).mul_(self.beta_up)

    def __call__(self, gate: Tensor, raised: Tensor) -> Tensor:
        """f in the dtype of its arguments."""
        t = gate if self.name == "swiglu" else torch.tanh(gate / self.beta_gate).mul_(self.beta_gate)
        return torch.sigmoid(gate).mul_(t).mul_(raised)

    def with_derivatives(self, gate: Tensor, raised: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(f, df/dgate, df/dup).

        With t = tanh(g / beta_gate), s = sigmoid(g):
        d opened/dg = (1 - t^2) s + opened (1 - s),   d raised/du = 1 - (raised / beta_up)^2;   1 - t^2 is 1 for swiglu.
        """
        s = torch.sigmoid(gate)
        if self.name == "swiglu":
            opened = gate * s
            return opened * raised, torch.addcmul(s, opened, 1 - s).mul_(raised), opened
        t = torch.tanh(gate / self.beta_gate)
        opened = (t * s).mul_(self.beta_gate)
        slope = t.square_().neg_().add_(1).mul_(s).addcmul_(opened, 1 - s)
        raised_slope = (raised / self.beta_up).square_().neg_().add_(1)
        return opened * raised, slope.mul_(raised), raised_slope.mul_(opened)

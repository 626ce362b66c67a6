"""The gated activations inside an expert, with their derivatives in closed form."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Activation = Literal["situ", "swiglu"]


@dataclass(frozen=True)
class GatedActivation:
    """f(g, u) = gate(g) up(u), by name.

    situ:   beta_gate tanh(g / beta_gate) sigmoid(g)  times  beta_up tanh(u / beta_up)
    swiglu: g sigmoid(g)  times  u
    """

    name: Activation
    beta_gate: float
    beta_up: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """f(gate, up) in the dtype of its arguments."""
        if self.name == "swiglu":
            return torch.sigmoid(gate).mul_(gate).mul_(up)
        opened = torch.tanh(gate / self.beta_gate).mul_(torch.sigmoid(gate))
        return opened.mul_(torch.tanh(up / self.beta_up)).mul_(self.beta_gate * self.beta_up)

    def with_derivatives(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(f, df/dgate, df/dup).

        With t = tanh(g / beta_gate), s = sigmoid(g), v = tanh(u / beta_up):
        d gate(g)/dg = (1 - t^2) s + gate(g) (1 - s),  d up(u)/du = 1 - v^2.
        """
        s = torch.sigmoid(gate)
        if self.name == "swiglu":
            opened = gate * s
            slope = torch.addcmul(s, opened, 1 - s)
            return opened * up, slope.mul_(up), opened
        t = torch.tanh(gate / self.beta_gate)
        v = torch.tanh(up / self.beta_up)
        opened = (t * s).mul_(self.beta_gate)
        slope = t.square_().neg_().add_(1).mul_(s).addcmul_(opened, 1 - s)
        up_slope = torch.addcmul(torch.ones_like(v), v, v, value=-1)
        v = v.mul_(self.beta_up)
        return opened * v, slope.mul_(v), up_slope.mul_(opened)

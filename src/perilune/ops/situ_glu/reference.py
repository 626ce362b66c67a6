"""SiTU-GLU, SwiGLU and the plain GLU as their equations read; autograd differentiates them."""

import torch
from torch import Tensor


def situ_glu(gate: Tensor, up: Tensor, beta_gate: float, beta_up: float) -> Tensor:
    """[b1 tanh(g / b1) sigmoid(g)] [b2 tanh(u / b2)]; float32 inside (float64 for float64), one rounding at the end."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute), up.to(compute)
    capped_gate = beta_gate * torch.tanh(g / beta_gate) * torch.sigmoid(g)
    capped_up = beta_up * torch.tanh(u / beta_up)
    return (capped_gate * capped_up).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """[g sigmoid(g)] u; float32 inside (float64 for float64), one rounding at the end."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(compute), up.to(compute)
    return (g * torch.sigmoid(g) * u).to(gate.dtype)


def sigmoid_glu(gate: Tensor, up: Tensor) -> Tensor:
    """sigmoid(g) u; float32 inside (float64 for float64), one rounding at the end."""
    compute = torch.promote_types(gate.dtype, torch.float32)
    return (torch.sigmoid(gate.to(compute)) * up.to(compute)).to(gate.dtype)

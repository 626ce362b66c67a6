"""SiTU-GLU and SwiGLU that keep only their two inputs for the backward pass, whose derivatives are written out."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta_gate: float, beta_up: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta_gate, beta_up
        compute = torch.promote_types(gate.dtype, torch.float32)
        g, u = gate.to(compute), up.to(compute)
        y = (g / beta_gate).tanh_().mul_(beta_gate).mul_(torch.sigmoid(g))
        return y.mul_((u / beta_up).tanh_().mul_(beta_up)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """With t = tanh(g/b1), s = sigmoid(g), r = tanh(u/b2):

        dg = dy b2 r s [1 - t^2 + b1 t (1 - s)]        du = dy b1 t s (1 - r^2)
        """
        gate, up = ctx.saved_tensors
        beta_gate, beta_up = ctx.betas
        compute = torch.promote_types(gate.dtype, torch.float32)
        g, u, dy = gate.to(compute), up.to(compute), dy.to(compute)
        t, r, s = (g / beta_gate).tanh_(), (u / beta_up).tanh_(), torch.sigmoid(g)
        dy = dy * s
        du = (dy * t).mul_(beta_gate).mul_(1 - r * r)
        slope = s.neg_().add_(1).mul_(t).mul_(beta_gate).add_(1).sub_(t.mul_(t))
        dg = dy.mul_(r).mul_(beta_up).mul_(slope)
        return dg.to(gate.dtype), du.to(up.dtype), None, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        compute = torch.promote_types(gate.dtype, torch.float32)
        g, u = gate.to(compute), up.to(compute)
        return torch.sigmoid(g).mul_(g).mul_(u).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """With s = sigmoid(g): dg = dy u s [1 + g (1 - s)]        du = dy g s"""
        gate, up = ctx.saved_tensors
        compute = torch.promote_types(gate.dtype, torch.float32)
        g, u, dy = gate.to(compute), up.to(compute), dy.to(compute)
        s = torch.sigmoid(g)
        dy = dy * s
        du = dy * g
        dg = dy.mul_(u).mul_(s.neg_().add_(1).mul_(g).add_(1))
        return dg.to(gate.dtype), du.to(up.dtype)


def situ_glu(gate: Tensor, up: Tensor, beta_gate: float, beta_up: float) -> Tensor:
    return SituGLU.apply(gate, up, beta_gate, beta_up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return SwiGLU.apply(gate, up)

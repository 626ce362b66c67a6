"""SiTU-GLU, SwiGLU and the plain GLU in blocks of rows; the graph keeps two inputs, derivatives are written out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perilune.ops.blocks import as_rows, only_few, row_blocks
from perilune.ops.first_order import first_order
from perilune.ops.situ_glu import reference


def situ_glu(gate: Tensor, up: Tensor, beta_gate: float, beta_up: float) -> Tensor:
    if only_few(gate):
        return reference.situ_glu(gate, up, beta_gate, beta_up)
    return SituGLU.apply(gate, up, beta_gate, beta_up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if only_few(gate):
        return reference.swiglu(gate, up)
    return SwiGLU.apply(gate, up)


def sigmoid_glu(gate: Tensor, up: Tensor) -> Tensor:
    if only_few(gate):
        return reference.sigmoid_glu(gate, up)
    return SigmoidGLU.apply(gate, up)


class SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta_gate: float, beta_up: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta_gate, beta_up

        def value(g: Tensor, u: Tensor, y: Tensor) -> None:
            capped_gate = (g / beta_gate).tanh_().mul_(beta_gate).mul_(torch.sigmoid(g))
            torch.mul(capped_gate, (u / beta_up).tanh_().mul_(beta_up), out=y)

        return _by_blocks(value, (gate, up), outputs=1)[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """With t = tanh(g / b1), s = sigmoid(g), r = tanh(u / b2):

        dg = dy b2 r s [1 - t^2 + b1 t (1 - s)]        du = dy b1 t s (1 - r^2)
        """
        beta_gate, beta_up = ctx.betas

        def slopes(g: Tensor, u: Tensor, dy: Tensor, dg: Tensor, du: Tensor) -> None:
            t, s, r = (g / beta_gate).tanh_(), torch.sigmoid(g), (u / beta_up).tanh_()
            dys = dy * s
            torch.mul((dys * t).mul_(beta_gate), 1 - r * r, out=du)
            bracket = s.neg_().add_(1).mul_(t).mul_(beta_gate).addcmul_(t, t, value=-1).add_(1)
            torch.mul(dys.mul_(r).mul_(beta_up), bracket, out=dg)

        dg, du = _by_blocks(slopes, (*ctx.saved_tensors, dy), outputs=2)
        return dg, du, None, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)

        def value(g: Tensor, u: Tensor, y: Tensor) -> None:
            torch.mul(torch.sigmoid(g).mul_(g), u, out=y)

        return _by_blocks(value, (gate, up), outputs=1)[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """With s = sigmoid(g): dg = dy u s [1 + g (1 - s)]        du = dy g s"""

        def slopes(g: Tensor, u: Tensor, dy: Tensor, dg: Tensor, du: Tensor) -> None:
            s = torch.sigmoid(g)
            dys = dy * s
            torch.mul(dys, g, out=du)
            torch.mul(dys.mul_(u), s.neg_().add_(1).mul_(g).add_(1), out=dg)

        dg, du = _by_blocks(slopes, (*ctx.saved_tensors, dy), outputs=2)
        return dg, du


class SigmoidGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)

        def value(g: Tensor, u: Tensor, y: Tensor) -> None:
            torch.mul(torch.sigmoid(g), u, out=y)

        return _by_blocks(value, (gate, up), outputs=1)[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """With s = sigmoid(g): dg = dy u s (1 - s)        du = dy s"""

        def slopes(g: Tensor, u: Tensor, dy: Tensor, dg: Tensor, du: Tensor) -> None:
            s = torch.sigmoid(g)
            dys = dy * s
            du.copy_(dys)
            torch.mul(dys.mul_(u), s.neg_().add_(1), out=dg)

        dg, du = _by_blocks(slopes, (*ctx.saved_tensors, dy), outputs=2)
        return dg, du


def _by_blocks(function: Callable[..., None], inputs: tuple[Tensor, ...], outputs: int) -> list[Tensor]:
    """Runs an elementwise function of the inputs, cast to float32 at least, that writes into its last arguments.

    The outputs have the shape and dtype of the first input; writing rounds to that dtype.
    """
    like = inputs[0]
    compute = torch.promote_types(like.dtype, torch.float32)
    results = [torch.empty(like.shape, dtype=like.dtype, device=like.device) for _ in range(outputs)]
    read, written = [as_rows(x) for x in inputs], [as_rows(y) for y in results]
    for first, last in row_blocks(read[0]):
        function(*(x[first:last].to(compute) for x in read), *(y[first:last] for y in written))
    return results

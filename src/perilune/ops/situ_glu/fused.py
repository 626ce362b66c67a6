"""The gated units in Triton: one kernel each way."""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.first_order import first_order
from perilune.ops.fused import MOST_ROWS, dense_rows, left_to_compiler, unfit


@torch.compiler.disable  # a compiled function calls the kernels as they are, between its graphs
def situ_glu(gate: Tensor, up: Tensor, beta_gate: float, beta_up: float) -> Tensor:
    return _run("situ", gate, up, beta_gate, beta_up)


@torch.compiler.disable
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _run("swiglu", gate, up, 1.0, 1.0)


@torch.compiler.disable
def sigmoid_glu(gate: Tensor, up: Tensor) -> Tensor:
    return _run("sigmoid", gate, up, 1.0, 1.0)


def refuses(gate: Tensor, up: Tensor, *betas: float) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    if (reason := left_to_compiler() or unfit(gate, up)) is not None:
        return reason
    if gate.dim() and gate.numel() and gate.numel() // gate.shape[-1] > MOST_ROWS:
        return "there are too many rows to count in 32 bits"
    return None


def _run(unit: str, gate: Tensor, up: Tensor, beta_gate: float, beta_up: float) -> Tensor:
    with torch.cuda.device_of(gate):  # kernels are launched on the current device
        return _Fused.apply(gate, up, unit, float(beta_gate), float(beta_up))


class _Fused(torch.autograd.Function):
    """gate, up [...] -> [...].  Keeps the two, nothing else."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, unit: str, beta_gate: float, beta_up: float) -> Tensor:
        from perilune.ops.situ_glu.launch import glu

        ctx.save_for_backward(gate, up)
        ctx.options = unit, beta_gate, beta_up
        return glu(dense_rows(gate), dense_rows(up), *ctx.options).view(gate.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.situ_glu.launch import glu_gradients

        gate, up = ctx.saved_tensors
        dgate, dup = glu_gradients(dense_rows(gate), dense_rows(up), dense_rows(dy), *ctx.options)
        return dgate.view(gate.shape), dup.view(gate.shape), None, None, None

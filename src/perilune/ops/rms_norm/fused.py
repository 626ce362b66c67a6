"""Both norms in Triton: one kernel forward, one backward, and the sum of what its programs found for the weight."""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.first_order import first_order
from perilune.ops.fused import DTYPES, MOST_ROWS, dense_rows, left_to_compiler, unfit

WIDEST = 8192  # what the registers of a processor hold of a row, its gradient and the weight's


@torch.compiler.disable  # a compiled function calls the kernels as they are, between its graphs
def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    with torch.cuda.device_of(x):  # kernels are launched on the current device
        return _Fused.apply(x, weight, None, eps, dtype)


@torch.compiler.disable
def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    with torch.cuda.device_of(x):
        return _Fused.apply(x, weight, gate, eps, gate.dtype)


def refuses(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    return _refuses(x, weight, None, dtype)


def refuses_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    return _refuses(x, weight, gate, gate.dtype)


def _refuses(x: Tensor, weight: Tensor, gate: Tensor | None, dtype: torch.dtype) -> str | None:
    if (reason := left_to_compiler() or unfit(x, weight, gate)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"its kernels compute in float32, and the result is to be {dtype}"
    if not 1 <= x.shape[-1] <= WIDEST:
        return f"it serves rows of 1 to {WIDEST} elements, and these have {x.shape[-1]}"
    if x.numel() // x.shape[-1] > MOST_ROWS:
        return "there are too many rows to count in 32 bits"
    return None


class _Fused(torch.autograd.Function):
    """x [..., D], weight [D], gate [..., D] or None -> [..., D] of `dtype`.  Keeps these, nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        from perilune.ops.rms_norm.launch import normalize

        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        rows = None if gate is None else dense_rows(gate)
        return normalize(dense_rows(x), weight.contiguous(), rows, eps, dtype).view(x.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.rms_norm.launch import gradients

        x, weight, gate = ctx.saved_tensors
        dx, dweight, dgate = gradients(
            dense_rows(x), weight.contiguous(), None if gate is None else dense_rows(gate), ctx.eps, dense_rows(dy),
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        return (
            None if dx is None else dx.view(x.shape),
            None if dweight is None else dweight.to(weight.dtype),
            None if dgate is None else dgate.view(x.shape),
            None,
            None,
        )

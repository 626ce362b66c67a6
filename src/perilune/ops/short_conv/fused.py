"""The convolution in Triton: a kernel reads the rows once and writes the result; another makes the gradients.

Both go down the rows of a few channels with the last W-1 rows in registers.  The graph keeps x, the weight and the
state, as they are.  The kernels are imported when they are first needed.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from perilune.ops.first_order import first_order
from perilune.ops.fused import unfit

if TYPE_CHECKING:
    from perilune.ops.short_conv.kernels.launch import Documents

WIDEST = 8  # taps: so many rows stay in registers
MOST = 2**30  # rows, times 128 channels: counted in 32 bits, elements in 64


@torch.compiler.disable  # a compiled function calls the kernels as they are, between its graphs
def short_conv_fused(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu: list[int] | None,
    activation: str | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """x [B, T, D], weight [D, W], state [N, W-1, D] -> y [B, T, D], final state [N, W-1, D] or None."""
    from perilune.ops.short_conv.kernels.launch import documents_of

    with torch.cuda.device_of(x):  # kernels are launched on the current device
        documents = documents_of(cu, x.device)
        y = _Fused.apply(x, weight, initial_state, documents, activation == "silu")
        if not output_final_state:
            return y, None
        N = x.shape[0] if cu is None else len(cu) - 1
        return y, _Final.apply(x, initial_state, documents, N, weight.shape[1])


def refuses(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu: list[int] | None,
    activation: str | None,
    output_final_state: bool,
) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    if (reason := unfit(x, weight, initial_state)) is not None:
        return reason
    if weight.shape[1] > WIDEST:
        return f"it serves filters of 1 to {WIDEST} taps, and these have {weight.shape[1]}"
    if x.shape[0] * x.shape[1] * (1 + x.shape[2] // 128) > MOST:
        return "there are too many rows to count in 32 bits"
    return None


def dense(x: Tensor) -> Tensor:
    """x [B, T, D] itself where the elements of a row stand side by side, else a copy."""
    return x if x.stride(2) == 1 else x.contiguous()


def whole(state: Tensor | None) -> Tensor | None:
    """In one piece; None where there is nothing in it."""
    return None if state is None or state.numel() == 0 else state.contiguous()


class _Fused(torch.autograd.Function):
    """x [B, T, D], weight [D, W], state [N, W-1, D] or None -> y [B, T, D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, state: Tensor | None, documents: "Documents | None", activate: bool
    ) -> Tensor:
        from perilune.ops.short_conv.kernels.launch import convolve

        ctx.save_for_backward(x, weight, state)
        ctx.documents, ctx.activate = documents, activate
        return convolve(dense(x), weight.contiguous(), whole(state), documents, activate)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.short_conv.kernels.launch import gradients, state_gradient

        x, weight, state = ctx.saved_tensors
        documents, activate, held = ctx.documents, ctx.activate, whole(state)
        x, weight, dy = dense(x), weight.contiguous(), dense(dy)
        dx, dweight = gradients(x, weight, held, documents, activate, dy, ctx.needs_input_grad[:2])
        dstate = None
        if ctx.needs_input_grad[2]:
            if held is None:
                dstate = torch.zeros_like(state)
            else:
                dstate = state_gradient(x, weight, held, documents, activate, dy)
        return dx, dweight, dstate, None, None


class _Final(torch.autograd.Function):
    """x [B, T, D], state [N, W-1, D] or None -> final state [N, W-1, D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, state: Tensor | None, documents: "Documents | None", N: int, W: int
    ) -> Tensor:  # fmt: skip
        from perilune.ops.short_conv.kernels.launch import final_state

        ctx.documents, ctx.x, ctx.state = documents, like(x), None if state is None else like(state)
        return final_state(dense(x), whole(state), documents, N, W)

    @staticmethod
    @first_order
    def backward(ctx: Any, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.short_conv.kernels.launch import scatter

        dx, dstate = (
            dfinal.new_zeros(made[0], dtype=made[1]) if wanted else None
            for made, wanted in zip((ctx.x, ctx.state), ctx.needs_input_grad)
        )
        scatter(dfinal.contiguous(), ctx.documents, dx, dstate, ctx.x[0][1])
        return dx, dstate, None, None, None


def like(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype

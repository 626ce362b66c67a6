"""Attention residuals in Triton: each pass is one kernel, to which the sources go as they are, one by one.

The forward reads every source once.  The backward reads them once from memory and, right after, once more from the
second-level cache; it writes each gradient once, or adds to the sum that `share_gradient` keeps.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.ops.attn_res.shared import places_of, sums_of
from perilune.ops.blocks import as_rows
from perilune.ops.first_order import first_order
from perilune.ops.fused import DTYPES, dense_rows, unfit

WIDEST = 8192  # what the registers of a processor hold of a row and its sums
MOST = 16  # sources


@torch.compiler.disable  # a compiled function calls the kernels as they are, between its graphs
def attn_res_fused(
    query: Tensor,
    sources: Sequence[Tensor],
    key_weight: Tensor,
    eps: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """See `attn_res`."""
    with torch.cuda.device_of(query):  # kernels are launched on the current device
        return _Fused.apply(query, key_weight, norm_weight, eps, norm_eps, dtype, torch.is_grad_enabled(), *sources)


def refuses(
    query: Tensor,
    sources: Sequence[Tensor],
    key_weight: Tensor,
    eps: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    dtype: torch.dtype,
) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    first = sources[0]
    if (reason := unfit(*sources, query, key_weight, norm_weight)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"its kernels compute in float32, and {dtype} is asked for"
    if not 1 <= first.shape[-1] <= WIDEST:
        return f"it serves rows of 1 to {WIDEST} elements, and these have {first.shape[-1]}"
    if len(sources) > MOST:
        return f"it serves up to {MOST} sources, and there are {len(sources)}"
    if first.numel() // first.shape[-1] * 4 * (MOST + 1) >= 2**31:
        return "there are too many rows to count in 32 bits"
    return None


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class _Fused(torch.autograd.Function):
    """query, key_weight, norm_weight [D], N sources [..., D] -> [..., D].  Keeps the sources and two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_weight: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        norm_eps: float,
        dtype: torch.dtype,
        learning: bool,
        *sources: Tensor,
    ) -> Tensor:
        from perilune.ops.attn_res.kernels.launch import mix

        rows = [dense_rows(x) for x in sources]
        kept = None
        if learning and any(ctx.needs_input_grad):
            kept = query.new_empty(2, len(rows[0]), len(rows), dtype=torch.float32)
        out = mix(query.contiguous(), rows, key_weight.contiguous(), eps, dense(norm_weight), norm_eps, dtype, kept)
        if kept is not None:
            ctx.save_for_backward(query, key_weight, norm_weight, kept, *sources)
            ctx.norm_eps, ctx.sums = norm_eps, sums_of(sources)
        return out.view(sources[0].shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.attn_res.kernels.launch import unmix

        query, key_weight, norm_weight, kept, *sources = ctx.saved_tensors
        places, adds, gradients = places_of(sources, ctx.sums, ctx.needs_input_grad[7:])
        dw, dgain = unmix(
            query.contiguous(), [dense_rows(x) for x in sources], key_weight.contiguous(), dense(norm_weight),
            ctx.norm_eps, kept, dense_rows(dout), [None if x is None else as_rows(x) for x in places], adds,
        )  # fmt: skip
        dquery = (dw * key_weight.float()).to(query.dtype)
        dkey_weight = (dw * query.float()).to(key_weight.dtype)
        dnorm_weight = None if norm_weight is None or dgain is None else dgain.to(norm_weight.dtype)
        return dquery, dkey_weight, dnorm_weight, None, None, None, None, *gradients

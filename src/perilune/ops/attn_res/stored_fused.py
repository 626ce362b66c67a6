"""Attention residuals over a bank in float8, in Triton: half the bytes of bfloat16 are read, nothing is unpacked."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.ops.attn_res import reference
from perilune.ops.attn_res.fused import MOST, WIDEST
from perilune.ops.attn_res.shared import places_of, sums_of
from perilune.ops.attn_res.stored import FLOAT8, Stored
from perilune.ops.blocks import as_rows
from perilune.ops.first_order import first_order
from perilune.ops.fused import DTYPES, MOST_ROWS, dense_rows, unfit


@torch.compiler.disable
def float8_fused(
    query: Tensor, sources: Sequence[Stored], key_weight: Tensor, eps: float,
    norm_weight: Tensor | None, norm_eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `attn_res`."""
    tensors = [x for source in sources for x in source.tensors[:3]]
    with torch.cuda.device_of(query):  # kernels are launched on the current device
        h = _MixFloat8.apply(query, key_weight, eps, torch.is_grad_enabled(), *tensors)
    return reference.normalized(h, norm_weight, norm_eps).to(dtype)


def refuses(
    query: Tensor, sources: Sequence[Stored], key_weight: Tensor, eps: float,
    norm_weight: Tensor | None, norm_eps: float, dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """Why the kernels cannot serve a call, or None."""
    if reason := unfit(query, key_weight, norm_weight, *(x.scale for x in sources)):
        return reason
    if any(source.source.device != query.device for source in sources):
        return "the tensors are on more than one device"
    *bank, last = sources
    if any(not _in_float8(source) for source in bank) or not (_in_float8(last) or (last.kept is last.up is None)):
        return "it serves a bank in float8 and one whole source behind it"
    if not bank and not _in_float8(last):
        return "it serves a bank in float8, and there is none"
    if last.dtype not in DTYPES:
        return f"its kernels compute in float32, and the sources are {last.dtype}"
    D = last.shape[-1]
    if not 1 <= D <= WIDEST:
        return f"it serves rows of 1 to {WIDEST} elements, and these have {D}"
    if len(sources) > MOST:
        return f"it serves up to {MOST} sources, and there are {len(sources)}"
    if last.shape.numel() // D > MOST_ROWS // MOST:
        return "there are too many rows for its counters"
    return None


def _in_float8(source: Stored) -> bool:
    return source.kept is not None and source.kept.dtype == FLOAT8


class _MixFloat8(torch.autograd.Function):
    """query, key_weight [D], N times source, kept, scale -> [..., D]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_weight: Tensor, eps: float, learning: bool, *tensors: Tensor | None
    ) -> Tensor:
        from perilune.ops.attn_res.kernels.launch_float8 import mix_float8

        handles, codes, scales, live = _parted(tensors)
        kept = None
        if learning and any(ctx.needs_input_grad):
            kept = query.new_empty(2, len(codes[0]), len(handles), dtype=torch.float32)
        out = mix_float8(query.contiguous(), key_weight.contiguous(), codes, scales, live, eps, handles[0], kept)
        if kept is not None:
            ctx.save_for_backward(query, key_weight, kept, *tensors)
            ctx.sums = sums_of(handles)
        return out.view(handles[0].shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.attn_res.kernels.launch_float8 import unmix_float8

        query, key_weight, kept, *tensors = ctx.saved_tensors
        handles, codes, scales, live = _parted(tensors)
        places, adds, gradients = places_of(handles, ctx.sums, ctx.needs_input_grad[4::3])
        dw = unmix_float8(
            query.contiguous(), key_weight.contiguous(), codes, scales, live, kept, dense_rows(dout),
            [None if x is None else as_rows(x) for x in places], adds,
        )  # fmt: skip
        dquery = (dw * key_weight.float()).to(query.dtype)
        dkey_weight = (dw * query.float()).to(key_weight.dtype)
        spread = [x for gradient in gradients for x in (gradient, None, None)]
        return dquery, dkey_weight, None, None, *spread


def _parted(
    tensors: Sequence[Tensor | None],
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor | None]:
    """Where gradients go, codes as bytes [R, D], scales [R]; the whole source behind them [R, D], if there is one."""
    handles = [x for x in tensors[::3] if x is not None]
    codes = [as_rows(x).view(torch.uint8) for x in tensors[1::3] if x is not None]
    scales = [x.reshape(-1) for x in tensors[2::3] if x is not None]
    return handles, codes, scales, dense_rows(handles[-1]) if len(codes) < len(handles) else None

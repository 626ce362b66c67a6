"""Attention residuals with the sources side by side: as many launches for a hundred of them as for two.

For GPUs and more sources than the kernels serve.  Each pass stacks them for its own time; what the graph keeps is what
the chunked form keeps: references to the sources, and two numbers a row and source.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.ops import blocks
from perilune.ops.attn_res.shared import places_of, sums_of
from perilune.ops.autocast import without_autocast
from perilune.ops.blocks import as_rows
from perilune.ops.first_order import first_order


def stacks(rows: list[Tensor], compute: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, and the sources in them `[N, block, D]`."""
    N, (R, D) = len(rows), rows[0].shape
    step = max(1, blocks.DEVICE_BLOCK // max(1, N * D))
    for first in range(0, R, step):
        part = slice(first, first + step)
        yield part, torch.stack([v[part] for v in rows]).to(compute)


class Stacked(torch.autograd.Function):
    """query, key_weight [D], N sources [..., D] -> [..., D]; R rows in all."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        compute = torch.promote_types(sources[0].dtype, torch.float32)
        w = query.to(compute) * key_weight.to(compute)  # [D]
        rows = [as_rows(source) for source in sources]
        score, inverse_rms = w.new_empty(2, len(rows), len(rows[0])).unbind()  # [N, R] each
        out = torch.empty(sources[0].shape, dtype=sources[0].dtype, device=w.device)
        for part, v in stacks(rows, compute):
            as_rows(out)[part], score[:, part], inverse_rms[:, part] = mixture(v, w, eps)
        ctx.save_for_backward(query, key_weight, score, inverse_rms, *sources)
        ctx.sums = sums_of(sources)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives of `chunked.AttnRes`, for all sources at once."""
        query, key_weight, score, inverse_rms, *sources = ctx.saved_tensors
        compute = score.dtype
        w = query.to(compute) * key_weight.to(compute)
        dout = as_rows(dout)
        places, adds, dsources = places_of(sources, ctx.sums, ctx.needs_input_grad[3:])
        dw = torch.zeros_like(w)
        with without_autocast(w):
            for part, v in stacks([as_rows(source) for source in sources], compute):
                more, dv = derivatives(v, dout[part].to(compute), score[:, part], inverse_rms[:, part], w)
                dw += more
                put(dv, places, adds, part)
        dquery = (dw * key_weight.to(compute)).to(query.dtype)
        dkey_weight = (dw * query.to(compute)).to(key_weight.dtype)
        return dquery, dkey_weight, None, *dsources


def mixture(v: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """v: [N, block, D] -> their mixture [block, D]; scores and inverse norms, [N, block]."""
    r = (torch.linalg.vector_norm(v, dim=-1).square() / w.shape[0] + eps).rsqrt()
    s = (v @ w) * r
    return torch.einsum("nr,nrd->rd", torch.softmax(s, dim=0), v), s, r


def derivatives(v: Tensor, d: Tensor, s: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """From the mixture's gradient d [block, D]: what these rows give dw [D]; dv [N, block, D], in the place of v."""
    a = torch.softmax(s, dim=0)
    da = torch.einsum("rd,nrd->nr", d, v)
    ds = a * (da - (a * da).sum(0))
    along_w = ds * r
    along_v = along_w * s * r / -w.shape[0]
    dw = along_w.flatten() @ v.flatten(0, 1)
    dv = v.mul_(along_v.unsqueeze(-1))
    return dw, dv.addcmul_(a.unsqueeze(-1), d).addcmul_(along_w.unsqueeze(-1), w)


def put(dv: Sequence[Tensor] | Tensor, places: list[Tensor | None], adds: list[bool], part: slice) -> None:
    """Writes each source's gradient to its place, or adds it to the sum that is there, rounded once."""
    wanted = [(as_rows(place)[part], x, add) for place, x, add in zip(places, dv, adds) if place is not None]
    for into, x, add in wanted:
        if not add:
            into.copy_(x)
    sums, values = [into for into, _, add in wanted if add], [x for _, x, add in wanted if add]
    if sums and len({into.data_ptr() for into in sums}) == len(sums):
        torch._foreach_add_(sums, values)
        return
    for into, x in zip(sums, values):  # a source that was given more than once
        into.add_(x)

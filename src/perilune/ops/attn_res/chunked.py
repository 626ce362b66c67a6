"""Attention residuals source by source, in blocks of rows: neither pass stacks or copies the sources.

A network keeps its sources anyway, for they are its residual stream.  So the graph holds references to them and, beside
those, two numbers a row and source; the derivatives are written out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.ops.attn_res import reference
from perilune.ops.attn_res.shared import places_of, sums_of
from perilune.ops.attn_res.stacked import Stacked
from perilune.ops.autocast import without_autocast
from perilune.ops.blocks import as_rows, only_few, row_blocks
from perilune.ops.first_order import first_order

FEW_SOURCES = 4
"""Up to so many one by one on a GPU too; each of more would cost it a dozen launches."""


def attn_res(
    query: Tensor,
    sources: Sequence[Tensor],
    key_weight: Tensor,
    eps: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    dtype: torch.dtype,
) -> Tensor:
    if only_few(sources[0]):
        return reference.attn_res(query, sources, key_weight, eps, norm_weight, norm_eps, dtype)
    form = Stacked if sources[0].is_cuda and len(sources) > FEW_SOURCES else AttnRes
    h = form.apply(query, key_weight, eps, *sources)
    return reference.normalized(h, norm_weight, norm_eps).to(dtype)


class AttnRes(torch.autograd.Function):
    """query, key_weight [D], N sources [..., D] -> [..., D]; R rows in all."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        compute = torch.promote_types(sources[0].dtype, torch.float32)
        w = query.to(compute) * key_weight.to(compute)  # [D]
        rows = [as_rows(source) for source in sources]
        score, inverse_rms = w.new_empty(2, len(rows), len(rows[0]))  # [N, R] each
        out = torch.empty(sources[0].shape, dtype=sources[0].dtype, device=w.device)
        for first, last in row_blocks(rows[0]):
            block = [v[first:last].to(compute) for v in rows]
            s, r = score[:, first:last], inverse_rms[:, first:last]  # [N, block]
            torch.stack([v.square().mean(-1) for v in block], out=r)
            torch.stack([v @ w for v in block], out=s)
            a = torch.softmax(s.mul_(r.add_(eps).rsqrt_()), dim=0)
            mixed = block[0] * a[0].unsqueeze(-1)
            for v, a_i in zip(block[1:], a[1:]):
                mixed.addcmul_(v, a_i.unsqueeze(-1))
            as_rows(out)[first:last] = mixed
        ctx.save_for_backward(query, key_weight, score, inverse_rms, *sources)
        ctx.sums = sums_of(sources)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """With a the weights, s the scores, r the inverse norms and w = query * key_weight, for each row:

        ds_i = a_i (<dout, v_i> - sum_j a_j <dout, v_j>)          dw = sum_i ds_i r_i v_i
        dv_i = a_i dout + ds_i r_i w - (ds_i s_i r_i^2 / D) v_i
        """
        query, key_weight, score, inverse_rms, *sources = ctx.saved_tensors
        compute = score.dtype
        w = query.to(compute) * key_weight.to(compute)
        rows = [as_rows(source) for source in sources]
        D = w.shape[0]
        dout = as_rows(dout)
        places, adds, dsources = places_of(sources, ctx.sums, ctx.needs_input_grad[3:])
        dw = torch.zeros_like(w)
        for first, last in row_blocks(rows[0]):
            block = [v[first:last].to(compute) for v in rows]
            d = dout[first:last].to(compute)
            s, r = score[:, first:last], inverse_rms[:, first:last]  # [N, block]
            a = torch.softmax(s, dim=0)
            da = torch.stack([(d * v).sum(-1) for v in block])
            ds = a * (da - (a * da).sum(0))
            along_w = ds * r
            along_v = along_w * s * r / -D
            for i, v in enumerate(block):
                with without_autocast(v):
                    dw += along_w[i] @ v
                if (place := places[i]) is not None:
                    dv = (d * a[i].unsqueeze(-1)).addr_(along_w[i], w).addcmul_(v, along_v[i].unsqueeze(-1))
                    place = as_rows(place)[first:last]
                    place.copy_(dv.add_(place) if adds[i] else dv)
        dquery = (dw * key_weight.to(compute)).to(query.dtype)
        dkey_weight = (dw * query.to(compute)).to(key_weight.dtype)
        return dquery, dkey_weight, None, *dsources

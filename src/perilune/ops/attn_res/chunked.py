"""Attention residuals one source at a time: neither pass stacks or copies the sources.

A network keeps its sources anyway, for they are its residual stream.  So the graph holds references to them and, beside
those, two numbers a token and source; the backward pass is written out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        dtype, D = sources[0].dtype, sources[0].shape[-1]
        compute = torch.promote_types(dtype, torch.float32)
        w = query.to(compute) * key_weight.to(compute)  # [D]
        rows = [source.reshape(-1, D) for source in sources]  # N of [M, D]
        scores, inverse_rms = [], []
        for v in rows:
            v = v.to(compute)
            inverse_rms.append((torch.linalg.vector_norm(v, dim=-1).square_() / D + eps).rsqrt_())
            scores.append((v @ w).mul_(inverse_rms[-1]))
        score = torch.stack(scores)  # [N, M]
        weight = torch.softmax(score, dim=0)
        out = rows[0].to(compute) * weight[0].unsqueeze(-1)
        for v, a in zip(rows[1:], weight[1:]):
            out.addcmul_(v.to(compute), a.unsqueeze(-1))
        ctx.save_for_backward(query, key_weight, weight, score, torch.stack(inverse_rms), *sources)
        return out.to(dtype).view(sources[0].shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """With a the weights, s the scores, r the inverse norms and w = query * key_weight:

        ds_i = a_i (<dout, v_i> - sum_j a_j <dout, v_j>)          dw = sum_i ds_i r_i v_i
        dv_i = a_i dout + ds_i r_i w - (ds_i s_i r_i^2 / D) v_i
        """
        query, key_weight, weight, score, inverse_rms, *sources = ctx.saved_tensors
        dtype, D = sources[0].dtype, sources[0].shape[-1]
        compute = torch.promote_types(dtype, torch.float32)
        w = query.to(compute) * key_weight.to(compute)
        rows = [source.reshape(-1, D) for source in sources]
        dout = dout.reshape(-1, D).to(compute)
        dweight = torch.stack([(dout * v).sum(-1) for v in rows])  # [N, M]
        dscore = weight * (dweight - (weight * dweight).sum(0))
        along_w = dscore * inverse_rms
        along_v = along_w * score * inverse_rms / -D
        dw = torch.zeros_like(w)
        dsources = []
        for i, v in enumerate(rows):
            v = v.to(compute)
            dw += along_w[i] @ v
            dv = (dout * weight[i].unsqueeze(-1)).addr_(along_w[i], w).addcmul_(v, along_v[i].unsqueeze(-1))
            dsources.append(dv.to(dtype).view(sources[i].shape))
        dquery = (dw * key_weight.to(compute)).to(query.dtype)
        dkey_weight = (dw * query.to(compute)).to(key_weight.dtype)
        return dquery, dkey_weight, None, *dsources


def attn_res(query: Tensor, sources: Sequence[Tensor], key_weight: Tensor, eps: float) -> Tensor:
    return AttnRes.apply(query, key_weight, eps, *sources)

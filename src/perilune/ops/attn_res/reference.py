"""Attention residuals as the equations read: stack the sources, score them, mix them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res(
    query: Tensor,
    sources: Sequence[Tensor],
    key_weight: Tensor,
    eps: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """softmax over sources of <query * key_weight, source / rms(source)>, applied to the raw sources."""
    v = stacked(sources)
    h = (weights(query, v, key_weight, eps).unsqueeze(-1) * v).sum(0)
    return normalized(h, norm_weight, norm_eps).to(dtype)


def normalized(h: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """h / rms(h) * weight, in at least float32; h itself without a weight."""
    if weight is None:
        return h
    h = h.to(torch.promote_types(h.dtype, torch.float32))
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.to(h.dtype)


def weights(query: Tensor, v: Tensor, key_weight: Tensor, eps: float) -> Tensor:
    """How much each token takes of each source: `v: [N, ..., D]` to `[N, ...]`, of sum 1 over the sources."""
    key = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    score = key @ (query.to(v.dtype) * key_weight.to(v.dtype))  # [N, ...]
    return torch.softmax(score, dim=0)


def stacked(sources: Sequence[Tensor]) -> Tensor:
    """`[N, ..., D]` in float32, or float64 if that is what they are."""
    compute = torch.promote_types(sources[0].dtype, torch.float32)
    return torch.stack([source.to(compute) for source in sources])

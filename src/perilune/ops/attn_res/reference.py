"""Attention residuals as the equations read: stack the sources, score them, mix them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res(query: Tensor, sources: Sequence[Tensor], key_weight: Tensor, eps: float) -> Tensor:
    """softmax over sources of <query * key_weight, source / rms(source)>, applied to the raw sources."""
    dtype = sources[0].dtype
    compute = torch.promote_types(dtype, torch.float32)
    v = torch.stack([source.to(compute) for source in sources])  # [N, ..., D]
    key = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    score = key @ (query.to(compute) * key_weight.to(compute))  # [N, ...]
    return (torch.softmax(score, dim=0).unsqueeze(-1) * v).sum(0).to(dtype)

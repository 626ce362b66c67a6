"""The two phases in Triton, for decoding and prefill: values without derivatives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.ops.attn_res import fused
from perilune.ops.blocks import as_rows
from perilune.ops.fused import DTYPES, dense_rows

MOST_QUERIES = 64


def refuses_bank(queries: Tensor, sources: Sequence[Tensor], key_weights: Tensor, *, eps: float) -> str | None:
    """Why the kernels cannot serve the first phase of a call, or None."""
    if _learning(queries, key_weights, *sources):
        return "its kernels have no derivative, and an input wants a gradient"
    if len(queries) > MOST_QUERIES or not len(queries):
        return f"it serves 1 to {MOST_QUERIES} queries, and there are {len(queries)}"
    return fused.refuses(queries, sources, key_weights, eps, None, eps, torch.float32)


def refuses_merge(
    m: Tensor,
    l: Tensor,
    o: Tensor,
    query: Tensor,
    source: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    update: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> str | None:
    """Why the kernel cannot serve the second phase of a call, or None."""
    others = [x for x in (update, norm_weight) if x is not None]
    if _learning(m, l, o, query, source, key_weight, *others):
        return "its kernel has no derivative, and an input wants a gradient"
    if m.dtype != torch.float32 or l.dtype != torch.float32 or o.dtype not in DTYPES:
        return f"its kernel computes in float32, and the partial mixture is {m.dtype}, {o.dtype}"
    if {x.device for x in (m, l, o)} != {source.device}:
        return "the tensors are on more than one device"
    sources = [source] if update is None else [source, update]
    return fused.refuses(query, sources, key_weight, eps, norm_weight, norm_eps, source.dtype)


@torch.compiler.disable
def bank(
    queries: Tensor, sources: Sequence[Tensor], key_weights: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """m, l [Q, ...] and o [Q, ..., D] in float32."""
    from perilune.ops.attn_res.kernels.launch_two_phase import bank as launch

    shape = sources[0].shape
    with torch.cuda.device_of(queries):  # kernels are launched on the current device
        m, l, o = launch(queries, [dense_rows(x) for x in sources], key_weights, eps)
    lead = (len(queries), *shape[:-1])
    return m.view(lead), l.view(lead), o.view(*lead, shape[-1])


@torch.compiler.disable
def merge(
    m: Tensor,
    l: Tensor,
    o: Tensor,
    query: Tensor,
    source: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    update: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """The mixture, and the source with its update, both [..., D]."""
    from perilune.ops.attn_res.kernels.launch_two_phase import merge as launch

    with torch.cuda.device_of(source):
        out, summed = launch(
            m.reshape(-1).contiguous(), l.reshape(-1).contiguous(), as_rows(o).contiguous(), dense_rows(source),
            None if update is None else dense_rows(update), query.contiguous(), key_weight.contiguous(),
            None if norm_weight is None else norm_weight.contiguous(), eps, norm_eps,
        )  # fmt: skip
    return out.view(source.shape), source if summed is None else summed.view(source.shape)


def _learning(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

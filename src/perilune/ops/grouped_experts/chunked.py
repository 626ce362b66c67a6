"""The fast path in plain torch: sort by expert, grouped products, and a backward written by hand."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from perilune.ops.first_order import first_order
from perilune.ops.grouped_experts.activation import Activation, GatedActivation
from perilune.ops.grouped_experts.products import grouped_outer, grouped_product


@torch.compiler.disable  # how many rows an expert has is data; a graph would break here anyway
def grouped_experts_chunked(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: Activation = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
) -> Tensor:
    """See `grouped_experts`.

    On a CPU, 16-bit inputs are computed in float32 and rounded once: few CPUs multiply them faster.
    """
    layout = sort_by_expert(ids, w_gate.shape[0])
    dtype = x.dtype
    if x.device.type == "cpu" and dtype.itemsize < 4:
        x, w_gate, w_up, w_down = (t.float() for t in (x, w_gate, w_up, w_down))
    f = GatedActivation(activation, beta_gate, beta_up)
    out = _GroupedExperts.apply(
        x.contiguous(), w_gate.contiguous(), w_up.contiguous(), w_down.contiguous(), weights, f, *layout
    )
    return out.to(dtype)


class Layout(NamedTuple):
    """Where the P occupied of M * top_k slots lie when rows are sorted by expert, and the way back."""

    slot: Tensor  # [P], slot of each row
    token: Tensor  # [P], token of each row
    counts: Tensor  # [E], rows of each expert
    row: Tensor  # [P], row of each occupied slot, by slot
    start: Tensor  # [M], where each token's slots begin in `row`


def sort_by_expert(ids: Tensor, num_experts: int) -> Layout:
    """The layout of `ids: [M, top_k]`; slots of id -1 are empty and have no row."""
    top_k = max(ids.shape[1], 1)
    flat = ids.flatten().long()
    counts = torch.bincount(flat + 1, minlength=num_experts + 1)
    slot = flat.argsort(stable=True)[int(counts[0]) :]
    row = torch.empty_like(flat).index_copy_(0, slot, torch.arange(slot.numel(), device=flat.device))
    occupied = ids >= 0
    per_token = occupied.sum(-1)
    return Layout(slot, slot // top_k, counts[1:], row[occupied.flatten()], per_token.cumsum(0) - per_token)


class _GroupedExperts(torch.autograd.Function):
    """Keeps the inputs, the gate's projection and the up branch; everything else is computed again.

    The gradient of a routing weight needs no expert output: for y = sum_e p_e W2 a_e,
    dp_e = <dy, W2 a_e> = <W2^T dy, a_e>, and W2^T dy is needed for the activation anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        weights: Tensor,
        f: GatedActivation,
        *layout: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        slot, token, counts, row, start = layout
        rows = x.index_select(0, token)  # [P, D]
        inner = grouped_product(rows, torch.cat([w_gate, w_up], 1).mT, counts)  # [P, 2 F]
        gate, up = inner.chunk(2, -1)
        raised = f.raised(up.to(wide))
        y = grouped_product(f(gate.to(wide), raised).to(x.dtype), w_down.mT, counts)  # [P, D]
        ctx.save_for_backward(x, w_gate, w_up, w_down, weights, gate.contiguous(), raised.to(x.dtype), *layout)
        ctx.f = f
        p = weights.flatten().to(wide)
        p = p if p.numel() == slot.numel() else p[slot.sort().values]  # of the occupied slots
        return _sum_to_tokens(y.to(wide), row, start, p).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, w_gate, w_up, w_down, weights, gate, raised, slot, token, counts, row, start = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        need_x, need_gate, need_up, need_down, need_weights = ctx.needs_input_grad[:5]
        dx = dw_gate = dw_up = dw_down = dweights = None
        dy = dout.index_select(0, token)  # [P, D], not yet weighted
        p = weights.flatten().index_select(0, slot).to(wide).unsqueeze(-1)  # [P, 1]
        a, a_gate, a_up = ctx.f.with_derivatives(gate.to(wide), raised.to(wide))
        da = grouped_product(dy, w_down, counts).to(wide)  # [P, F]
        if need_weights:
            dweights = weights.new_zeros(weights.numel())
            dweights.index_copy_(0, slot, torch.linalg.vecdot(da, a).to(weights.dtype))
            dweights = dweights.view_as(weights)
        if need_down:
            dw_down = grouped_outer(dy, a.mul_(p).to(x.dtype), counts)
        da = da.mul_(p)
        dinner = da.new_empty(da.shape[0], 2 * da.shape[1])  # [P, 2 F]
        for half, slope in zip(dinner.chunk(2, -1), (a_gate, a_up)):
            torch.mul(slope, da, out=half)
        dinner = dinner.to(x.dtype)
        if need_x:
            drows = grouped_product(dinner, torch.cat([w_gate, w_up], 1), counts)
            dx = _sum_to_tokens(drows.to(wide), row, start).to(x.dtype)
        if need_gate or need_up:
            dw_gate, dw_up = grouped_outer(dinner, x.index_select(0, token), counts).chunk(2, 1)
        return dx, dw_gate, dw_up, dw_down, dweights, None, *[None] * len(Layout._fields)


def _sum_to_tokens(rows: Tensor, row: Tensor, start: Tensor, p: Tensor | None = None) -> Tensor:
    """Each token's rows summed in the order of its slots, weighted by p: `[P, D] -> [M, D]`, zero without a row."""
    if rows.shape[0] == 0:
        return rows.new_zeros(start.numel(), rows.shape[-1])
    return embedding_bag(row, rows, start, mode="sum", per_sample_weights=p)

"""The fast path in plain torch: sort by expert, grouped products, and a backward written by hand."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.core.errors import ShapeError
from perilune.ops.grouped_experts.activation import Activation, GatedActivation
from perilune.ops.grouped_experts.products import grouped_outer, grouped_product


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
    order, counts = sort_by_expert(ids, w_gate.shape[0])
    dtype = x.dtype
    if x.device.type == "cpu" and dtype.itemsize < 4:
        x, w_gate, w_up, w_down = (t.float() for t in (x, w_gate, w_up, w_down))
    f = GatedActivation(activation, beta_gate, beta_up)
    return _GroupedExperts.apply(x, w_gate, w_up, w_down, weights, order, counts, f).to(dtype)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(flat slot numbers ordered by expert `[P]`, slots of each expert `[E]`); empty slots, id -1, are left out."""
    flat = ids.flatten()
    counts = torch.bincount(flat + 1, minlength=num_experts + 1)
    if counts.numel() > num_experts + 1:
        raise ShapeError(
            f"ids: expected expert numbers below {num_experts}, got {counts.numel() - 2}; route among the experts given"
        )
    return flat.argsort(stable=True)[int(counts[0]) :], counts[1:]


class _GroupedExperts(torch.autograd.Function):
    """Keeps the inputs and the gate and up projections; everything else is computed again.

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
        order: Tensor,
        counts: Tensor,
        f: GatedActivation,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        M, top_k = weights.shape
        rows = x[order // top_k]  # [P, D]
        gate = grouped_product(rows, w_gate.mT, counts)  # [P, F]
        up = grouped_product(rows, w_up.mT, counts)
        y = grouped_product(f(gate.to(wide), up.to(wide)).to(x.dtype), w_down.mT, counts)  # [P, D]
        slots = _to_slots(y.to(wide), order, M * top_k).unflatten(0, (M, top_k))
        ctx.save_for_backward(x, w_gate, w_up, w_down, weights, order, counts, gate, up)
        ctx.f = f
        return (weights.to(wide).unsqueeze(1) @ slots).squeeze(1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, w_gate, w_up, w_down, weights, order, counts, gate, up = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        M, top_k = weights.shape
        token = order // top_k
        dy = dout[token]  # [P, D], not yet weighted
        p = weights.flatten()[order].to(wide).unsqueeze(-1)  # [P, 1]
        a, a_gate, a_up = ctx.f.with_derivatives(gate.to(wide), up.to(wide))
        da = grouped_product(dy, w_down, counts).to(wide)  # [P, F]
        dweights = dx = dw_gate = dw_up = dw_down = None
        if ctx.needs_input_grad[4]:
            dweights = _to_slots((da * a).sum(-1, keepdim=True), order, M * top_k).view(M, top_k).to(weights.dtype)
        if ctx.needs_input_grad[3]:
            dw_down = grouped_outer(dy, a.mul_(p).to(x.dtype), counts)
        da = da.mul_(p)
        dgate, dup = a_gate.mul_(da).to(x.dtype), a_up.mul_(da).to(x.dtype)
        if ctx.needs_input_grad[0]:
            drows = grouped_product(dgate, w_gate, counts).to(wide) + grouped_product(dup, w_up, counts)
            dx = _to_slots(drows, order, M * top_k).unflatten(0, (M, top_k)).sum(1).to(x.dtype)
        rows = x[token] if ctx.needs_input_grad[1] or ctx.needs_input_grad[2] else x
        if ctx.needs_input_grad[1]:
            dw_gate = grouped_outer(dgate, rows, counts)
        if ctx.needs_input_grad[2]:
            dw_up = grouped_outer(dup, rows, counts)
        return dx, dw_gate, dw_up, dw_down, dweights, None, None, None


def _to_slots(rows: Tensor, order: Tensor, slots: int) -> Tensor:
    """Rows sorted by expert back in the order of the slots, zero where a slot is empty: `[P, D] -> [slots, D]`."""
    return rows.new_zeros(slots, rows.shape[-1]).index_copy_(0, order, rows)

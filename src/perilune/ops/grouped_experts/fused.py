"""The experts on a Hopper GPU: rows sorted by expert, products on its tensor cores, and a backward written by hand.

Nothing on the way looks at a tensor's numbers from outside the device, and all sizes follow from shapes, so a call can
be captured in a CUDA graph.  The kernels are imported when they are first needed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from perilune.ops.first_order import first_order
from perilune.ops.fused import out_of_reach
from perilune.ops.grouped_experts.activation import Activation, GatedActivation
from perilune.ops.hopper import not_hopper

WIDTH = 128  # of tiles: widths are its multiples, or are filled up to them
WASTE = 1.5  # times the work that filling up may cost
ROOM = 2**31  # rows and columns are counted in 32 bits


@torch.compiler.disable  # a compiled function calls the kernels as they are, between its graphs
def grouped_experts_fused(
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
    """See `grouped_experts`."""
    f = GatedActivation(activation, beta_gate, beta_up)
    D = x.shape[1]
    tensors = *(t.contiguous() for t in widened(x, w_gate, w_up, w_down)), ids, weights
    with torch.cuda.device_of(x):  # kernels are launched on the current device
        return _Fused.apply(*tensors, f, torch.is_grad_enabled())[:, :D]


def widened(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, ...]:
    """The same with zeros up to the next multiples of WIDTH, which change nothing: f(0, 0) = 0."""
    D, F = (-size % WIDTH for size in w_gate.shape[:0:-1])
    if not D and not F:
        return x, w_gate, w_up, w_down
    return pad(x, (0, D)), *_Widened.apply(w_gate, w_up, w_down, D, F)


def refuses(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, **options: Any
) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    D, (E, F, _) = x.shape[1], w_gate.shape
    if (reason := out_of_reach(x) or not_hopper(x)) is not None:
        return reason
    if x.dtype != torch.bfloat16:
        return f"its kernels multiply bfloat16, and x is {x.dtype}"
    if weights.dtype == torch.float64:
        return "it adds in float32, and weights are float64"
    if not ids.numel() or not E or not D * F:
        return "there is nothing to do"
    wide_D, wide_F = D + -D % WIDTH, F + -F % WIDTH
    if wide_D * wide_F > WASTE * D * F:
        return (
            f"it serves widths that are multiples of {WIDTH}, and x is {D} wide, an expert {F}: "
            f"filled up they would take {wide_D * wide_F / (D * F):.1f} times the work"
        )
    if E * max(wide_D, wide_F) >= ROOM or ids.numel() >= ROOM:
        return "there are too many rows for 32-bit coordinates"
    if (wide_D, wide_F) == (D, F) and any(t.data_ptr() % 16 for t in (x, w_gate, w_up, w_down)):
        return "a tensor does not begin at a multiple of 16 bytes"
    return None


class _Widened(torch.autograd.Function):
    """w_gate, w_up [E, F, D], w_down [E, D, F] with so many more zeros along F and D: one filling and a copy each."""

    @staticmethod
    def forward(ctx: Any, w_gate: Tensor, w_up: Tensor, w_down: Tensor, D: int, F: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shapes = [w.shape for w in (w_gate, w_up, w_down)]
        E, rows, columns = w_gate.shape
        room = w_gate.new_zeros(3, E, (rows + F) * (columns + D))
        wide = [room[0].view(E, rows + F, -1), room[1].view(E, rows + F, -1), room[2].view(E, columns + D, -1)]
        for into, w in zip(wide, (w_gate, w_up, w_down)):
            into[:, : w.shape[1], : w.shape[2]].copy_(w)
        return tuple(wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Views: whoever casts them next reads no zeros."""
        own = [None if g is None else g[:, :rows, :columns] for g, (_, rows, columns) in zip(grads, ctx.shapes)]
        return *own, None, None


class _Fused(torch.autograd.Function):
    """Keeps the inputs and the two projections; the rest is computed again, as in the chunked form."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        ids: Tensor,
        weights: Tensor,
        f: GatedActivation,
        learning: bool,
    ) -> Tensor:
        from perilune.ops.grouped_experts.kernels.launch import HEIGHT, activated_product, gather, product, spread
        from perilune.ops.grouped_experts.kernels.layout import sort_by_expert

        layout = sort_by_expert(ids, w_gate.shape[0], HEIGHT)
        keep = learning and any(ctx.needs_input_grad)
        a, gates, ups = activated_product(spread(x, layout), w_gate, w_up, f, layout, keep=keep)  # [P, F]
        y = product(a, w_down, layout)  # [P, D], not yet weighted
        if keep:
            ctx.save_for_backward(x, w_gate, w_up, w_down, weights, gates, ups, *layout)
            ctx.f = f
        return gather(y, layout, weights.float().contiguous())

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.grouped_experts.kernels.launch import gather, outer_product, slopes, spread, turned_product
        from perilune.ops.grouped_experts.kernels.layout import Layout

        x, w_gate, w_up, w_down, weights, gates, ups, *rest = ctx.saved_tensors
        layout = Layout(*rest)
        need_x, need_gate, need_up, need_down, _, need_weights = ctx.needs_input_grad[:6]
        dx = dw_gate = dw_up = dw_down = None
        dy = spread(dout.contiguous(), layout)  # [P, D], not yet weighted
        da = turned_product(dy, w_down, layout)  # [P, F]
        dinner, weighted, dweights = slopes(da, gates, ups, weights.float().contiguous(), ctx.f, layout)
        del da
        if need_down:
            (dw_down,) = outer_product(dy, weighted, layout)
        del dy, weighted
        if need_x:
            dx = gather(turned_product(dinner, w_gate, layout, w_up), layout)
        if need_gate or need_up:
            dw_gate, dw_up = outer_product(dinner, spread(x, layout), layout, halves=True)
        return dx, dw_gate, dw_up, dw_down, None, dweights.to(weights.dtype) if need_weights else None, None, None

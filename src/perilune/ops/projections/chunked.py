"""All maps in one node of the graph.

Left to autograd, N layers cast N weights one by one, write N gradients of x and add them up, and cast every weight's
gradient back.  Here the weights are cast in one launch, every map adds its part to the gradient of x where it stands,
inside its product, and on a GPU the weights' gradients leave their products as wide as the weights are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perilune.ops.autocast import dtype_for_products, without_autocast
from perilune.ops.blocks import as_rows
from perilune.ops.first_order import first_order
from perilune.ops.projections.copies import cast


def projections(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """See the public function."""
    dtype = dtype_for_products(x)
    with without_autocast(x):
        return _Projections.apply(x.to(dtype), dtype, *weights)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy^T x, summed in float32 at least, in `dtype`: [N, D] of dy [R, N] and x [R, D]."""
    if dtype == torch.float32 != dy.dtype and dy.is_cuda:  # the product's own sums, never rounded to 16 bits
        return torch.mm(dy.T, x, out_dtype=dtype)
    return (dy.T @ x).to(dtype)


class _Projections(torch.autograd.Function):
    """x [..., D] and N weights [D_i, D] -> N results [..., D_i].  Keeps x and the weights as they were multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        used = cast(weights, dtype)
        rows = as_rows(x)
        ctx.save_for_backward(x, *used)
        ctx.dtypes = [w.dtype for w in weights]
        return tuple((rows @ w.T).view(*x.shape[:-1], len(w)) for w in used)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *used = ctx.saved_tensors
        want_x, _, *wanted = ctx.needs_input_grad
        rows = as_rows(x)
        dx: Tensor | None = None
        dweights: list[Tensor | None] = []
        for dy, w, want, dtype in zip(grads, used, wanted, ctx.dtypes):
            dy = None if dy is None else as_rows(dy)
            dweights.append(None if dy is None or not want else weight_gradient(dy, rows, dtype))
            if want_x and dy is not None:
                dx = (
                    dy @ w if dx is None else torch.addmm(dx, dy, w, out=dx)
                )  # in place, as addmm_; FLOP counters know it
        return None if dx is None else dx.view(x.shape), None, *dweights

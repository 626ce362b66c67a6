"""Routing on a GPU: one kernel forward, one backward.  They are imported when they are first needed."""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.first_order import first_order
from perilune.ops.fused import DTYPES, dense_rows, out_of_reach
from perilune.ops.route import reference

WIDEST = 1024  # experts: a token's keys are held in one warp's registers
MOST = 32  # chosen: they are found one after the other


@torch.compiler.disable  # a compiled function calls the kernels as they are, between its graphs
def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See the public function."""
    with torch.cuda.device_of(scores):  # kernels are launched on the current device
        ids, values = _Route.apply(scores, None, k, False, 1.0, None)
    return values, ids


@torch.compiler.disable
def route(
    scores: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See the public function."""
    with torch.cuda.device_of(scores):
        return _Route.apply(scores, bias, top_k, renormalize, scaling, ids)


def topk_refuses(scores: Tensor, k: int) -> str | None:
    """Why the kernel cannot serve a call, or None."""
    if (reason := out_of_reach(scores)) is not None:
        return reason
    if scores.dtype not in DTYPES:
        return f"it compares in float32, and scores are {scores.dtype}"
    if scores.shape[-1] > WIDEST or k > MOST:
        return f"it takes up to {MOST} of up to {WIDEST}, and this is {k} of {scores.shape[-1]}"
    return None


def refuses(
    scores: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float, ids: Tensor | None
) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    if bias.dtype not in DTYPES or bias.device != scores.device:
        return f"scores are {scores.dtype} on {scores.device}, and the bias is {bias.dtype} on {bias.device}"
    return topk_refuses(scores, top_k)


def ceiling(n: int) -> int:
    """The next power of two, as many as a warp has threads at least."""
    return max(32, 1 << (n - 1).bit_length())


class _Route(torch.autograd.Function):
    """scores [..., E], bias [E] or None -> ids, weights [..., k].  Keeps the scores and the ids."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, bias: Tensor | None, k: int, renormalize: bool, scaling: float, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from perilune.ops.route.kernels import route_kernel

        rows = dense_rows(scores)
        M, E = rows.shape
        if chosen is not None:  # when a layer is computed again, and so not in most steps
            ids = chosen.reshape(M, k)
            weights = reference.weigh(rows, ids, renormalize, scaling)
        else:
            ids, weights = rows.new_empty(M, k, dtype=torch.int64), rows.new_empty(M, k)
        if M and chosen is None:
            route_kernel[(M,)](
                rows, rows.stride(0), None if bias is None else bias.contiguous(), ids, weights, E, k, float(scaling),
                RENORMALIZE=renormalize, BLOCK=ceiling(E), COUNT=ceiling(k), num_warps=1,
            )  # fmt: skip
        ctx.save_for_backward(rows, ids)
        ctx.options, ctx.shape = (renormalize, float(scaling)), scores.shape
        shape = (*scores.shape[:-1], k)
        ids = ids.view(shape)
        ctx.mark_non_differentiable(ids)
        return ids, weights.view(shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.route.kernels import route_grads_kernel

        rows, ids = ctx.saved_tensors
        renormalize, scaling = ctx.options
        (M, E), k = rows.shape, ids.shape[1]
        dscores = rows.new_empty(M, E)
        if M:
            route_grads_kernel[(M,)](
                rows, rows.stride(0), ids, dweights.contiguous(), dscores, E, scaling,
                RENORMALIZE=renormalize, BLOCK=ceiling(E), K=k, num_warps=1,
            )  # fmt: skip
        return dscores.view(ctx.shape), None, None, None, None, None

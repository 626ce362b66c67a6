"""Gradients of a source that many mixers read, summed where they are made.

Left to autograd, every mixer writes a gradient of its own for each source, and the sum reads and writes it again: of a
source with 24 readers, 24 copies.  A source that has passed through `share_gradient` has one sum instead, which each
mixer's backward adds to in place.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Shared(torch.autograd.Function):
    """The identity.  Its node in the graph, `ctx`, holds the sum while a backward pass goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sum, ctx.task = None, None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        total, ctx.sum = ctx.sum, None
        if total is None or ctx.task != _task():
            return grad
        return total if grad is None else total.add_(grad)


def share_gradient(x: Tensor) -> Tensor:
    """x itself, for `attn_res` to read any number of times: its gradient is one tensor that all readers add to.

    The sum is in x's dtype, rounded after each reader as autograd's own would be.  It is complete in x, not in what is
    returned: ask for gradients of x, and hang no hooks on the result.  Other operations may read the result as well.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if isinstance(x.grad_fn, _Shared._backward_cls):  # has passed already
        return x
    return _Shared.apply(x)


def sums_of(sources: Sequence[Tensor]) -> list[Any]:
    """The node of each source that came out of `share_gradient`, None for others."""
    if torch.compiler.is_compiling():
        return [None] * len(sources)
    return [x.grad_fn if isinstance(x.grad_fn, _Shared._backward_cls) else None for x in sources]


def places_of(
    sources: Sequence[Tensor], sums: Sequence[Any], wanted: Sequence[bool]
) -> tuple[list[Tensor | None], list[bool], list[Tensor | None]]:
    """For a mixer's backward pass: where each gradient goes, dense and of the source's shape, or None if it is not
    wanted; whether it has to be added to what stands there; and what to return to autograd for each.
    """
    places: list[Tensor | None] = []
    adds, gradients = [], []
    for x, node, want in zip(sources, sums, wanted):
        place, add = None, False
        if want and node is not None:
            if node.task != _task():  # also of a pass that never came to the node
                node.sum, node.task = None, _task()
            add = node.sum is not None
            if not add:
                node.sum = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            place = node.sum
        elif want:
            place = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        places.append(place)
        adds.append(add)
        gradients.append(place if node is None else None)
    return places, adds, gradients


def _task() -> int:
    """Which backward pass is running."""
    return torch._C._current_graph_task_id()

"""Backward passes written by hand, which cannot themselves be differentiated."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A second derivative raises, always.

    torch's `once_differentiable` alone lets it pass, as 0, where the incoming gradient is a constant: in the gradient
    penalty of a sum, say.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def refusing(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # somebody asked for a graph of this pass
            grads = tuple(None if grad is None else grad.detach().requires_grad_() for grad in grads)
        return once(ctx, *grads)

    return refusing

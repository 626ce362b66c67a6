"""What a graph keeps, as torch itself tells: every storage that a saved tensor lies in, once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes saved for the backward pass by a training forward of `ids`; parameters and buffers are not counted."""
    result, size = saved_by(model, lambda: model(ids, targets=ids.roll(-1, 1)).loss)
    assert result.requires_grad
    return size


def saved_by(model: nn.Module, function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """`function(*args)`, and the bytes that it saves beside its arguments and the model's parameters and buffers."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    owned = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), *tensors)}
    saved: dict[int, Tensor] = {}  # they stay alive, so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in owned:
            saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function(*args)
    return result, sum(x.untyped_storage().nbytes() for x in saved.values())

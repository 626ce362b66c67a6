"""What a graph keeps, as torch itself tells: every storage that a saved tensor lies in, once."""

import torch
from torch import Tensor, nn


def kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes saved for the backward pass by a training forward of `ids`; parameters and buffers are not counted."""
    owned = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}  # they stay alive, so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in owned:
            saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, targets=ids.roll(-1, 1)).loss
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for x in saved.values())

"""Value and index as one integer: a library's top-k promises no order among equals, and so there are none."""

from functools import partial

import torch
from torch import Tensor

from perilune.ops.route import reference


def topk(scores: Tensor, k: int) -> Tensor:
    """ids [..., k] of scores [..., E], float32 or less."""
    keys = scores.detach().float()
    E = keys.shape[-1]
    bits = (keys + 0.0).view(torch.int32)  # adding 0 makes -0 and +0 equal
    sortable = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats order backwards as integers
    from_end = torch.arange(E - 1, -1, -1, device=keys.device)
    packed = (sortable.long() << 32) + from_end
    return E - 1 - (packed.topk(k, dim=-1).values & 0xFFFFFFFF)


stable_topk = partial(reference.stable_topk, ids_of=topk)
route = partial(reference.route, ids_of=topk)


def refuses(scores: Tensor, *rest: object) -> str | None:
    """Why values cannot be packed, or None.  rest: what else a call has; a bias may be wider than the scores."""
    wide = [x.dtype for x in (scores, *rest) if isinstance(x, Tensor) and x.dtype == torch.float64]
    return "a value of float64 leaves no room for an index" if wide else None

"""The oracle: a stable sort, in any dtype; and the weights of what was chosen, for every form in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor

TopK = Callable[[Tensor, int], Tensor]


def topk(scores: Tensor, k: int) -> Tensor:
    """ids [..., k] of scores [..., E]."""
    keys = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def stable_topk(scores: Tensor, k: int, ids_of: TopK = topk) -> tuple[Tensor, Tensor]:
    """See the public function."""
    ids = ids_of(scores, k)
    return scores.gather(-1, ids), ids


def route(
    scores: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float, ids: Tensor | None, ids_of: TopK = topk
) -> tuple[Tensor, Tensor]:
    """See the public function."""
    if ids is None:
        ids = ids_of(scores.detach() + bias.detach(), top_k)
    return ids, weigh(scores, ids, renormalize, scaling)


def weigh(scores: Tensor, ids: Tensor, renormalize: bool, scaling: float) -> Tensor:
    """The weights of what was chosen: [..., top_k]."""
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling

"""Which experts a token takes, and with which weights.  One function for training and inference."""

import torch
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.nn.precision import at_least_float32


def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest along the last axis, falling; among equals the lowest index first, on every device and every run.

    `[..., E] -> values [..., k], ids [..., k]` (int64).  Values carry the gradient of `scores`; 16-bit scores are
    compared as float32.  Raises ShapeError unless 1 <= k <= E.
    """
    E = scores.shape[-1]
    if not 1 <= k <= E:
        raise ShapeError(f"k: expected 1 to {E}, got {k}; choose among the scores there are")
    keys = at_least_float32(scores.detach())
    if keys.dtype == torch.float64:
        ids = keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    else:
        ids = _topk_by_value_then_index(keys, k)
    return scores.gather(-1, ids), ids


def _topk_by_value_then_index(keys: Tensor, k: int) -> Tensor:
    """Packs (float32 pattern made sortable, index from the end) into one int64, so that no two keys are equal."""
    E = keys.shape[-1]
    bits = (keys + 0.0).view(torch.int32)  # adding 0 makes -0 and +0 equal
    sortable = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats order backwards as integers
    from_end = torch.arange(E - 1, -1, -1, device=keys.device)
    packed = (sortable.long() << 32) + from_end
    return E - 1 - (packed.topk(k, dim=-1).values & 0xFFFFFFFF)


def route(
    scores: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling: float = 1.0,
    num_groups: int = 1,
    topk_group: int = 1,
    best_of_group: int = 2,
) -> tuple[Tensor, Tensor]:
    """Chooses by s + b, weighs by s (K3 report, 2.3).

        T_i = argtop_k(s_i + b),     p_ij = scaling s_ij / (sum_{r in T_i} s_ir + 1e-20)   for j in T_i

    With more than one group, experts form `num_groups` equal runs; a group scores the sum of its `best_of_group`
    largest s + b (two in DeepSeek-V3, one in DeepSeek-V2), and only the experts of the best `topk_group` groups can be
    chosen.

    scores: `[..., E]`, float32 or better: in 16 bits near-equal experts tie.  bias: `[E]`, for selection only.
    Returns (ids `[..., top_k]` int64, by falling s + b, ties to the lowest index; weights `[..., top_k]`, float32 or
    float64).  Gradients reach `scores` through the weights; bias gets none.  Raises ShapeError.
    """
    scores = at_least_float32(scores)
    biased = scores.detach() + bias.detach()
    if num_groups > 1:
        biased = _only_best_groups(biased, top_k, num_groups, topk_group, best_of_group)
    ids = stable_topk(biased, top_k)[1]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def _only_best_groups(biased: Tensor, top_k: int, num_groups: int, topk_group: int, best_of_group: int) -> Tensor:
    E = biased.shape[-1]
    if E % num_groups or not 1 <= topk_group <= num_groups or topk_group * (E // num_groups) < top_k:
        raise ShapeError(
            f"num_groups, topk_group: expected groups dividing {E} experts with room for {top_k} choices, "
            f"got {num_groups}, {topk_group}; keep more groups or make them larger"
        )
    grouped = biased.unflatten(-1, (num_groups, -1))  # [..., G, E / G]
    group_scores = grouped.topk(min(best_of_group, E // num_groups), dim=-1).values.sum(-1)
    kept = stable_topk(group_scores, topk_group)[1]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)

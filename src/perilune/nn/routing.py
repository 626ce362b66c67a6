"""Which experts a token takes, and with which weights.  One function for training and inference."""

from functools import partial

import torch
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.nn.precision import at_least_float32
from perilune.nn.recompute import decided
from perilune.ops.route import route as route_ungrouped
from perilune.ops.route import stable_topk

__all__ = ["route", "stable_topk"]


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
    float64).  Gradients reach `scores` through the weights; bias gets none.  On a GPU, without groups, each pass is one
    kernel (`perilune.ops.route`), and derivatives are first order only.  Raises ShapeError.
    """
    scores = at_least_float32(scores)
    weighed = partial(route_ungrouped, scores, bias, top_k, renormalize=renormalize, scaling=scaling)
    if num_groups > 1:
        groups = num_groups, topk_group, best_of_group
        ids = decided(lambda: stable_topk(_only_best_groups(scores.detach() + bias.detach(), top_k, *groups), top_k)[1])
        return weighed(ids=ids)
    made: list[tuple[Tensor, Tensor]] = []

    def choose() -> Tensor:
        made.append(weighed())
        return made[0][0]

    ids = decided(choose)
    return made[0] if made else weighed(ids=ids)


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

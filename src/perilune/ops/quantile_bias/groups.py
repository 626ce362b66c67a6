"""Required biases where experts come in groups and a token sees only its best groups (DeepSeek-V2, DeepSeek-V3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.core.errors import ShapeError


class Groups(NamedTuple):
    """Experts form `number` equal runs; a token chooses among those of the best `kept`, a run's score being the sum of
    its `best` largest s + b."""

    number: int
    kept: int
    best: int = 2


def limiting(groups: Groups | None, num_experts: int, top_k: int) -> Groups | None:
    """The groups that were given; None where all are kept, since those limit nothing.

    Raises ShapeError if they do not divide the experts, or the kept ones hold fewer than `top_k`.
    """
    if groups is None:
        return None
    number, kept, best = groups = Groups(*groups)
    divide = number >= 1 and num_experts % number == 0 and 1 <= kept <= number
    if not divide or kept * (num_experts // number) < top_k or best < 1:
        raise ShapeError(
            f"groups: expected a number that divides {num_experts} experts and room for {top_k} choices in those kept, "
            f"got {number}, {kept}, {best}; keep more groups or make them larger"
        )
    return groups if kept < number else None


def required_in_groups(scores: Tensor, bias: Tensor, top_k: int, groups: Groups) -> Tensor:
    """r_ij, the bias from which expert j is chosen by token i, `[M, E]`: it must pass two cutoffs.

    alpha_i: the (k+1)-th largest s + b in the kept groups.  gamma_i: the (kept+1)-th largest group score.  Expert j's
    group passes without it when the best of the others add up to more than gamma_i; if not, s_ij + b_j has to lift it,
    above lift_ij = gamma_i less the `best` - 1 largest of the others:

        r_ij = max(alpha_i, lift_ij or -inf) - s_ij,       r_ij < b_j  exactly where j is chosen (without ties)

    clamped to [min b - 1, max b + 1], where all r lie without groups.
    """
    biased = (scores + bias).unflatten(-1, (groups.number, -1))  # [M, G, S]
    size = biased.shape[-1]
    best = min(groups.best, size)
    # A group may hold no more than `best` experts; then the next one is nobody, at -inf.
    largest, places = torch.nn.functional.pad(biased, (0, 1), value=-torch.inf).topk(best + 1, dim=-1)
    group_scores = largest[..., :best].sum(-1)  # [M, G]
    by_score = group_scores.topk(groups.kept + 1, dim=-1)
    gamma = by_score.values[:, -1:, None]  # [M, 1, 1]
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, by_score.indices[:, :-1], True)

    rank = torch.full((*biased.shape[:-1], size + 1), best + 1, device=biased.device)  # below best + 1: who is where
    rank = rank.scatter(-1, places, torch.arange(best + 1, device=biased.device).expand_as(places))[..., :size]
    others = torch.where(  # [M, G, S, best], the largest of the group that are not j
        rank[..., None] > torch.arange(best, device=biased.device), largest[..., None, :best], largest[..., None, 1:]
    )
    lift = gamma - others[..., : best - 1].sum(-1)
    lift = lift.masked_fill(others.sum(-1) > gamma, -torch.inf).flatten(1)  # [M, E]

    within = biased.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    alpha = torch.nn.functional.pad(within, (0, 1), value=-torch.inf).topk(top_k + 1, dim=-1).values[:, -1:]
    low, high = bias.aminmax()
    return (torch.maximum(alpha, lift) - scores).clamp(low - 1, high + 1)

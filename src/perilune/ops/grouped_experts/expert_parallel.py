"""Experts spread over ranks: each rank has a run of them, tokens travel to their experts and results travel back.

Two exchanges a forward pass, two a backward one, all of rows: a slot's token goes to the rank of its expert, which
runs the ordinary operation on what it receives, and the expert's output goes home, where it is weighted and summed.

Balanced (K3 report, section 5.2.1 and its appendix, MoonEP), every rank computes equally many slots: one whose experts
have too few gets copies of some of another rank's, and a share of their slots.  Gradients of copies go back to the
experts that they are of.  All ranks make the same plan from the same counts.
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.core.errors import ConfigError, ShapeError
from perilune.ops.autocast import autocast_dtype, without_autocast
from perilune.ops.first_order import first_order
from perilune.ops.grouped_experts.activation import Activation
from perilune.ops.grouped_experts.api import grouped_experts
from perilune.ops.grouped_experts.placement import copies, place
from perilune.ops.shards import gather, place_in


def grouped_experts_parallel(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    group: "dist.ProcessGroup | None",
    capacity: int | None = None,
    balanced: bool = False,
    activation: Activation = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
    backend: str = "auto",
) -> Tensor:
    """`grouped_experts` with E experts of which each of the group's R ranks has E/R: rank r those from r E/R on.

    x: [M, D], ids and weights [M, top_k] are this rank's tokens, with ids among all E; a rank may have none.  w_gate,
    w_up: [E/R, F, D], w_down: [E/R, D, F]; their gradients are those of all ranks' tokens.  What is not said here is as
    in `grouped_experts`.

    capacity: None has ranks tell each other first how many slots they send, which the host waits for.  A number makes
        every shape static and nothing is read back: so many slots from each rank to each other, sent whether filled or
        not; M top_k holds whatever the router does.  Where a rank has more for another, its outputs are NaN, lest a
        token that was lost go unnoticed.

    balanced: copies crowded experts, so that every rank computes ceil(slots of all ranks / R) slots at most, with E/R
        copies at most.  Shapes follow the router; ConfigError beside a capacity.

    Collective: every rank makes the call, and its backward pass, with the same options.
    """
    if balanced and capacity is not None:
        raise ConfigError(f"capacity: expected none where experts are balanced, got {capacity}; leave one of them out")
    ranks, local = place_in(group)[1], w_gate.shape[0]
    if (dtype := autocast_dtype(x)) is not None:
        x, w_gate, w_up, w_down = (t.to(dtype) for t in (x, w_gate, w_up, w_down))
    if ids.device.type == "cpu" and ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < ranks * local:
        raise ShapeError(
            f"ids: expected expert numbers from 0 to {ranks * local - 1}, or -1, got {int(ids.min())} to "
            f"{int(ids.max())}; every rank has {local} of them"
        )
    M, K = ids.shape
    flat = ids.flatten()
    if balanced:
        owner, there_of, extra = _balanced(flat, ranks, local, group)
        w_gate, w_up, w_down = (extra.beside(w) for w in (w_gate, w_up, w_down))
    else:
        owner = torch.where(flat < 0, ranks, torch.div(flat, local, rounding_mode="floor"))
        there_of = flat % local
    # owner: [M K], the rank that computes each slot, R for one without an expert; there_of: the expert's number there
    counts = torch.zeros(ranks + 1, dtype=torch.int64, device=ids.device).index_add_(0, owner, torch.ones_like(owner))
    order = owner.argsort(stable=True)  # slots, those for rank 0 first
    if capacity is None:
        sent = counts[:ranks].tolist()
        received = _swap_counts(counts[:ranks], group)
        slots = order[: sum(sent)]
        there, lost = there_of[slots], None
    else:
        sent = received = [capacity] * ranks
        begin = counts.cumsum(0) - counts  # [R + 1], where each rank's slots begin in `order`
        place = torch.arange(capacity, device=ids.device)
        filled = place < counts[:ranks, None]  # [R, C]
        slots = _padded(order, M * K)[(begin[:ranks, None] + place).clamp(max=M * K)]
        slots = torch.where(filled, slots, M * K).flatten()  # M K where there is none
        there = torch.where(slots < M * K, _padded(there_of, 0)[slots], -1)
        lost = (counts[:ranks] > capacity).any()
    rows = _padded(x, 0)[torch.div(slots, K, rounding_mode="floor")]
    there = _swap(there, sent, received, group)
    rows = _Swap.apply(rows, sent, received, group)
    ones = torch.ones(len(rows), 1, dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
    y = grouped_experts(
        rows, w_gate, w_up, w_down, there[:, None], ones,
        activation=activation, beta_gate=beta_gate, beta_up=beta_up, backend=backend,
    )  # fmt: skip
    y = _Swap.apply(y, received, sent, group)
    with without_autocast(x):
        wide = torch.promote_types(x.dtype, torch.float32)
        back = y.new_zeros(M * K + 1, x.shape[1]).index_add(0, slots, y)  # what filled up goes behind the last slot
        terms = back[: M * K].view(M, K, x.shape[1]).to(wide) * weights.to(wide).unsqueeze(-1)
        out = terms.masked_fill((ids < 0).unsqueeze(-1), 0).sum(1)
        if lost is not None:
            out = out.masked_fill(lost, torch.nan)
        return out.to(x.dtype)


class _Copies(NamedTuple):
    """Which of this rank's experts other ranks get copies of, and from where it gets some."""

    sent: Tensor
    """Numbers among its own, those for rank 0 first."""
    counts: list[int]
    """How many for each rank."""
    received: list[int]
    """How many from each rank."""
    group: "dist.ProcessGroup | None"

    def beside(self, w: Tensor) -> Tensor:
        """This rank's experts' matrices, then those of its copies; their gradients go back."""
        return torch.cat([w, _Swap.apply(w.index_select(0, self.sent), self.counts, self.received, self.group)])


def _balanced(
    flat: Tensor, ranks: int, local: int, group: "dist.ProcessGroup | None"
) -> tuple[Tensor, Tensor, _Copies]:
    """For every slot the rank that computes it and the expert's number there, and what has to be copied.

    Slots of an expert that several ranks compute go to them in the order of ranks, those of the first source first.
    """
    rank, E = place_in(group)[0], ranks * local
    every = gather(torch.bincount(flat + 1, minlength=E + 1)[1:], group)  # [R, E], slots by source
    loads: list[int] = every.sum(0).tolist()
    loads[-1] += -sum(loads) % ranks  # slots that nobody sends, behind the last ones
    placed = place(loads, ranks)
    remote = copies(placed, E)

    shares = torch.zeros(ranks, E, dtype=torch.int64)
    number = torch.zeros(ranks, E, dtype=torch.int64)
    for r, rows in enumerate(placed):
        for e, share in rows.items():
            shares[r, e] = share
            number[r, e] = e - r * local if e // local == r else local + remote[r].index(e)
    ends, number = shares.cumsum(0).to(flat.device), number.to(flat.device)

    order = flat.argsort(stable=True)
    begin = torch.bincount(flat + 1, minlength=E + 1).cumsum(0)  # [E + 1], where each expert's begin in `order`
    expert = flat.clamp(min=0)
    place_here = torch.empty_like(flat).index_copy_(0, order, torch.arange(len(flat), device=flat.device))
    nth = place_here - begin[expert] + every[:rank].sum(0)[expert]  # among all slots of its expert, on all ranks
    owner = (nth[:, None] >= ends.T[expert]).sum(1)
    owner = torch.where(flat < 0, ranks, owner)
    there = number[owner.clamp(max=ranks - 1), expert]

    wanted = [[e - rank * local for e in some if e // local == rank] for some in remote]
    sent = torch.tensor(list(itertools.chain.from_iterable(wanted)), dtype=torch.int64, device=flat.device)
    received = [sum(e // local == r for e in remote[rank]) for r in range(ranks)]
    return owner, there, _Copies(sent, [len(some) for some in wanted], received, group)


def _padded(x: Tensor, value: int) -> Tensor:
    """One more row behind x, for slots that are none."""
    return torch.cat([x, x.new_full((1, *x.shape[1:]), value)])


def _swap_counts(counts: Tensor, group: "dist.ProcessGroup | None") -> list[int]:
    """How many rows every rank has for this one, of how many this one has for them."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received.tolist()


def _swap(x: Tensor, sent: list[int], received: list[int], group: "dist.ProcessGroup | None") -> Tensor:
    """The first `sent[0]` rows of x to rank 0, and so on; from it come `received[0]`."""
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Swap(torch.autograd.Function):
    """Gradients go back the way that rows came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: "dist.ProcessGroup | None") -> Tensor:
        ctx.way = received, sent, group
        return _swap(x, sent, received, group)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grad, *ctx.way), None, None, None

"""Experts spread over ranks: each rank has a run of them, tokens travel to their experts and results travel back.

Two exchanges a forward pass, two a backward one, all of rows: a slot's token goes to the rank of its expert, which
runs the ordinary operation on what it receives, and the expert's output goes home, where it is weighted and summed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.ops.autocast import autocast_dtype, without_autocast
from perilune.ops.first_order import first_order
from perilune.ops.grouped_experts.activation import Activation
from perilune.ops.grouped_experts.api import grouped_experts
from perilune.ops.shards import place_in


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

    Collective: every rank makes the call, and its backward pass, with the same capacity.
    """
    ranks, local = place_in(group)[1], w_gate.shape[0]
    if (dtype := autocast_dtype(x)) is not None:
        x = x.to(dtype)
    if ids.device.type == "cpu" and ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < ranks * local:
        raise ShapeError(
            f"ids: expected expert numbers from 0 to {ranks * local - 1}, or -1, got {int(ids.min())} to "
            f"{int(ids.max())}; every rank has {local} of them"
        )
    M, K = ids.shape
    flat = ids.flatten()
    owner = torch.where(flat < 0, ranks, torch.div(flat, local, rounding_mode="floor"))  # [M K], `ranks` for no expert
    counts = torch.zeros(ranks + 1, dtype=torch.int64, device=ids.device).index_add_(0, owner, torch.ones_like(owner))
    order = owner.argsort(stable=True)  # slots, those for rank 0 first
    if capacity is None:
        sent = counts[:ranks].tolist()
        received = _swap_counts(counts[:ranks], group)
        slots = order[: sum(sent)]
        there, lost = flat[slots] % local, None
    else:
        sent = received = [capacity] * ranks
        begin = counts.cumsum(0) - counts  # [R + 1], where each rank's slots begin in `order`
        place = torch.arange(capacity, device=ids.device)
        filled = place < counts[:ranks, None]  # [R, C]
        slots = _padded(order, M * K)[(begin[:ranks, None] + place).clamp(max=M * K)]
        slots = torch.where(filled, slots, M * K).flatten()  # M K where there is none
        there = torch.where(slots < M * K, _padded(flat, 0)[slots] % local, -1)
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

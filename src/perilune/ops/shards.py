"""Context parallelism: one row of tokens in contiguous shards of equal length, one on each rank of a process group.

Boundaries of documents are those of the whole row and known everywhere, so each rank works out for itself what its
neighbours hold; only states travel.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.ops.first_order import first_order
from perilune.ops.packing import boundaries


@dataclass(frozen=True)
class Shard:
    """What one rank holds of the documents of a row.

    A document begins on the rank of its first token and ends on that of its last; one without tokens does both where
    it stands.  In a batch without `cu_seqlens` every row is a document, and all of them are cut alike.
    """

    rank: int
    cu: list[int] | None
    """Boundaries of the documents here, counted from the shard's first token; None for a batch."""
    begins: slice
    """Which of all documents begin here."""
    ends: slice
    """Which end here."""
    origin: int
    """The rank on which the first document here begins."""
    target: int
    """The rank on which the last document here ends."""
    linked: bool
    """Whether any document, here or elsewhere, lies on more than one rank."""

    @property
    def begun(self) -> int:
        """How many begin here."""
        return self.begins.stop - self.begins.start

    @property
    def ended(self) -> int:
        """How many end here."""
        return self.ends.stop - self.ends.start

    @property
    def continued(self) -> bool:
        """Whether the first document here, or every row of a batch, began on an earlier rank."""
        return self.origin < self.rank

    @property
    def goes_on(self) -> bool:
        """Whether the last document here, or every row of a batch, goes on on the next rank."""
        return self.target > self.rank

    @property
    def passes(self) -> bool:
        """Whether the shard is the middle of one document, or of every row of a batch."""
        return self.continued and self.goes_on and (self.cu is None or len(self.cu) == 2)

    @property
    def first(self) -> slice:
        """The tokens of the first document here."""
        return slice(None) if self.cu is None else slice(0, self.cu[1])

    @property
    def last(self) -> slice:
        """The tokens of the last document here."""
        return slice(None) if self.cu is None else slice(self.cu[-2], self.cu[-1])

    def check_states(self, states: Tensor | None, shape: Sequence[int]) -> None:
        """Raises ShapeError unless `states` is None or one state of `shape` for each document that begins here."""
        expected = [self.begun, *shape]
        if states is not None and list(states.shape) != expected:
            raise ShapeError(
                f"initial_state: expected {expected} on rank {self.rank}, got {list(states.shape)}; "
                "give one state for each document that begins on this rank"
            )


def shard_of(
    cu_seqlens: Tensor | Sequence[int] | None, batch: int, length: int, group: "dist.ProcessGroup | None"
) -> Shard:
    """This rank's shard, of `length` tokens, of a row (without `cu_seqlens`: of a batch of rows) cut over `group`.

    cu_seqlens: [N+1] boundaries in the whole row, which has `length` tokens times ranks; the same on every rank.
    Raises ShapeError where they do not describe it, or if this process is not in the group.
    """
    return cut(cu_seqlens, batch, length, *place_in(group))


def place_in(group: "dist.ProcessGroup | None") -> tuple[int, int]:
    """This process's rank in the group, and of how many; raises ShapeError if it is not in it."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ShapeError("group: expected one that this process is in, got another; call only on the group's ranks")
    return rank, dist.get_world_size(group)


def cut(cu_seqlens: Tensor | Sequence[int] | None, batch: int, length: int, rank: int, ranks: int) -> Shard:
    """The shard of one of so many ranks."""
    cu = boundaries(cu_seqlens, batch, length * ranks)
    if cu is None:
        begins, ends = slice(0, batch if rank == 0 else 0), slice(0, batch if rank == ranks - 1 else 0)
        return Shard(rank, None, begins, ends, 0, ranks - 1, ranks > 1)

    def place(token: int) -> int:
        return min(token // max(length, 1), ranks - 1)

    first = [place(a) for a in cu[:-1]]
    last = [place(max(a, b - 1)) for a, b in pairwise(cu)]
    begins = slice(bisect_left(first, rank), bisect_right(first, rank))
    ends = slice(bisect_left(last, rank), bisect_right(last, rank))
    here = range(ends.start, begins.stop)
    local = [min(max(cu[n] - rank * length, 0), length) for n in (*here, begins.stop)]
    origin, target = (first[here[0]], last[here[-1]]) if here else (rank, rank)
    return Shard(rank, local, begins, ends, origin, target, first != last)


def gather(x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """x of every rank, in their order: [P, ...]."""
    gathered = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=group)
    return gathered


def gather_rows(x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """The whole rows of which x [B, T/P, ...] is this rank's shard: [B, T, ...].

    Collective both ways: backward, each rank's gradient is the sum over all ranks of what they had of it.
    """
    return _GatherRows.apply(x, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
        ctx.group = group
        return gather(x, group).transpose(0, 1).flatten(1, 2)

    @staticmethod
    @first_order
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
        parts = drows.unflatten(1, (dist.get_world_size(ctx.group), -1)).transpose(0, 1)
        wide = torch.promote_types(drows.dtype, torch.float32)
        return exchange(parts, ctx.group).sum(0, dtype=wide).to(drows.dtype), None


def exchange(x: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
    """x: [P, ...], one part for each rank; returns the parts that all ranks have for this one, in their order."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received

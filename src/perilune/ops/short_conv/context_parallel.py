"""The short convolution of a row whose tokens lie on several ranks, a contiguous shard on each.

A rank needs of those before it the W-1 rows in front of its first: the window that the document going on leaves, which
is what a cache would keep.  Where shards have fewer rows than that, it is put together from several ranks.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.ops.first_order import first_order
from perilune.ops.shards import Shard, exchange, gather, shard_of
from perilune.ops.short_conv.api import short_conv


def short_conv_context_parallel(
    x: Tensor,
    weight: Tensor,
    *,
    group: "dist.ProcessGroup | None",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    activation: Literal["silu"] | None = "silu",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`short_conv` of a row cut over the P ranks of `group`, in their order: rank r holds rows r T/P to (r+1) T/P.

    x: [B, T/P, D], this rank's rows.  cu_seqlens: [N+1] boundaries of documents in the whole row of T, the same on
    every rank; then B is 1.  initial_state: [n, W-1, D], of the n documents that begin on this rank (all B rows on the
    first rank, without `cu_seqlens`).  What is not said here is as in `short_conv`.
    Returns y [B, T/P, D] and the final state [n, W-1, D] of the n documents that end on this rank (None unless asked
    for).  A document begins on the rank of its first row and ends on that of its last.
    Collective: every rank makes the same calls, and runs their backward passes, or none does.  The gradient of
    `weight` is that of the local rows; sum it over the group as for any parameter.
    Raises ShapeError where the tensors do not fit.
    """
    if x.dim() != 3:
        raise ShapeError(f"x: expected [B, T, D], got {list(x.shape)}; add a batch axis")
    (B, L, D), reach = x.shape, weight.shape[-1] - 1
    shard = shard_of(cu_seqlens, B, L, group)
    shard.check_states(initial_state, (reach, D))
    state = initial_state if reach else None  # nothing enters a filter of one tap
    if shard.linked and reach:
        if state is None:
            state = x.new_zeros(shard.begun, reach, D)
        x, entering = _Halo.apply(x, _window(x, state, shard), shard, group)
        state = torch.cat([entering, state]) if shard.continued else state
    y, final = short_conv(
        x,
        weight,
        initial_state=state,
        output_final_state=output_final_state,
        cu_seqlens=shard.cu,
        activation=activation,
        backend=backend,
    )
    return y, None if final is None else final[: shard.ended]


def _window(x: Tensor, state: Tensor, shard: Shard) -> Tensor:
    """The last W-1 rows of the last document here, behind those of its state if it began here: [B, W-1, D].

    Where rows before them lie on another rank they are zero, and not read.
    """
    B, (reach, D) = x.shape[0], state.shape[1:]
    before = state[-B:].to(x.dtype) if shard.goes_on and not shard.passes else x.new_zeros(B, reach, D)
    return torch.cat([before, x[:, shard.last][:, -reach:]], 1)[:, -reach:]


class _Halo(torch.autograd.Function):
    """x [B, L, D] as it is and the W-1 rows before it [B, W-1, D], from the windows that all ranks leave.

    x passes through so that every rank takes part in the exchange of the backward pass, also one that needs no rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, window: Tensor, shard: Shard, group: "dist.ProcessGroup | None"
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.rows = group, _sources(shard, x.shape[1], window.shape[1])
        windows = gather(window, group).transpose(0, 1).flatten(1, 2)  # [B, P * (W-1), D]
        return x.view_as(x), windows[:, ctx.rows]

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: Tensor, dentering: Tensor) -> tuple[Tensor | None, ...]:
        (B, reach, D), P = dentering.shape, dist.get_world_size(ctx.group)
        dwindows = dentering.new_zeros(B, P * reach, D)
        dwindows[:, ctx.rows] = dentering
        dwindow = exchange(dwindows.unflatten(1, (P, reach)).transpose(0, 1), ctx.group).sum(0)
        return dx, dwindow, None, None


def _sources(shard: Shard, length: int, reach: int) -> list[int]:
    """The rows in front of the shard, among the windows of all ranks laid end to end.

    The window of the rank on which the document begins, then the rows that each rank since has added.
    """
    rows = list(range(shard.origin * reach, (shard.origin + 1) * reach))
    for rank in range(shard.origin + 1, shard.rank):
        rows += range((rank + 1) * reach - min(length, reach), (rank + 1) * reach)
    return rows[-reach:]

"""Balancing over several processes: what balancers observed, summed over the ranks that hold different tokens."""

import zlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from perilune.core.errors import BackendError, ConfigError, nearest
from perilune.nn.balancer import Balancer

HOLD_TOKENS = ("dp", "dp_replicate", "dp_shard", "cp", "ep")
"""Mesh dimensions whose ranks hold different tokens; ranks of expert parallelism are data ranks to a router."""
REPEAT_TOKENS = ("tp", "pp")
"""Those whose ranks see the same tokens: with the same scores, or in other layers."""


class StatisticsPool:
    """Sums what balancers observed in a step, over ranks: all layers in one all-reduce of integers.

        pool = StatisticsPool(model.balancers().values(), mesh)  # once, on every rank
        ...
        optimizer.step()
        pool.sum_()                                              # once a step, on every rank, with tokens or without
        update_balancers(model.balancers().values())

    Statistics are integers and add up to those of one process that saw every token; so the biases that follow are
    that process's, bit for bit, on all ranks alike.  In the K3 report (2.3.3) and its appendix: sums over data and
    context parallel ranks, micro-batches being summed already.

    ranks: a `DeviceMesh` with named dimensions, or a process group whose every rank holds tokens of its own.
    over: the dimensions of the mesh to sum over.  Left out, those called dp, dp_replicate, dp_shard, cp and ep are, and
        tp and pp are not: there, ranks repeat each other's tokens.  Name tp where the router runs on sequence shards.
    group: what is summed over; None where no two ranks hold different tokens, and nothing is to be done.

    Making one is collective, and so is `sum_`: groups over several dimensions are made, and ranks agree on what they
    will sum.  The buffer, 8 bytes for each integer (bins + 1 an expert and layer), is kept.

    Raises ConfigError on a mesh without or with unknown names, on balancers that differ between ranks or that keep
    scores instead of counts (bins=None), and BackendError where the group's backend cannot sum int64.
    """

    def __init__(
        self,
        balancers: Iterable[Balancer],
        ranks: DeviceMesh | dist.ProcessGroup,
        over: Sequence[str] | None = None,
    ) -> None:
        self.balancers = list(balancers)
        self.group = _group(ranks, over)
        self._flat: Tensor | None = None
        statistics = self._statistics()
        if self.group is not None and statistics:
            _agree(statistics, self.group)

    @torch.no_grad()
    def sum_(self) -> None:
        """Replaces every statistic by its sum over the ranks; once a step, or totals are summed again."""
        statistics = self._statistics()
        if self.group is None or not statistics:
            return
        sizes = [x.numel() for x in statistics]
        if self._flat is None or len(self._flat) != sum(sizes) or self._flat.device != statistics[0].device:
            self._flat = statistics[0].new_empty(sum(sizes))
        torch.cat([x.view(-1) for x in statistics], out=self._flat)
        dist.all_reduce(self._flat, group=self.group)
        totals = [total.view_as(x) for x, total in zip(statistics, self._flat.split(sizes))]
        torch._foreach_copy_(statistics, totals)

    def _statistics(self) -> list[Tensor]:
        return [x for balancer in self.balancers for x in balancer.statistics()]


def _group(ranks: DeviceMesh | dist.ProcessGroup, over: Sequence[str] | None) -> dist.ProcessGroup | None:
    """The ranks that hold different tokens; None if that is this one alone."""
    if isinstance(ranks, DeviceMesh):
        return _group_of_mesh(ranks, over)
    if over is not None:
        raise ConfigError(f"over: expected none beside a process group, got {list(over)}; give a DeviceMesh")
    if not isinstance(ranks, dist.ProcessGroup) or dist.get_rank(ranks) < 0:
        raise ConfigError(
            f"ranks: expected a DeviceMesh or a process group that this process is in, got {ranks!r}; "
            "dist.group.WORLD is the group of all"
        )
    return ranks if dist.get_world_size(ranks) > 1 else None


def _group_of_mesh(mesh: DeviceMesh, over: Sequence[str] | None) -> dist.ProcessGroup | None:
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError("ranks: expected a mesh with named dimensions, got none; say mesh_dim_names=('dp', ...)")
    if over is None:
        for name in names:
            if name not in (*HOLD_TOKENS, *REPEAT_TOKENS):
                raise ConfigError(
                    f"ranks: expected mesh dimensions among {', '.join((*HOLD_TOKENS, *REPEAT_TOKENS))}, got {name!r}; "
                    "rename it, or say in over which ones hold different tokens"
                )
        over = HOLD_TOKENS
    else:
        for name in over:
            if name not in names:
                raise ConfigError(f"over: expected dimensions of the mesh, got {name!r}; {nearest(name, names)}")
    several = tuple(name for i, name in enumerate(names) if name in over and mesh.size(i) > 1)
    if len(several) < 2:
        return mesh.get_group(several[0]) if several else None
    return mesh[several]._flatten().get_group()


def _agree(statistics: list[Tensor], group: dist.ProcessGroup) -> None:
    """Raises unless all ranks have statistics of the same shapes and can sum them; other collectives would hang."""
    rank, number = dist.get_rank(group), sum(x.numel() for x in statistics)
    shapes = zlib.crc32(repr([list(x.shape) for x in statistics]).encode())
    every = torch.zeros(dist.get_world_size(group), 2, dtype=torch.int64)
    every[rank] = torch.tensor([number, shapes])
    every = every.to(statistics[0].device)
    try:
        dist.all_reduce(every, group=group)
    except dist.DistError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise BackendError(
            f"ranks: expected a backend that sums int64, got {dist.get_backend(group)!r}, which says "
            f"{str(error).splitlines()[0]!r}; gloo and nccl do"
        ) from error
    for other, (its_number, its_shapes) in enumerate(every.tolist()):
        if (its_number, its_shapes) != (number, shapes):
            raise ConfigError(
                f"balancers: expected the same on every rank, got {its_number:,} integers on rank {other} of the group "
                f"and {number:,} of other shapes on rank {rank}; build the same layers, in the same order"
            )

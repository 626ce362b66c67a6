"""Muon over parameters that lie in shards on several ranks: every matrix is put together once, on one rank.

An owner pulls the shards of its matrices from the ranks that hold them and gives the updates back, one exchange each
way.  No rank ever holds all matrices, and none is orthogonalised twice.  (ZeRO-1 treatment of the K3 report.)
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.optim.roles import Blocks


def is_sharded(param: Tensor) -> bool:
    """Whether it is a DTensor (asked without importing those)."""
    return hasattr(param, "placements")


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharding(param: Any) -> tuple[int, int] | None:
    """(tensor dimension, mesh dimension) along which a DTensor is cut; None if every rank has all of it.

    Raises ConfigError if it is cut along several mesh dimensions or otherwise than in plain shards.
    """
    cuts = [(p.dim, axis) for axis, p in enumerate(param.placements) if not p.is_replicate()]
    if not all(type(p).__name__ in ("Shard", "Replicate") for p in param.placements) or len(cuts) > 1:
        raise ConfigError(
            f"params: expected a DTensor sharded along one mesh dimension at most, got {param.placements}; "
            "Muon has to put matrices together again"
        )
    return (cuts[0][0] % param.dim(), cuts[0][1]) if cuts else None


def shard_of(rows: Tensor, param: Any, axis: int) -> Tensor:
    """Of something with an entry for every row of a parameter cut along that mesh dimension: this rank's entries."""
    return _chunks(rows, 0, param.device_mesh.size(axis))[param.device_mesh.get_local_rank(axis)]


def cuts_of_shard(param: Any, blocks: Blocks) -> Blocks | None:
    """The blocks of this rank's part if every rank has only whole ones, so that none need travel; else None."""
    dims = [getattr(p, "dim", 0) % param.dim() for p in param.placements if not p.is_replicate()]
    if all(dim < param.dim() - 2 for dim in dims):  # whole matrices of a stack, over however many mesh dimensions
        return blocks
    cut = sharding(param)
    if cut is None:
        return blocks
    dim, axis = cut
    rows = param.dim() - (1 if blocks.columns else 2)
    ranks = param.device_mesh.size(axis)
    return replace(blocks, repeat=blocks.repeat // ranks) if dim == rows and blocks.repeat % ranks == 0 else None


def on_owners_(
    orthogonalize_: Callable[[list[tuple[Tensor, Blocks]]], None], shards: Sequence[tuple[Any, Tensor, Blocks]]
) -> None:
    """Applies `orthogonalize_` in place to matrices of which every rank has a shard.

    shards: (parameter, this rank's shard of its direction, blocks of the whole); the same order on every rank.
    """
    alike: dict[Any, list[tuple[int, Any, Tensor, Blocks]]] = defaultdict(list)
    for param, shard, cut in shards:
        dim, axis = sharding(param) or (0, 0)
        alike[param.device_mesh, axis, shard.dtype].append((dim, param, shard, cut))
    for (mesh, axis, _), members in alike.items():
        ranks = mesh.size(axis)
        shapes = [[x.shape for x in _chunks(_meta(param.shape), dim, ranks)] for dim, param, _, _ in members]
        owners = balance([cost(param.shape, cut) for _, param, _, cut in members], ranks)
        exchange = _Exchange(shapes, owners, mesh.get_group(axis))
        pulled = exchange.collect([shard for _, _, shard, _ in members])
        whole = {k: torch.cat(parts, members[k][0]) for k, parts in pulled.items()}
        orthogonalize_([(matrix, members[k][3]) for k, matrix in whole.items()])
        updates = {k: _chunks(matrix, members[k][0], ranks) for k, matrix in whole.items()}
        for (_, _, shard, _), update in zip(members, exchange.distribute(updates, like=members[0][2])):
            shard.copy_(update)


def cost(shape: Sequence[int], blocks: Blocks) -> int:
    """Multiplications of one iteration, up to a factor."""
    pieces = blocks.of(_meta(shape))
    return sum(piece.numel() * min(piece.shape[-2:]) for piece in pieces)


def balance(costs: Sequence[int], ranks: int) -> list[int]:
    """An owner for every cost, the dearest first to whoever has least; the same on every rank."""
    load, owners = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


def _chunks(tensor: Tensor, dim: int, ranks: int) -> list[Tensor]:
    """The shards of a tensor as DTensor cuts them; the last ones may be empty."""
    chunks = list(tensor.chunk(ranks, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (ranks - len(chunks))


def _meta(shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, device="meta")


class _Exchange:
    """Moves shards between the ranks that hold them and the owners of their matrices.

    shapes: for every matrix the shape of its shard on every rank.  owners: for every matrix a rank.
    """

    def __init__(self, shapes: list[list[torch.Size]], owners: list[int], group: dist.ProcessGroup) -> None:
        self.shapes, self.group = shapes, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.owned_by = [[k for k, owner in enumerate(owners) if owner == rank] for rank in range(self.ranks)]

    def collect(self, shards: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """From the own shard of every matrix to all shards of the own matrices."""
        mine = self.owned_by[self.rank]
        sent = [[shards[k] for k in self.owned_by[rank]] for rank in range(self.ranks)]
        got = self._swap(sent, [[self.shapes[k][rank] for k in mine] for rank in range(self.ranks)], shards[0])
        return {k: [got[rank][j] for rank in range(self.ranks)] for j, k in enumerate(mine)}

    def distribute(self, owned: dict[int, list[Tensor]], like: Tensor) -> list[Tensor]:
        """The way back."""
        mine = self.owned_by[self.rank]
        sent = [[owned[k][rank] for k in mine] for rank in range(self.ranks)]
        got = self._swap(sent, [[self.shapes[k][self.rank] for k in ks] for ks in self.owned_by], like)
        shards = {k: shard for ks, received in zip(self.owned_by, got) for k, shard in zip(ks, received)}
        return [shards[k] for k in range(len(self.shapes))]

    def _swap(self, sent: list[list[Tensor]], shapes: list[list[torch.Size]], like: Tensor) -> list[list[Tensor]]:
        """Sends `sent[rank]` to every rank; from every rank come tensors of `shapes[rank]`, `like` in dtype."""
        flat = [torch.cat([x.reshape(-1) for x in (like.new_empty(0), *shards)]) for shards in sent]
        sizes = [[shape.numel() for shape in from_rank] for from_rank in shapes]
        received = like.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(received, torch.cat(flat), [sum(s) for s in sizes], [len(f) for f in flat], self.group)
        parts = received.split([sum(s) for s in sizes])
        return [[x.view(shape) for x, shape in zip(part.split(s), of)] for part, s, of in zip(parts, sizes, shapes)]

"""Balancers of several ranks are those of one process that sees every token; the ranks are processes of this machine.

Every way to lay out 2, 3 and 4 ranks over the dimensions of a mesh, all kinds of balancers at once, several steps.
"""

import copy
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perilune.core.errors import BackendError, ConfigError
from perilune.nn import BandBalancer, QuantileBalancer, SignBalancer, StatisticsPool
from perilune.nn.balancer import AuxLossBalancer, Balancer
from perilune.nn.routing import route
from ranks import one_rank, run_ranks

NAMES = (
    ("dp",), ("tp",), ("dp", "tp"), ("dp", "cp"), ("dp", "ep"), ("dp", "cp", "tp"), ("dp_replicate", "dp_shard"),
    ("tp", "dp"), ("pp", "dp", "tp"),
)  # fmt: skip
STEPS, MICRO_BATCHES = 5, 2
DISCARDED, EMPTY = 2, 3  # steps: thrown away by all; without a token anywhere


def layers() -> list[Balancer]:
    """One of each kind, of several widths."""
    return [
        QuantileBalancer(8, 2, bins=40),
        QuantileBalancer(12, 3, bins=1000, decay=None),
        QuantileBalancer(8, 2, bins=100, decay=None, ema=0.7),
        Balancer(4, 1).freeze(),
        SignBalancer(8, 2, step=0.05),
        BandBalancer(12, 3, window=2),
        AuxLossBalancer(8, 2),
        QuantileBalancer(4, 4),
    ]


def tokens_of(step: int, holder: int, holders: int, micro: int, balancer: Balancer) -> tuple[Tensor, Tensor | None]:
    """Scores and mask: uneven numbers; the last holder has none in one micro-batch, only padding in the other."""
    seed = 1000 * step + 10 * holder + micro
    draw, masks = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)  # masks alike in all layers
    last = holder == holders - 1 and holders > 1
    number = 0 if last and micro == 0 else 5 + 23 * holder + 7 * micro
    scores = torch.sigmoid(
        torch.randn(number, balancer.num_experts, generator=draw) + torch.linspace(-1, 1, balancer.num_experts)
    )
    if step == EMPTY or (last and step % 2):
        return scores, torch.zeros(number, dtype=torch.bool)
    return scores, None if micro == 0 else torch.rand(number, generator=masks) < 0.6


def observe(balancers: list[Balancer], step: int, holder: int, holders: int) -> int:
    """A holder's share of a step; returns how many real tokens it has."""
    real = 0
    for micro in range(MICRO_BATCHES):
        for balancer in balancers:
            scores, mask = tokens_of(step, holder, holders, micro, balancer)
            balancer.observe(scores, route(scores, balancer.bias, balancer.top_k)[0], mask)
        real += len(scores) if mask is None else int(mask.sum())
    return real


def shapes_of(ranks: int, dimensions: int) -> Iterator[tuple[int, ...]]:
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    yield from (shape for shape in product(sizes, repeat=dimensions) if math.prod(shape) == ranks)


def place(mesh: DeviceMesh) -> tuple[int, int]:
    """Which holder of tokens this rank is, and how many there are: tp and pp repeat them."""
    holder, holders = 0, 1
    for name, size, here in zip(mesh.mesh_dim_names, mesh.shape, mesh.get_coordinate()):
        if name not in ("tp", "pp"):
            holder, holders = holder * size + here, holders * size
    return holder, holders


class Counted:
    """`dist.all_reduce`, counted."""

    def __init__(self) -> None:
        self.calls, self.plain = 0, dist.all_reduce

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.plain(*args, **kwargs)


def check_steps(pool: StatisticsPool, balancers: list[Balancer], holder: int, holders: int, where: str) -> None:
    alone = [copy.deepcopy(balancer) for balancer in balancers]
    counted, buffers = Counted(), set()
    dist.all_reduce = counted
    for step in range(STEPS):
        real = sum(observe(alone, step, other, holders) for other in range(holders))
        observe(balancers, step, holder, holders)
        if step == DISCARDED:
            for balancer in balancers + alone:
                balancer.discard()
            continue
        pool.sum_()
        if pool._flat is not None:
            buffers.add(pool._flat.data_ptr())
        for mine, its in zip(balancers, alone):
            for x, y in zip(mine.statistics(), its.statistics()):
                assert torch.equal(x, y), f"{mine} on {where}, step {step}"
            if isinstance(mine, QuantileBalancer) and mine.top_k < mine.num_experts:
                assert mine.histogram.sum(-1).tolist() == [real] * mine.num_experts
        for balancer in balancers + alone:
            balancer.update()
        for mine, its in zip(balancers, alone):
            assert torch.equal(mine.bias, its.bias), f"{mine} on {where}, step {step}"
            assert torch.equal(mine.loads, its.loads)
            states = mine.training_state(), its.training_state()
            assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
            if step != EMPTY and not mine.frozen:
                assert mine.loads.sum() == real * mine.top_k
    dist.all_reduce = counted.plain
    shared = holders > 1
    assert counted.calls == (STEPS - 1) * shared, f"{counted.calls} all-reduces on {where}"
    assert len(buffers) == shared  # made once
    assert any(balancer.bias.any() for balancer in balancers)


def check_meshes(ranks: int) -> None:
    for names in NAMES:
        for shape in shapes_of(ranks, len(names)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            balancers = layers()
            pool = StatisticsPool(balancers, mesh)
            check_steps(pool, balancers, *place(mesh), f"{dict(zip(names, shape))}")
            again = StatisticsPool(layers(), mesh)  # the same dimensions, flattened before
            assert (again.group is None) == (pool.group is None)


def check_groups(rank: int, ranks: int) -> None:
    balancers = layers()
    check_steps(StatisticsPool(balancers, dist.group.WORLD), balancers, rank, ranks, "all ranks")
    pair = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        balancers = layers()
        check_steps(StatisticsPool(balancers, pair), balancers, int(rank > 0), 2, "a group of two")
    else:
        with pytest.raises(ConfigError, match="ranks: expected a DeviceMesh or a process group that this process is"):
            StatisticsPool(layers(), pair)


def check_named_dimensions(rank: int, ranks: int) -> None:
    """Names of one's own; and tp, where the router runs on shards of the sequence."""
    for names, over in ((("data", "model"), ("data",)), (("dp", "tp"), ("tp", "dp"))):
        for shape in shapes_of(ranks, 2):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            balancers = layers()
            holders = ranks if len(over) == 2 else shape[0]
            holder = rank if len(over) == 2 else mesh.get_coordinate()[0]
            check_steps(StatisticsPool(balancers, mesh, over), balancers, holder, holders, f"{names}, {shape}")


def check_what_differs(rank: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"balancers: expected the same on every rank, got .* integers on rank"):
        StatisticsPool(layers()[rank:], dist.group.WORLD)
    with pytest.raises(ConfigError, match="bins: expected a number to pool over ranks"):
        StatisticsPool([QuantileBalancer(8, 2, bins=None)], dist.group.WORLD)
    plain, dist.all_reduce = dist.all_reduce, no_int64
    with pytest.raises(BackendError, match=r"ranks: expected a backend that sums int64, got 'gloo', which says 'no Lo"):
        StatisticsPool(layers(), dist.group.WORLD)
    dist.all_reduce = plain


def no_int64(*args, **kwargs):
    raise RuntimeError("no Long here\nbut a trace")


EIGHT = torch.tensor(  # tokens that all take expert 0
    [
        [0.9, 0.5, 0.4, 0.1], [0.8, 0.6, 0.3, 0.2], [0.85, 0.55, 0.45, 0.15], [0.95, 0.35, 0.25, 0.05],
        [0.7, 0.65, 0.2, 0.1], [0.75, 0.5, 0.6, 0.3], [0.6, 0.4, 0.35, 0.5], [0.65, 0.3, 0.55, 0.45],
    ]
)  # fmt: skip


def check_eight_tokens(rank: int) -> None:
    """Two data ranks with two micro-batches each, on two tensor-parallel ranks each, with padding: eight, not 16."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone, b = (QuantileBalancer(4, 1, decay=None) for _ in range(2))
    pool = StatisticsPool([b], mesh)
    for loads in ([8, 0, 0, 0], [2, 3, 1, 2], [2, 2, 2, 2]):
        alone.observe(EIGHT, route(EIGHT, alone.bias, 1)[0])
        for part in EIGHT.chunk(2)[mesh.get_local_rank("dp")].split(2):
            padded = torch.cat([part, torch.tensor([[0.5, 0.5, 0.5, 0.9]]).expand(3, 4)])
            b.observe(padded, route(padded, b.bias, 1)[0], torch.arange(5) < 2)
        pool.sum_()
        assert b.histogram.sum(-1).tolist() == [8] * 4
        for balancer in (alone, b):
            balancer.update()
        assert torch.equal(b.bias, alone.bias)
        assert b.loads.tolist() == alone.loads.tolist()
        assert sum(b.loads.tolist()) == sum(loads) == 8
    assert b.loads.max() <= 3


def run_rank(rank: int, ranks: int) -> None:
    check_meshes(ranks)
    check_groups(rank, ranks)
    check_named_dimensions(rank, ranks)
    check_what_differs(rank, ranks)
    if ranks == 4:
        check_eight_tokens(rank)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_together_are_one_process(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, tmp_path, run_rank)


# Without other processes


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with one_rank(tmp_path):
        yield


@pytest.mark.usefixtures("alone")
def test_a_rank_alone_has_nothing_to_sum() -> None:
    for ranks in (dist.group.WORLD, init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))):
        balancers = layers()
        pool = StatisticsPool(balancers, ranks)
        assert pool.group is None
        check_steps(pool, balancers, 0, 1, "one rank")
    StatisticsPool([], dist.group.WORLD).sum_()


@pytest.mark.usefixtures("alone")
def test_what_does_not_fit_is_refused() -> None:
    def mesh(*names: str) -> DeviceMesh:
        return init_device_mesh("cpu", (1,) * max(len(names), 1), mesh_dim_names=names or None)

    with pytest.raises(ConfigError, match="ranks: expected a mesh with named dimensions, got none"):
        StatisticsPool(layers(), mesh())
    with pytest.raises(ConfigError, match=r"expected mesh dimensions among dp, .*, tp, pp, got 'data'; rename it"):
        StatisticsPool(layers(), mesh("data", "tp"))
    with pytest.raises(ConfigError, match="over: expected dimensions of the mesh, got 'cp'; there are dp, tp"):
        StatisticsPool(layers(), mesh("dp", "tp"), over=("dp", "cp"))
    with pytest.raises(ConfigError, match=r"over: expected none beside a process group, got \['dp'\]"):
        StatisticsPool(layers(), dist.group.WORLD, over=("dp",))
    with pytest.raises(ConfigError, match=r"ranks: expected a DeviceMesh or a process group .* got None"):
        StatisticsPool(layers(), None)

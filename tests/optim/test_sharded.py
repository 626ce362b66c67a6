"""Sharded training equals training in one place; the ranks are processes of this machine."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from perilune.core.errors import ConfigError
from perilune.optim import Blocks, PerHeadMuon, Role
from perilune.optim.sharded import balance, cost
from ranks import one_rank, run_ranks

# name: (shape, tensor dimension that is cut, treatment); heads fewer than ranks, uneven and empty shards
CASES = {
    "3 heads": ((3 * 5, 6), 0, Blocks(repeat=3)),
    "4 heads, whole on every rank": ((4 * 5, 6), 0, Blocks(repeat=4)),
    "one head": ((7, 9), 0, Blocks()),
    "columns": ((6, 10), 1, Blocks(repeat=2)),
    "keys and values": ((2 * (4 + 3), 5), 0, Blocks((4, 3), repeat=2)),
    "experts": ((5, 4, 6), 0, Blocks()),
    "experts, cut inside": ((3, 6, 4), 1, Blocks()),
    "3 rows": ((3, 8), 0, Blocks()),
    "everywhere": ((5, 4), None, Blocks(repeat=5)),
    "embedding": ((11, 4), 0, None),
    "norm": ((9,), 0, None),
}


def role(param, blocks):
    return Role(param, "adamw", weight_decay=False) if blocks is None else Role(param, "muon", blocks)


def data(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, (shape, *_) in CASES.items()}


def train(place):
    """Three steps on parameters laid out by `place(tensor, dim)`; their values in the end."""
    params = {name: nn.Parameter(place(x, CASES[name][1])) for name, x in data(0).items()}
    optimizer = PerHeadMuon({name: role(p, CASES[name][2]) for name, p in params.items()}, lr=0.05)
    for step in range(1, 4):
        for name, grad in data(step).items():
            params[name].grad = place(grad, CASES[name][1])
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def run_rank(rank, ranks):
    alone = train(lambda x, dim: x.clone())
    flat, two_by_two = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))
    for mesh, others in ((flat, []), (two_by_two, [Replicate()])):

        def place(x, dim, mesh=mesh, others=others):
            return distribute_tensor(x, mesh, [*others, Replicate() if dim is None else Shard(dim)])

        for name, value in train(place).items():
            assert isinstance(value, DTensor)
            where = f"{name} on rank {rank} of {mesh}"
            torch.testing.assert_close(value.full_tensor(), alone[name], rtol=0, atol=1e-12, msg=where)


@pytest.mark.slow
def test_sharded_parameters_are_updated_as_if_whole(tmp_path):
    """On four ranks, and on two pairs that hold the same; more ranks than heads."""
    run_ranks(4, tmp_path, run_rank)


def test_a_matrix_cut_along_two_mesh_dimensions_is_refused(tmp_path):
    with one_rank(tmp_path):
        mesh = init_device_mesh("cpu", (1, 1))
        param = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0), Shard(1)]))
        param.grad = torch.ones_like(param)
        with pytest.raises(ConfigError, match="params: expected a DTensor sharded along one mesh dimension at most"):
            PerHeadMuon([Role(param, "muon")], lr=0.1).step()


def test_owners_share_the_work():
    costs = [cost(shape, Blocks()) for shape in ((8, 16), (16, 8), (4, 4), (32, 16), (4, 4))]
    assert costs == [1024, 1024, 64, 8192, 64]
    owners = balance(costs, 2)
    assert owners == [1, 1, 1, 0, 1]
    assert cost((8, 16), Blocks(repeat=4)) == 256  # heads are cheaper than the whole

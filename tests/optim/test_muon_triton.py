"""Muon's passes over memory as kernels: the same steps as by torch's operations, up to rounding.

What needs them runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from perilune.ops import cast_once, projections
from perilune.optim import Blocks, PerHeadMuon, Role, fused, muon

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
SHAPES = {  # all but the last lie as the kernels want them
    "heads": ((4 * 16, 70), Blocks(repeat=4)),
    "experts": ((5, 24, 40), Blocks()),
    "whole": ((12, 33), Blocks()),
    "square": ((3, 64, 64), Blocks()),
    "tall": ((33, 12), Blocks()),
    "tall too": ((4, 33, 12), Blocks()),
    "whole too": ((12, 33), Blocks()),
    "tall again": ((33, 12), Blocks()),
    "some whole": ((2, 12, 33), Blocks()),
    "keys and values": ((2 * (8 + 4), 32), Blocks((8, 4), repeat=2)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


@pytest.fixture(autouse=True)
def _no_deterministic_forms_on_a_gpu() -> None:
    """They ask for a setting of cuBLAS."""
    if GPU:
        torch.use_deterministic_algorithms(False)


def steps(number: int, **options: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights and momenta after so many steps, the same from the start at every call."""
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(*shape).to(DEVICE)) for name, (shape, _) in SHAPES.items()}
    optimizer = PerHeadMuon({name: Role(p, "muon", SHAPES[name][1]) for name, p in params.items()}, lr=0.03, **options)
    for _ in range(number):
        for p in params.values():
            p.grad = torch.randn(p.shape).to(DEVICE)
        optimizer.step()
    return [p.detach() for p in params.values()], [optimizer.state[p]["momentum"] for p in params.values()]


@needs_kernels
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_equal_those_of_torchs_operations(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[bool] = []
    serves = fused.serves
    monkeypatch.setattr(fused, "serves", lambda *x: served.append(serves(*x)) or served[-1])
    got = steps(3, nesterov=nesterov)
    assert served == 3 * [*9 * [True], False]
    monkeypatch.setattr(fused, "serves", lambda *x: False)
    for a, b in zip(got, steps(3, nesterov=nesterov)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_bfloat16_directions_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = steps(1)[0]
    start = steps(0)[0]
    for x, y, w in zip(steps(1, ns_dtype=torch.bfloat16)[0], exact, start):
        assert 0 < (x - y).norm() < 0.05 * (y - w).norm()


@needs_kernels
@pytest.mark.parametrize("tensors", [1, 3, fused.MOST, fused.MOST + 2])
@pytest.mark.parametrize("count", [0, 1, fused.BLOCK, 2 * fused.BLOCK + 3])
def test_nothing_beside_the_tensors_is_touched(count: int, tensors: int) -> None:
    rooms = [torch.full((count + 2,), 7.0, device=DEVICE) for _ in range(3 * tensors)]
    room = torch.full((tensors * count + 2,), 7.0, device=DEVICE)
    every, direction = [x[1:-1] for x in rooms], room[1:-1]
    for x in every:
        x.copy_(torch.randn(count))
    momenta, grads, weights = every[:tensors], every[tensors : 2 * tensors], every[2 * tensors :]
    m, w = [0.9 * momentum + grad for momentum, grad in zip(momenta, grads)], [x.clone() for x in weights]
    fused.directions_(momenta, grads, direction, 0.9, True)
    fused.descend_(weights, direction, 0.5, 0.25)
    for i, own in enumerate(direction.view(tensors, count)):
        torch.testing.assert_close(momenta[i], m[i])
        torch.testing.assert_close(own, grads[i] + 0.9 * m[i])
        torch.testing.assert_close(weights[i], 0.5 * w[i] - 0.25 * own)
    assert all(x[0] == x[-1] == 7 for x in (*rooms, room))


@needs_kernels
def test_on_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.manual_seed(0)
    start, grad = torch.randn(2, 12, 33)
    stepped = []
    for device in ("cuda:0", "cuda:1"):
        weight = torch.nn.Parameter(start.to(device))
        weight.grad = grad.to(device)
        PerHeadMuon([Role(weight, "muon")], lr=0.1).step()
        stepped.append(weight.detach().cpu())
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(*stepped)


@needs_kernels
def test_whoever_keeps_something_made_of_a_weight_sees_it_change() -> None:
    """As a graph that saved it, or `cast_once`, which tell by its version."""
    weight = torch.nn.Parameter(torch.randn(4, 6, device=DEVICE))
    optimizer = PerHeadMuon([Role(weight, "muon", Blocks(repeat=2))], lr=0.1)
    momentum = optimizer.state[weight]["momentum"]
    x = torch.randn(3, 6, device=DEVICE)
    weight.grad = torch.randn_like(weight)
    assert fused.serves(weight, weight.grad, momentum)
    with cast_once([weight], torch.bfloat16), torch.autocast(DEVICE.type, torch.bfloat16):
        before = weight._version, momentum._version
        y = projections(x, [weight])[0]
        optimizer.step()
        assert weight._version > before[0]
        assert momentum._version > before[1]
        z = projections(x, [weight])[0]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(z, projections(x, [weight])[0])
    assert not torch.equal(z, y)


@needs_kernels
def test_layers_share_launches_and_batches_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty layers of one shape, and parts of stacks where they are more than an iteration takes."""

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        shapes = [(6, 40), (40, 6), (3, 6, 40)] * 7
        params = [nn.Parameter(torch.randn(shape).to(DEVICE)) for shape in shapes]
        optimizer = PerHeadMuon([Role(p, "muon") for p in params], lr=0.03)
        for p in params:
            p.grad = torch.randn(p.shape).to(DEVICE)
        optimizer.step()
        return [p.detach() for p in params]

    launched: list[int] = []
    directions = fused.directions_
    monkeypatch.setattr(fused, "directions_", lambda m, *x: launched.append(len(m)) or directions(m, *x))
    whole = trained()
    assert launched == [7, 7, 7]
    monkeypatch.setattr(muon, "DEVICE_BATCH", 6 * 40 * 4)
    for a, b in zip(whole, trained()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert len(launched) > 10


def test_what_lies_otherwise_is_not_served() -> None:
    x = torch.zeros(4, 6, device=DEVICE)
    assert fused.serves(x, x) == (GPU or INTERPRETED)
    assert not fused.serves(x, x.double())
    assert not fused.serves(x, x.mT)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernels_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

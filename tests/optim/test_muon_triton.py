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

from perilune.optim import Blocks, PerHeadMuon, Role, fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
SHAPES = {  # the first four lie as the kernels want them
    "heads": ((4 * 16, 70), Blocks(repeat=4)),
    "experts": ((5, 24, 40), Blocks()),
    "whole": ((12, 33), Blocks()),
    "square": ((3, 64, 64), Blocks()),
    "tall": ((33, 12), Blocks()),
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
    assert served == 3 * [True, True, True, True, False, False]
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
@pytest.mark.parametrize("count", [0, 1, fused.BLOCK, 2 * fused.BLOCK + 3])
def test_nothing_beside_a_tensor_is_touched(count: int) -> None:
    rooms = [torch.full((count + 2,), 7.0, device=DEVICE) for _ in range(4)]
    momentum, grad, weight, direction = (room[1:-1] for room in rooms)
    for x in (momentum, grad, weight):
        x.copy_(torch.randn(count))
    m, w = 0.9 * momentum + grad, weight.clone()
    fused.directions_(momentum, grad, direction, 0.9, True)
    fused.descend_(weight, direction, 0.5, 0.25)
    torch.testing.assert_close(momentum, m)
    torch.testing.assert_close(direction, grad + 0.9 * m)
    torch.testing.assert_close(weight, 0.5 * w - 0.25 * direction)
    assert all(room[0] == room[-1] == 7 for room in rooms)


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

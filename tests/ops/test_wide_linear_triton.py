"""The kernel that splits a matrix into bfloat16 parts: the bits of torch's operations.

What needs it runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU; the interpreter cuts
numbers off where a GPU rounds them, so that there only the parts' sum is the same.
"""

import os
import subprocess
import sys

import pytest
import torch

from perilune.ops.wide_linear import parts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_kernel = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs in test_the_kernel_interpreted")


@pytest.fixture(autouse=True)
def _no_deterministic_forms_on_a_gpu() -> None:
    """They ask for a setting of cuBLAS."""
    if GPU:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize(("M", "N"), [(0, 3), (1, 1), (33, 65), (7, 300)])
def test_parts_have_the_bits_of_torchs(M: int, N: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every layout that the layer has: rows, columns, every other number; parts one by one, or by rows."""
    x = torch.randn(M, N, device=DEVICE) * torch.logspace(-27, 30, N, device=DEVICE)
    x[x.abs() > 1e30] *= 1e8  # beyond the largest bfloat16 here and there, and infinite
    for own in (x, x.T.contiguous().T, torch.stack([x, x * torch.nan], -1)[..., 0]):
        made = []
        for _ in range(2):
            room = torch.full((2, number * M * N + 2), 7.0, dtype=torch.bfloat16, device=DEVICE)
            by_part, by_row = room[0, 1:-1].view(number, M, N), room[1, 1:-1].view(M, number, N).transpose(0, 1)
            parts.split(own, by_part)
            parts.split(own, by_row)
            assert torch.equal(by_part.view(torch.int16), by_row.view(torch.int16))
            assert (room[:, [0, -1]] == 7).all()
            made.append(by_part)
            monkeypatch.setattr(parts, "TRITON", False)
        monkeypatch.undo()
        there = ~made[1].isnan()  # a number that is none has any bits
        assert torch.equal(made[0].isnan(), ~there)
        if GPU:
            assert torch.equal(made[0].view(torch.int16)[there], made[1].view(torch.int16)[there])
        if number == 4:
            assert torch.equal(made[0][3].view(torch.int16), made[0][2].view(torch.int16))
        finite = there.all(0) & own.isfinite()
        assert torch.equal(made[0][:3].double().sum(0)[finite], own.double()[finite])


@pytest.mark.gpu
@needs_kernel
def test_both_ways_give_the_layer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 24, device=DEVICE).bfloat16().requires_grad_()
    weight, dy = torch.randn(6, 24, device=DEVICE, requires_grad=True), torch.randn(40, 6, device=DEVICE)

    def run() -> list[torch.Tensor]:
        y = parts.wide_linear(x, weight)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]

    at_once = run()
    monkeypatch.setattr(parts, "TRITON", False)
    for a, b in zip(at_once, run()):
        tolerance = 0 if GPU else 4 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernel runs here")
def test_the_kernel_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

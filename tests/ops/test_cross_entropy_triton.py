"""The kernel of the head's loss against the reference in float64.

What needs it runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU: there in small sizes,
and mostly on float32, for the interpreter cuts bfloat16 off where a GPU rounds.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError
from perilune.ops import fused as shared
from perilune.ops import linear_cross_entropy
from perilune.ops.cross_entropy import IGNORED, fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]
SIZES = [(1, 1, 1), (7, 3, 5), (0, 4, 9), (130, 8, 17), (300, 16, 1000), (9, 4, 4113)]
if GPU:
    SIZES += [(1000, 64, 32768), (517, 256, 50257), (300, 128, 163840)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # of the interpreter
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _no_deterministic_forms_on_a_gpu() -> None:
    """They ask for a setting of cuBLAS; whether results repeat is a test of its own."""
    if GPU:
        torch.use_deterministic_algorithms(False)


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernel_interpreted")
    return pytest.mark.gpu(skip(test))


def inputs(M: int, D: int, V: int, dtype: torch.dtype = torch.float32, ignored: float = 0.0) -> tuple[Tensor, ...]:
    """h, weight, targets; logits of about 1."""
    h, weight = torch.randn(M, D).to(DEVICE, dtype), (D**-0.5 * torch.randn(V, D)).to(DEVICE, dtype)
    targets = torch.randint(0, V, (M,), device=DEVICE)
    targets[torch.randperm(M, device=DEVICE)[: int(ignored * M)]] = IGNORED
    return h.requires_grad_(), weight.requires_grad_(), targets


def run(backend: str, h: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss, dh and dW, of half the loss."""
    loss = linear_cross_entropy(h, weight, targets, backend=backend)
    return [loss.detach(), *torch.autograd.grad(0.5 * loss, (h, weight))]


def wide(h: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return h.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), targets


def assert_close(got: list[Tensor], exact: list[Tensor], slack: float = 1.0) -> None:
    """Within what rounding logits and their gradient to the dtype makes; in float32, the last place of a norm of 10."""
    for x, y, dtype in zip(got, exact, (got[1].dtype, got[1].dtype, got[2].dtype)):
        assert x.isfinite().all()
        bound = slack * (2 * torch.finfo(dtype).eps + 4e-6) * (y.norm() + 1e-30)
        assert (x.double() - y).norm() <= bound, (float((x.double() - y).norm()), float(bound))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("M", "D", "V"), SIZES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_kernel_equals_the_reference(
    blocks: int, M: int, D: int, V: int, ignored: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks > 1:
        monkeypatch.setattr(fused, "LOGITS_BYTES", 0)  # a tile of rows a block
    if INTERPRETED and V > 1000 and (blocks, ignored) != (1, 0.3):
        pytest.skip("slow to interpret")
    tensors = inputs(M, D, V, dtype, ignored)
    got = run("triton", *tensors)
    assert [x.dtype for x in got] == [torch.float32, dtype, dtype]
    exact = run("reference", *wide(*tensors))
    assert_close(got, exact)
    assert not got[1][tensors[2] == IGNORED].any()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU takes all dtypes above")
def test_bfloat16_interpreted() -> None:
    tensors = inputs(20, 16, 40, torch.bfloat16, 0.2)
    assert_close(run("triton", *tensors), run("reference", *wide(*tensors)), slack=2.0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_target_count_nothing_whatever_they_hold(dtype: torch.dtype) -> None:
    h, weight, targets = inputs(40, 8, 50, dtype)
    with torch.no_grad():
        targets[::3], h[::3] = IGNORED, torch.nan
        h[3] = torch.inf
    got = run("triton", h, weight, targets)
    kept = targets != IGNORED
    exact = run("reference", *wide(h[kept], weight, targets[kept]))
    assert_close([got[0], got[1][kept], got[2]], exact)
    assert not got[1][~kept].any()


@needs_kernels
def test_a_broken_row_is_seen_and_stays_alone() -> None:
    h, weight, targets = inputs(6, 8, 50)
    expected = run("triton", h, weight, targets)
    with torch.no_grad():
        h[2] = torch.nan
    loss, dh, dw = run("triton", h, weight, targets)
    assert loss.isnan()
    assert dw.isnan().all()
    assert dh[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(dh[others], expected[1][others])


@needs_kernels
def test_large_logits_stay_finite() -> None:
    h, weight, targets = inputs(5, 4, 60)
    tensors = (1e4 * h).detach().requires_grad_(), weight, targets
    assert_close(run("triton", *tensors), run("reference", *wide(*tensors)))
    with torch.no_grad():
        far = linear_cross_entropy(1e36 * torch.ones_like(h), weight, targets, backend="triton")
    assert far > 1e34


@needs_kernels
def test_strides_do_not_matter() -> None:
    h, weight, targets = inputs(20, 8, 33)
    loose = h.detach().T.contiguous().T.requires_grad_(), weight.detach().T.contiguous().T.requires_grad_()
    room = torch.full((20, 2), -7, device=DEVICE)
    room[:, 1] = targets
    for got, expected in zip(run("triton", *loose, room[:, 1]), run("triton", h, weight, targets)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_only_what_is_asked_for_is_computed() -> None:
    h, weight, targets = inputs(30, 8, 70)
    loss, dh, dw = run("triton", h, weight, targets)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(h, weight, targets, backend="triton"), loss)
    for i, expected in ((0, dh), (1, dw)):
        leaves = [x.detach().requires_grad_(i == j) for j, x in enumerate((h, weight))]
        (got,) = torch.autograd.grad(0.5 * linear_cross_entropy(*leaves, targets, backend="triton"), leaves[i])
        assert torch.equal(got, expected)


@needs_kernels
def test_repeats_bit_for_bit() -> None:
    tensors = inputs(*((5000, 512, 32768) if GPU else (20, 8, 70)), DTYPES[0], 0.1)
    expected = run("triton", *tensors)
    for _ in range(3 if GPU else 1):
        assert all(torch.equal(x, y) for x, y in zip(run("triton", *tensors), expected))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the process could not go on")
@pytest.mark.parametrize("target", [-1, 50, 10**12])
def test_targets_beyond_the_vocabulary_are_refused(target: int) -> None:
    h, weight, targets = inputs(6, 8, 50)
    targets[4] = target
    with pytest.raises(RuntimeError, match="targets: expected 0 to 49, or -100, got another"):
        linear_cross_entropy(h, weight, targets, backend="triton")


@needs_kernels
def test_what_cannot_be_served_is_refused_by_name_and_passed_on_by_auto() -> None:
    h, weight, targets = (x.detach() for x in inputs(6, 8, 50))
    with pytest.raises(BackendError, match=r"cannot run on 'triton'.*float64"):
        linear_cross_entropy(h.double(), weight.double(), targets, backend="triton")
    assert linear_cross_entropy(h.double(), weight.double(), targets).dtype == torch.float64
    auto, asked = (linear_cross_entropy(h, weight, targets, backend=name) for name in ("auto", "triton"))
    assert torch.equal(auto, asked)


@pytest.mark.parametrize("M", [0, 1, 127, 128, 129, 4096, 4097, 33000])
@pytest.mark.parametrize("V", [16, 32768, 65536, 163840, 10**9])
def test_blocks_hold_what_they_may_and_are_alike(M: int, V: int) -> None:
    size = fused.rows_of_block(M, 2 * V)
    assert size > 0 == size % fused.TILE
    assert size * 2 * V <= max(fused.LOGITS_BYTES, fused.TILE * 2 * V)
    if M:
        blocks = -(-M // size)
        fewest = -(-M // max(fused.TILE, fused.LOGITS_BYTES // (2 * V) // fused.TILE * fused.TILE))
        assert blocks == fewest
        assert blocks * size - M < blocks * fused.TILE


def test_gpus_whose_sums_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(2, 3, 16)
    monkeypatch.setattr(shared, "INTERPRETED", True)
    assert fused.refuses(*tensors, IGNORED) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA's GPUs alone" in (fused.refuses(*tensors, IGNORED) or "")


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernel runs here")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(BackendError, match="'triton': its kernels run on a GPU, and the tensors are on cpu"):
        linear_cross_entropy(*inputs(2, 3, 16), backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernel_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

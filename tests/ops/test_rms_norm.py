"""Both norms: worked values, the precision contract, and the kernels against the reference in float64.

What needs kernels runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU: there in small
sizes, and hardly in bfloat16, which the interpreter cuts off where a GPU rounds.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError, ShapeError
from perilune.ops import gated_rms_norm, rms_norm
from perilune.ops.rms_norm import launch
from perilune.ops.rms_norm.reference import rms_normalize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float16, torch.float32]
ROWS = [0, 1, 5, 700, 40_000] if GPU else [0, 1, 5, 70]
WIDTHS = [1, 16, 48, 128, 320, 1024, 1536, 7168, 8192] if GPU else [1, 16, 48, 1000]
EPS = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def inputs(R: int, D: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x [R, D] of rows of several sizes, weight [D] in float32, gate [R, D]."""
    torch.manual_seed(0)
    x = torch.randn(R, D) * 4.0 ** (torch.arange(R) % 5 - 2).unsqueeze(1)
    tensors = x.to(dtype), 1 + 0.3 * torch.randn(D), (2 * torch.randn(R, D)).to(dtype)
    return [t.to(DEVICE).requires_grad_() for t in tensors]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def run(backend: str, tensors: list[Tensor], dy: Tensor, gated: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The value and the gradients of x, weight and, if there is one, gate."""
    x, weight, gate = tensors
    if gated:
        y = gated_rms_norm(x, weight, gate, EPS, backend=backend)
    else:
        y = rms_norm(x, weight, EPS, dtype=dtype, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, tensors if gated else tensors[:2], dy)]


def assert_close(got: list[Tensor], exact: list[Tensor], roundings: float = 1.0, least: float = 0.0) -> None:
    """Within `roundings` last places of each dtype, and what float32 makes of sums of this size, `least` at least."""
    for i, (x, y) in enumerate(zip(got, exact, strict=True)):
        size = max(float(y.abs().max()) if y.numel() else 0.0, least)
        bound = roundings * torch.finfo(x.dtype).eps * y.abs() + 256 * torch.finfo(torch.float32).eps * size
        assert ((x.double() - y).abs() <= bound).all(), (i, float((x.double() - y).abs().max()), size)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit where interpreted; compiled for other strides or outputs, a kernel may sum in another order."""
    for x, y in zip(got, expected, strict=True):
        if GPU:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(x, y)


def test_worked_values() -> None:
    x, weight = torch.tensor([3.0, -4.0]).double(), torch.tensor([1.0, 2.0]).double()
    root = (12.5 + 1e-2) ** 0.5
    assert rms_norm(x, weight, 1e-2).tolist() == pytest.approx([3 / root, -8 / root], rel=1e-14)
    gate = torch.tensor([0.0, 1.0]).double()
    expected = [1.5 / root, -8 / root / (1 + 2.718281828459045**-1)]
    assert gated_rms_norm(x, weight, gate, 1e-2).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_dtype_asked_for_is_the_cast_that_would_follow(dtype: torch.dtype) -> None:
    x, weight, _ = (t.detach() for t in inputs(6, 40))
    x = x.to(dtype)
    backend = "reference" if INTERPRETED else "auto"
    for asked in (torch.bfloat16, torch.float32):
        got = rms_norm(x, weight, EPS, dtype=asked, backend=backend)
        assert torch.equal(got, rms_norm(x, weight, EPS, backend=backend).to(asked))
    assert rms_norm(x, weight, EPS).dtype == dtype


def test_float64_stays_float64() -> None:
    x, weight, gate = wide(inputs(5, 16))
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda *t: gated_rms_norm(*t, EPS), (x, weight, gate))
    assert rms_normalize(x, EPS).dtype == torch.float64


@pytest.mark.parametrize(
    ("message", "x", "weight"),
    [
        (r"x: expected a floating tensor \[..., D\], got torch.int64", torch.zeros(2, dtype=torch.long), torch.ones(2)),
        (r"x: expected a floating tensor \[..., D\], got torch.float32 \[\]", torch.zeros(()), torch.ones(())),
        (r"weight: expected a floating tensor \[3\]", torch.zeros(2, 3), torch.ones(2)),
        (r"weight: expected a floating tensor \[3\]", torch.zeros(2, 3), torch.ones(1)),
    ],
)
def test_what_does_not_fit_is_refused(message: str, x: Tensor, weight: Tensor) -> None:
    with pytest.raises(ShapeError, match=message):
        rms_norm(x, weight, EPS)
    with pytest.raises(ShapeError, match=message):
        gated_rms_norm(x, weight, x, EPS)


def test_a_gate_has_the_shape_of_x_and_a_dtype_is_floating() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"gate: expected a floating tensor \[2, 3\] like x, got torch.float32 \[3\]"):
        gated_rms_norm(x, torch.ones(3), torch.zeros(3), EPS)
    with pytest.raises(ShapeError, match=r"dtype: expected a floating dtype, got torch\.int64"):
        rms_norm(x, torch.ones(3), EPS, dtype=torch.int64)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernels_equal_the_reference(gated: bool, R: int, D: int, dtype: torch.dtype) -> None:
    if R * D > 2**27:
        pytest.skip("float64 would need much memory")
    tensors = inputs(R, D, dtype)
    dy = torch.randn(R, D, device=DEVICE).to(dtype)
    got = run("triton", tensors, dy, gated)
    assert [x.dtype for x in got] == [dtype, dtype, torch.float32] + gated * [dtype]
    narrow = dtype != torch.float32 and not gated  # then row and weight are rounded before they meet
    x, weight, gate = wide(tensors)
    weight = tensors[1].detach().to(dtype).double().requires_grad_() if narrow else weight
    exact = run("reference", [x, weight, gate], dy.double(), gated)
    least = float((dy / tensors[0].detach()).abs().max()) if D == 1 and R else 0.0  # dx is all cancelled there
    if narrow:  # a sum over rounded numbers: as far off as a random walk goes
        off = (got.pop(2).double() - exact.pop(2)).abs()
        steps = dy.double() * rms_normalize(x.detach(), EPS)
        assert (off <= 3 * torch.finfo(dtype).eps * steps.square().sum(0).sqrt() + 1e-6).all()
    assert_close(got, exact, roundings=2.0 if narrow else 1.0, least=least)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_the_reference(dtype: torch.dtype) -> None:
    """The same numbers, but for a last place where sums in another order fall to its other side.

    The interpreter cuts three roundings off, up to a last place each.
    """
    x, weight, gate = (t.detach() for t in inputs(40, 48, dtype))
    for gated in (False, True):
        a, b = (
            gated_rms_norm(x, weight, gate, EPS, backend=name) if gated else rms_norm(x, weight, EPS, backend=name)
            for name in ("triton", "reference")
        )
        assert a.dtype == b.dtype == dtype
        assert (
            (a.double() - b.double()).abs() <= (4 if INTERPRETED else 2) * torch.finfo(dtype).eps * b.double().abs()
        ).all()
        if GPU:
            assert (a == b).double().mean() > 0.99


@needs_kernels
@pytest.mark.parametrize(("given", "asked"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_kernels_cast_as_they_are_asked(given: torch.dtype, asked: torch.dtype) -> None:
    tensors = inputs(9, 48, given)
    dy = torch.randn(9, 48, device=DEVICE).to(asked)
    got = run("triton", tensors, dy, False, asked)
    expected = run("reference", tensors, dy, False, asked)
    assert [x.dtype for x in got] == [x.dtype for x in expected] == [asked, given, torch.float32]
    for x, y in zip(got, expected):
        assert (x.double() - y.double()).abs().max() <= 3 * torch.finfo(torch.bfloat16).eps * y.double().abs().max()


@needs_kernels
def test_x_and_gate_may_differ_in_dtype() -> None:
    x, weight, gate = inputs(9, 48)
    gate = gate.detach().bfloat16().requires_grad_()
    dy = torch.randn(9, 48, device=DEVICE).bfloat16()
    got = run("triton", [x, weight, gate], dy, True)
    assert [t.dtype for t in got] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert_close(got, run("reference", wide([x, weight, gate]), dy.double(), True), roundings=2.0)


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
def test_strides_do_not_matter_and_nothing_beside_a_row_is_read(gated: bool) -> None:
    """Rows cut from wider ones, turned ones, one for all; NaN and infinities lie in between."""
    x, weight, gate = (t.detach() for t in inputs(6, 40))
    room = torch.full((6, 3, 64), torch.nan, device=DEVICE)
    room[:, 2] = torch.inf
    cut, other = room[:, 0, 3:43], room[:, 1, :40]
    cut.copy_(x)
    other.copy_(gate)
    turned = torch.empty(40, 6, device=DEVICE).T.copy_(gate)
    spaced = torch.full((80,), torch.nan, device=DEVICE)[::2].copy_(weight)
    for loose in ([cut, spaced, other], [turned, weight, cut], [x[:1].expand(6, 40), weight, turned]):
        loose = [t.requires_grad_() for t in loose]
        tight = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in loose]
        for dy in (torch.randn(40, 6, device=DEVICE).T, torch.randn(40, device=DEVICE).expand(6, 40)):
            assert_same(run("triton", loose, dy, gated), run("triton", tight, dy.contiguous(), gated))
        room = room.detach()
        cut, other = room[:, 0, 3:43], room[:, 1, :40]


@needs_kernels
@pytest.mark.parametrize("shape", [(48,), (2, 3, 4, 48), (2, 0, 48)], ids=str)
def test_any_number_of_axes(shape: tuple[int, ...]) -> None:
    x, gate = (torch.randn(shape, device=DEVICE).requires_grad_() for _ in range(2))
    weight = torch.randn(48, device=DEVICE).requires_grad_()
    for gated in (False, True):
        got = run("triton", [x, weight, gate], torch.ones(shape, device=DEVICE), gated)
        exact = run("reference", wide([x, weight, gate]), torch.ones(shape, device=DEVICE).double(), gated)
        assert [t.shape for t in got] == [t.shape for t in exact]
        assert_close(got, exact)


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_broken_row_stays_alone(gated: bool) -> None:
    """A program goes through many rows; what it holds of one must not reach the next."""
    tensors = inputs(300, 48)
    dy = torch.randn(300, 48, device=DEVICE)
    expected = run("triton", tensors, dy, gated)
    broken = [t.detach().clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        broken[0][0, 3], broken[0][1] = torch.nan, torch.inf
    got = run("triton", broken, dy, gated)
    for i in (0, 1) + gated * (3,):
        assert torch.equal(got[i][2:], expected[i][2:])
    assert got[0][0].isnan().all()


@needs_kernels
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("factor", [0.0, 1e-18, 1e15])
def test_huge_tiny_and_no_values(factor: float) -> None:
    x, weight, gate = inputs(4, 48)
    tensors = [(factor * x.detach()).requires_grad_(), weight, (100 * gate.detach()).requires_grad_()]
    dy = torch.randn(4, 48, device=DEVICE)
    for gated in (False, True):
        got = run("triton", tensors, dy, gated)
        assert all(t.isfinite().all() for t in got)
        assert_close(got, run("reference", wide(tensors), dy.double(), gated))


@needs_kernels
def test_only_what_is_asked_for_is_computed() -> None:
    tensors = inputs(7, 48)
    dy = torch.randn(7, 48, device=DEVICE)
    expected = run("triton", tensors, dy, True)
    for i in range(3):
        leaves = [t.detach().requires_grad_(j == i) for j, t in enumerate(tensors)]
        y = gated_rms_norm(*leaves, EPS, backend="triton")
        assert_same(list(torch.autograd.grad(y, leaves[i], dy)), expected[i + 1 : i + 2])
    with torch.no_grad():
        assert_same([gated_rms_norm(*tensors, EPS, backend="triton")], expected[:1])


@needs_kernels
def test_the_graph_keeps_the_inputs_and_nothing_else() -> None:
    tensors = inputs(7, 48)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_rms_norm(*tensors, EPS, backend="triton")
        rms_norm(*tensors[:2], EPS, backend="triton")
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in tensors}


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
def test_repeats_bit_for_bit(gated: bool) -> None:
    R, D = (30_000, 1024) if GPU else (90, 48)
    tensors, dy = inputs(R, D, DTYPES[0]), torch.randn(R, D, device=DEVICE).to(DTYPES[0])
    expected = run("triton", tensors, dy, gated)
    for _ in range(3 if GPU else 1):
        assert all(torch.equal(x, y) for x, y in zip(run("triton", tensors, dy, gated), expected))


@needs_kernels
def test_a_program_with_many_rows_and_programs_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient is whole however rows fall on programs."""
    tensors, dy = inputs(37, 16), torch.randn(37, 16, device=DEVICE)
    exact = run("reference", wide(tensors), dy.double(), True)
    for tile in (16, 64, 4096):
        monkeypatch.setattr(launch, "TILE", tile)
        assert_close(run("triton", tensors, dy, True), exact)


@needs_kernels
def test_second_derivatives_are_refused() -> None:
    x, weight, _ = inputs(2, 16)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, EPS, backend="triton").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@needs_kernels
def test_what_cannot_be_served_is_refused_by_name_and_passed_on_by_auto() -> None:
    x, weight, gate = (t.detach() for t in inputs(3, 16))
    broad = torch.ones(1, 8193, device=DEVICE)
    for message, arguments in (
        ("an input is torch.float64", (x.double(), weight)),
        ("rows of 1 to 8192 elements, and these have 8193", (broad, broad[0])),
    ):
        with pytest.raises(BackendError, match=f"rms_norm cannot run on 'triton'.*{message}"):
            rms_norm(*arguments, EPS, backend="triton")
        assert torch.equal(rms_norm(*arguments, EPS), rms_norm(*arguments, EPS, backend="reference"))
    with pytest.raises(BackendError, match=r"the result is to be torch.float64"):
        rms_norm(x, weight, EPS, dtype=torch.float64, backend="triton")
    with pytest.raises(BackendError, match=r"gated_rms_norm cannot run on 'triton'.*an input is torch.float64"):
        gated_rms_norm(x, weight, gate.double(), EPS, backend="triton")
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x, weight, EPS, backend="triton"))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="rows by the gigabyte")
def test_more_than_32_bits_count() -> None:
    x = torch.empty(2**19 + 8, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-8:] = torch.randn(8, 4096, device=DEVICE)
    weight = torch.ones(4096, device=DEVICE)
    y = rms_norm(x, weight, EPS, backend="triton")
    assert torch.equal(y[-8:], rms_norm(x[-8:], weight, EPS, backend="triton"))


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run here")
def test_a_cpu_is_refused() -> None:
    x, weight, _ = inputs(2, 16)
    with pytest.raises(BackendError, match="cannot run on 'triton': its kernels run on a GPU, and the tensors are on"):
        rms_norm(x, weight, EPS, backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernels_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

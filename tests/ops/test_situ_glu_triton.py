"""The kernels of the gated units against the reference in float64.

What needs them runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU: there in small sizes,
and hardly in bfloat16, which the interpreter cuts off where a GPU rounds.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError
from perilune.ops import sigmoid_glu, situ_glu, swiglu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float16, torch.float32]
SHAPES = [(), (1,), (5,), (3, 5, 7), (0, 4), (4, 0), (70, 320), (3, 4097)] + GPU * [(30_000, 320), (700, 8192)]
UNITS = [situ_glu, swiglu, sigmoid_glu]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # of the interpreter
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def pair(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> list[Tensor]:
    torch.manual_seed(0)
    return [(scale * torch.randn(shape)).to(DEVICE, dtype).requires_grad_() for _ in range(2)]


def run(backend: str, unit: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor, *betas: float) -> list[Tensor]:
    """The value and both gradients."""
    y = unit(*inputs, *betas, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def exactly(unit: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor, *betas: float) -> list[Tensor]:
    return run("reference", unit, [x.detach().double().requires_grad_() for x in inputs], dy.double(), *betas)


def assert_close(got: list[Tensor], exact: list[Tensor], places: float = 1.0) -> None:
    """Rounded once, from float32 within a few of its own last places, at the size that is largest."""
    for name, x, y in zip(("y", "dgate", "dup"), got, exact, strict=True):
        size = y.abs().max() if y.numel() else 0.0
        bound = places * torch.finfo(x.dtype).eps * y.abs() + 8 * torch.finfo(torch.float32).eps * size
        assert ((x.double() - y).abs() <= bound).all(), (name, float((x.double() - y).abs().max()), float(size))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("unit", UNITS)
def test_the_kernels_equal_the_reference(
    unit: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs, dy = pair(*shape, dtype=dtype), torch.randn(shape, device=DEVICE).to(dtype)
    got = run("triton", unit, inputs, dy)
    assert [(x.shape, x.dtype) for x in got] == [(torch.Size(shape), dtype)] * 3
    assert_close(got, exactly(unit, inputs, dy))


@needs_kernels
@pytest.mark.parametrize("betas", [(4.0, 25.0), (1.0, 0.5), (30.0, 3.0), (1, 2)])
def test_other_caps(betas: tuple[float, float]) -> None:
    inputs, dy = pair(40, 9), torch.randn(40, 9, device=DEVICE)
    assert_close(run("triton", situ_glu, inputs, dy, *betas), exactly(situ_glu, inputs, dy, *betas))


@needs_kernels
@pytest.mark.parametrize("unit", UNITS)
def test_small_numbers_lose_nothing(unit: Callable[..., Tensor]) -> None:
    """A tanh by exponentials alone would give noise here."""
    size = torch.logspace(-12, 0.5, 200, device=DEVICE)
    inputs = [torch.cat([size, -size]).requires_grad_(), torch.cat([size.flip(0), size]).requires_grad_()]
    dy = torch.ones(400, device=DEVICE)
    for x, exact in zip(run("triton", unit, inputs, dy), exactly(unit, inputs, dy)):
        slope_passes_zero = exact.abs() < 1e-2 * exact.abs().max()
        near = inputs[0].detach().abs() < 0.5  # no slope passes zero there
        off = ((x.double() - exact) / exact).abs()
        assert off[near].max() < 1e-6
        assert off[~slope_passes_zero].max() < 1e-5


@pytest.mark.skipif(not INTERPRETED, reason="a GPU takes all dtypes above")
@pytest.mark.parametrize("unit", UNITS)
def test_bfloat16_interpreted(unit: Callable[..., Tensor]) -> None:
    """Within two last places, for the interpreter cuts off."""
    inputs, dy = pair(40, 9, dtype=torch.bfloat16), torch.randn(40, 9).bfloat16()
    assert_close(run("triton", unit, inputs, dy), exactly(unit, inputs, dy), places=2.0)


@needs_kernels
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("C", [20, 3000])
def test_halves_of_one_projection_and_any_other_strides(unit: Callable[..., Tensor], C: int) -> None:
    both = torch.randn(2, 3, 2 * C, device=DEVICE)
    heads = torch.full((2, 3, C + 8), torch.nan, device=DEVICE)[..., 3 : C + 3].copy_(both[..., :C])
    turned = torch.randn(C, 3, 2, device=DEVICE).permute(2, 1, 0)
    gradients = turned * 2, torch.randn(C, device=DEVICE).expand(2, 3, C), heads
    for inputs in (both.chunk(2, dim=-1), (both[..., ::2], turned), (heads, turned.contiguous()), (heads, heads)):
        for dy in gradients:
            loose = run("triton", unit, [x.detach().requires_grad_() for x in inputs], dy)
            tight = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in inputs]
            for got, expected in zip(loose, run("triton", unit, tight, dy.contiguous())):
                assert torch.equal(got, expected)
    leaf = both.clone().requires_grad_()
    y = unit(*leaf.chunk(2, dim=-1), backend="triton")
    wide = both.double().requires_grad_()
    exact = unit(*wide.chunk(2, dim=-1), backend="reference")
    (got,), (expected,) = torch.autograd.grad(y.sum(), leaf), torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_inputs_stay_finite_and_bounded(dtype: torch.dtype) -> None:
    ends = [0.0, 1.0, 30.0, 88.0, 90.0, 200.0, 1e4, 1e30]
    ends = torch.tensor(ends + [-x for x in ends], dtype=dtype, device=DEVICE)
    gate, up = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(ends, ends, indexing="ij"))
    y, dgate, dup = run("triton", situ_glu, [gate, up], torch.ones_like(gate))
    for t in (y, dgate, dup):
        assert torch.isfinite(t).all()
    assert (y.abs() <= 100).all()
    assert y[(gate == 1e4) & (up == 1e4)].eq(100).all()
    assert y[(gate == -1e4)].eq(0).all()
    for t in run("triton", sigmoid_glu, [gate, up], torch.ones_like(gate)):
        assert torch.isfinite(t).all()


@needs_kernels
@pytest.mark.parametrize("unit", UNITS)
def test_a_number_that_is_none_stays_where_it_is(unit: Callable[..., Tensor]) -> None:
    inputs, dy = pair(3, 50), torch.ones(3, 50, device=DEVICE)
    broken = [x.detach().clone() for x in inputs]
    broken[0][1, 7] = broken[1][2, 3] = torch.nan
    got = run("triton", unit, [x.requires_grad_() for x in broken], dy)
    for x, expected in zip(got, run("triton", unit, inputs, dy)):
        changed = x != expected
        assert not changed[0].any()
        assert set(changed.nonzero().flatten().tolist()) <= {1, 7, 2, 3}
    assert got[0][1, 7].isnan()
    assert got[0][2, 3].isnan()


@needs_kernels
@pytest.mark.parametrize("unit", UNITS)
def test_the_graph_keeps_the_inputs_and_the_pass_repeats_bit_for_bit(unit: Callable[..., Tensor]) -> None:
    inputs, dy = pair(64, 32), torch.randn(64, 32, device=DEVICE)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        unit(*inputs, backend="triton")
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in inputs}
    first, second = (run("triton", unit, inputs, dy) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="rows by the gigabyte")
@pytest.mark.parametrize("whole", [True, False])
def test_more_than_32_bits_count(whole: bool) -> None:
    inputs = [torch.zeros(2**19 + 8, 4096 if whole else 4104, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    gate, up = (x[:, :4096] for x in inputs)
    gate[-8:], up[-8:] = torch.randn(2, 8, 4096, device=DEVICE)
    y = situ_glu(gate, up, backend="triton")
    assert torch.equal(y[-8:], situ_glu(gate[-8:].contiguous(), up[-8:].contiguous(), backend="triton"))


@needs_kernels
def test_what_cannot_be_served_is_refused_by_name_and_passed_on_by_auto() -> None:
    gate, up = (x.detach().double() for x in pair(3, 16))
    for unit in UNITS:
        with pytest.raises(BackendError, match="cannot run on 'triton': its kernels compute in float32, and an input"):
            unit(gate, up, backend="triton")
        assert torch.equal(unit(gate, up), unit(gate, up, backend="chunked"))
        assert torch.equal(unit(gate.float(), up.float()), unit(gate.float(), up.float(), backend="triton"))


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run here")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(BackendError, match="cannot run on 'triton': its kernels run on a GPU, and the tensors are on"):
        situ_glu(*pair(2, 16), backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernels_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

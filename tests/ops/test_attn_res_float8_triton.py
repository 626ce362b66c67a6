"""The kernels over a bank in float8 against the reference in float64, which reads the same codes.

As with the other kernels of attention residuals: compiled on a GPU, interpreted in a process of its own on a CPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError
from perilune.ops import Stored, attn_res, store_source

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float32] if GPU else [torch.float32]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def inputs(N: int, R: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """query, key_weight, N sources [R, D] of different sizes."""
    torch.manual_seed(0)
    vectors = [D**-0.5 * torch.randn(D), 1 + 0.3 * torch.randn(D)]
    sources = [(2.0 ** (i % 3) * torch.randn(R, D)).to(dtype) for i in range(N)]
    return [x.to(DEVICE).requires_grad_() for x in (*vectors, *sources)]


def through(tensors: list[Tensor], bank: list, live: bool, dout: Tensor, backend: str) -> list[Tensor]:
    """Two mixers over N sources, of which the last may be whole; values and gradients."""
    query, key_weight, *sources = tensors
    given = [*bank, sources[-1]] if live else bank
    outs = [attn_res(q, given, key_weight, backend=backend) for q in (query, 1 - query)]
    return [*outs, *torch.autograd.grad(outs, tensors, [dout, 2 * dout])]


class _AsRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source: Tensor, read: Tensor) -> Tensor:
        return read.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [16, 48, 1000, 2048, 7168] if GPU else [16, 48])
@pytest.mark.parametrize("R", [0, 1, 5, 700] if GPU else [0, 1, 5])
@pytest.mark.parametrize(("N", "live"), [(1, False), (2, True), (2, False), (9, True), (16, True)])
def test_the_kernels_equal_the_reference(N: int, live: bool, R: int, D: int, dtype: torch.dtype) -> None:
    if INTERPRETED and R == 5 and N > 2:
        pytest.skip("slow to interpret")
    tensors, dout = inputs(N, R, D, dtype), torch.randn(R, D, device=DEVICE).to(dtype)
    bank = [store_source(x, "float8") for x in tensors[2 : len(tensors) - live]]
    got = through(tensors, bank, live, dout, "triton")
    wide = [x.detach().double().requires_grad_() for x in tensors]
    read = [_AsRead.apply(x, y.read(torch.float64).detach()) for x, y in zip(wide[2:], bank)]
    exact = through(wide, read, live, dout.double(), "reference")
    for i, (x, y) in enumerate(zip(got, exact, strict=True)):
        size = y.abs().max() if y.numel() else 0.0
        shared = 2 if i >= 4 else 1  # the sum of two readers is rounded after each
        bound = shared * torch.finfo(x.dtype).eps * (y.abs() + (shared - 1) * size)
        assert ((x.double() - y).abs() <= bound + 256 * torch.finfo(torch.float32).eps * size).all(), i


@needs_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_zeros_and_broken_rows_stay_alone() -> None:
    query, key_weight, a, b = (x.detach() for x in inputs(2, 7, 48, torch.float32))
    a[0] = 0
    clean = attn_res(query, [store_source(a, "float8"), b], key_weight, backend="triton")
    assert clean.isfinite().all()
    a[1, 3], a[2, 40] = torch.nan, torch.inf
    got = attn_res(query, [store_source(a, "float8"), b], key_weight, backend="triton")
    assert got[1:3].isnan().all()
    others = [0, 3, 4, 5, 6]
    assert torch.equal(got[others], clean[others])


@needs_kernels
def test_a_single_source_comes_back_and_teaches_the_query_nothing() -> None:
    query, key_weight, source = inputs(1, 6, 48, torch.float32)
    stored = store_source(source, "float8")
    out, dout = attn_res(query, [stored], key_weight, backend="triton"), torch.randn(6, 48, device=DEVICE)
    dquery, dsource = torch.autograd.grad(out, [query, source], dout)
    assert torch.equal(out, stored.read())
    assert dquery.eq(0).all()
    assert torch.equal(dsource, dout)


@needs_kernels
def test_what_they_cannot_serve_is_refused() -> None:
    query, key_weight, a, b = inputs(2, 4, 48, torch.float32)
    with pytest.raises(BackendError, match="a bank in float8 and one whole source behind it"):
        attn_res(query, [a, store_source(b, "float8")], key_weight, backend="triton")
    with pytest.raises(BackendError, match="a bank in float8 and one whole source behind it"):
        attn_res(query, [store_source(a, "bfloat16"), b], key_weight, backend="triton")
    with pytest.raises(BackendError, match="there is none"):
        attn_res(query, [Stored(a)], key_weight, backend="triton")


@pytest.mark.skipif(INTERPRETED or GPU, reason="the others run here")
def test_the_kernels_interpreted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout

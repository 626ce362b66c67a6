"""Float32 products in bfloat16 parts: the form itself on any device, the public call where it picks it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError, ShapeError
from perilune.nn.moe import Router
from perilune.ops import wide_linear
from perilune.ops.wide_linear import parts

GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")])]
SIZES = [(0, 8, 3), (1, 1, 1), (7, 5, 3), (300, 64, 10), (513, 1000, 37)]


@pytest.fixture(autouse=True)
def _no_deterministic_forms_on_a_gpu() -> None:
    """They ask for a setting of cuBLAS."""
    if GPU:
        torch.use_deterministic_algorithms(False)


def inputs(M: int, K: int, N: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x bfloat16, weight, dy float32; entries of all sizes."""
    x = torch.randn(M, K).mul_(torch.randn(K).exp()).to(device, torch.bfloat16)
    weight = (K**-0.5 * torch.randn(N, K).mul_(torch.randn(N, 1).exp())).to(device, dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(M, N).mul_(torch.randn(N).exp()).to(device)


def run(op: Callable[..., Tensor], x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dW."""
    y = op(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def exact(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    return run(lambda a, b: wide_linear(a, b, backend="reference"), x, weight, dy.double())


ON_A_GPU = [(32768, 1024, 256), (2048, 7168, 64)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("M", "K", "N"), SIZES + ON_A_GPU)
def test_as_exact_as_a_float32_product(M: int, K: int, N: int, device: str) -> None:
    """Up to what tensor cores cut off after every 16 terms: on average half of a last place, here up to a whole one.

    That is little beside the third part of W as long as sums are short, of 64 terms for one, or in runs.
    """
    if device == "cpu" and M > 1000:
        pytest.skip("of the size that a GPU is for")
    tensors = inputs(M, K, N, device)
    got = run(parts.wide_linear, *tensors)
    single = run(lambda a, b: a.float() @ b.T, *tensors)
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.float32]
    for a, b, oracle, terms in zip(got, single, exact(*tensors), (min(K, parts.RUN), 0, M)):
        error, usual = ((t.double() - oracle).norm() for t in (a, b))
        cut = 2.0**-24 * terms / 16 if device == "cuda" else 0.0
        assert error <= 1.5 * usual + (1e-7 + cut) * oracle.norm(), (float(error), float(usual))
    dx, oracle = got[1].double(), exact(*tensors)[1]
    size = (tensors[2].abs().double() @ tensors[1].detach().abs().double()).clamp(min=1e-30)  # of the sums' terms
    off = (dx - oracle).abs() - 2.0**-8 * oracle.abs()  # beyond half of the last place
    assert (off <= 2.0**-14 * size).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("M", "K", "N"), [*SIZES, (30, 1025, 5), (30, 5000, 3), *ON_A_GPU])
def test_errors_are_within_the_bounds_that_are_promised(M: int, K: int, N: int, device: str) -> None:
    if device == "cpu" and M > 1000:
        pytest.skip("of the size that a GPU is for")
    x, weight, dy = inputs(M, K, N, device)
    (y, _, dw), (exact_y, _, exact_dw) = run(parts.wide_linear, x, weight, dy), exact(x, weight, dy)
    x, weight, dy = (t.detach().abs().double() for t in (x, weight, dy))
    assert ((y - exact_y).abs() <= 2.0**-23 * (min(K, 1024) + K / 128) * (x @ weight.T)).all()
    assert ((dw - exact_dw).abs() <= 2.0**-23 * 1.01 * M * (dy.T @ x) + 2.0**-24 * exact_dw.abs()).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_sums_are_made_in_runs(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str) -> None:
    """Each as if it were alone, and as many as there are: of the first part of W, or of W itself."""
    x, weight, _ = (t.detach() for t in inputs(300, 100, 10, device, dtype))
    made: list[int] = []

    def add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        made.append(a.shape[1])
        return total.add_(a.float() @ b.float())

    monkeypatch.setattr(parts, "RUN", 32)
    monkeypatch.setattr(parts, "add_product_", add)
    y = parts.wide_linear(x, weight)
    assert made == [100, 32, 32, 32, 4][dtype != torch.float32 and 2 :]
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_scores_that_bfloat16_weights_would_tie_are_told_apart(device: str) -> None:
    """By as little as float32 can tell apart: a last place is 2^-19 above 16, half of that below."""
    x = torch.ones(300, 16, dtype=torch.bfloat16, device=device)
    weight = torch.ones(6, 16, device=device)
    third = 2.0**-9 + 2.0**-18  # of which two parts hold 2^-9
    weight[:, 3] += torch.tensor([0.0, 2.0**-18, -(2.0**-20), 2.0**-19, third, 2.0**-9], device=device)
    y = parts.wide_linear(x, weight)
    assert torch.equal(y.double(), x.double() @ weight.double().T)
    assert y[0].argsort().tolist() == [2, 0, 3, 1, 5, 4]
    assert weight.bfloat16().eq(1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_hold_every_bit(device: str) -> None:
    x = torch.randn(50, 40, device=device) * torch.logspace(-30, 30, 50, device=device)[:, None]
    pieces = torch.empty(3, 50, 40, dtype=torch.bfloat16, device=device)
    parts.split(x, pieces)
    assert torch.equal(pieces.double().sum(0), x.double())


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_weights_are_one_part(device: str) -> None:
    tensors = inputs(300, 64, 10, device, torch.bfloat16)
    got = run(parts.wide_linear, *tensors)
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for a, oracle in zip(got, exact(*tensors)):
        assert (a.double() - oracle).norm() <= max(torch.finfo(a.dtype).eps, 1e-6) * oracle.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_leading_axes_strides_and_what_is_asked_for(device: str) -> None:
    x, weight, dy = inputs(300, 64, 10, device)
    y, dx, dw = run(parts.wide_linear, x, weight, dy)
    loose = x.detach().T.contiguous().T.view(3, 100, 64).requires_grad_()
    wide_dy = torch.stack([dy, dy.new_full(dy.shape, torch.nan)], -1)[..., 0].view(3, 100, 10)
    got = run(parts.wide_linear, loose, weight.detach().T.contiguous().T.requires_grad_(), wide_dy)
    for a, b in zip(got, (y.view(3, 100, 10), dx.view(3, 100, 64), dw)):
        torch.testing.assert_close(a, b, rtol=2e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for i, expected in ((0, dx), (1, dw)):
        leaves = [t.detach().requires_grad_(i == j) for j, t in enumerate((x, weight))]
        (only,) = torch.autograd.grad(parts.wide_linear(*leaves), leaves[i], dy)
        assert torch.equal(only, expected)


def test_anything_else_is_raised_and_multiplied() -> None:
    x, weight = torch.randn(2, 5, 7), torch.randn(3, 7)
    for a, b, dtype in (
        (x.half(), weight, torch.float32),
        (x.bfloat16(), weight.bfloat16(), torch.float32),
        (x, weight.double(), torch.float64),
    ):
        y = wide_linear(a, b)
        assert y.dtype == dtype
        assert torch.equal(y, a.to(dtype) @ b.to(dtype).T)


@pytest.mark.parametrize("device", DEVICES)
def test_a_router_under_autocast_scores_in_float32(device: str) -> None:
    """Its input is cast before it, for all that read it; its weights and its sums are not."""
    router = Router(64, 12).to(device)
    x = torch.randn(300, 64, device=device).bfloat16()
    with torch.autocast(device, torch.bfloat16):
        scores = router(x)
    oracle = torch.sigmoid(x.double() @ router.weight.double().T)
    assert scores.dtype == torch.float32
    assert (scores - oracle).abs().max() < 1e-6
    scores.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == torch.float32


def test_gradients_of_the_plain_form() -> None:
    x, weight = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(wide_linear, (x.requires_grad_(), weight.requires_grad_()))


def test_what_parts_cannot_serve_is_refused_by_name() -> None:
    x, weight = torch.randn(4, 6), torch.randn(3, 6)
    with pytest.raises(
        BackendError, match=r"cannot run on 'chunked': its parts are bfloat16.*x and weight are torch.f"
    ):
        wide_linear(x, weight, backend="chunked")
    with pytest.raises(BackendError, match="it is for tensor cores, and x and weight are on cpu and cpu"):
        wide_linear(x.bfloat16(), weight, backend="chunked")
    with pytest.raises(ShapeError, match=r"x: expected \[..., K\] and weight \[N, K\], got \[4, 6\] and \[3, 5\]"):
        wide_linear(x, weight[:, :5])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_gpu_takes_parts_for_many_rows() -> None:
    x, weight, dy = inputs(300, 64, 10, "cuda")
    for got, expected in zip(run(wide_linear, x, weight, dy), run(parts.wide_linear, x, weight, dy)):
        assert torch.equal(got, expected)
    with pytest.raises(BackendError, match="of fewer than 256 rows"):
        wide_linear(x[:255], weight, backend="chunked")

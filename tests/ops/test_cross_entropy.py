import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perilune.core.errors import ShapeError
from perilune.ops import linear_cross_entropy
from perilune.ops.cross_entropy import IGNORED, chunked


def inputs(M: int, D: int, V: int, dtype: torch.dtype, ignored: int = 0) -> tuple[torch.Tensor, ...]:
    h, weight = torch.randn(M, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    targets = torch.randint(0, V, (M,))
    targets[torch.randperm(M)[:ignored]] = IGNORED
    return h.requires_grad_(), weight.requires_grad_(), targets


def value_and_gradients(
    h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, backend: str
) -> list[torch.Tensor]:
    loss = linear_cross_entropy(h, weight, targets, backend=backend)
    return [loss.detach(), *torch.autograd.grad(0.37 * loss, (h, weight))]


@pytest.mark.parametrize(("M", "D", "V"), [(1, 1, 1), (7, 3, 5), (130, 6, 11), (64, 5, 300), (0, 4, 9)])
@pytest.mark.parametrize("ignored", [0, 0.3, 1])
@pytest.mark.parametrize("gathered", [("cpu",), ()])
def test_equals_the_plain_form(
    M: int, D: int, V: int, ignored: float, gathered: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "GATHERED", gathered)
    monkeypatch.setattr(chunked, "LEAST_ROWS", 3)
    monkeypatch.setattr(chunked, "CPU_BLOCK", 40)  # several blocks, the last not full
    tensors = inputs(M, D, V, torch.float64, int(ignored * M))
    got, expected = (value_and_gradients(*tensors, backend) for backend in ("chunked", "reference"))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gathered", [("cpu",), ()])
def test_rows_without_a_target_count_nothing_whatever_they_hold(
    gathered: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "GATHERED", gathered)
    h, weight, targets = inputs(20, 4, 6, torch.float64)
    with torch.no_grad():
        targets[::3], h[::3] = IGNORED, torch.nan
        h[3] = torch.inf
    loss, dh, dw = value_and_gradients(h, weight, targets, "chunked")
    kept = targets != IGNORED
    expected = value_and_gradients(h.detach()[kept].requires_grad_(), weight, targets[kept], "reference")
    for got, exact in zip((loss, dh[kept], dw), expected):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    assert not dh[~kept].any()


def test_large_logits_and_no_targets_stay_finite() -> None:
    h, weight, targets = inputs(5, 4, 6, torch.float32)
    got = value_and_gradients(h * 1e4, weight, targets, "chunked")
    assert all(x.isfinite().all() for x in got)
    loss, dh, dw = value_and_gradients(h, weight, torch.full_like(targets, IGNORED), "chunked")
    assert loss == 0
    assert not dh.any()
    assert not dw.any()


def test_half_precision_is_about_as_good_as_the_plain_form() -> None:
    h, weight, targets = inputs(300, 64, 500, torch.bfloat16, 20)
    oracle = value_and_gradients(h.double(), weight.double(), targets, "reference")
    got, plain = (value_and_gradients(h, weight, targets, backend) for backend in ("chunked", "reference"))
    assert got[0].dtype == torch.float32
    for a, b, exact in zip(got, plain, oracle):
        error, usual = ((x.double() - exact).norm() / exact.norm() for x in (a, b))
        assert error <= 1.5 * usual + 1e-3


def test_under_autocast_it_casts_as_a_linear_layer_does() -> None:
    h, weight, targets = inputs(40, 8, 30, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(h, weight, targets)
    expected = linear_cross_entropy(h.bfloat16(), weight.bfloat16(), targets)
    assert torch.equal(loss, expected)
    loss.backward()
    assert h.grad is not None
    assert h.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_no_gradient_is_made_where_none_can_be_asked_for(backend: str) -> None:
    h, weight, targets = inputs(40, 6, 30, torch.float32)
    expected = linear_cross_entropy(h, weight, targets, backend=backend)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(h, weight, targets, backend=backend)
    assert torch.equal(loss, expected)
    assert counter.get_total_flops() == 2 * 40 * 6 * 30


def test_nothing_as_large_as_the_logits_is_kept() -> None:
    h, weight, targets = inputs(512, 4, 1000, torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        linear_cross_entropy(h, weight, targets)
    assert sum(kept) == h.numel() + weight.numel()


def test_what_does_not_fit_is_refused() -> None:
    h, weight, targets = inputs(4, 3, 5, torch.float32)
    with pytest.raises(ShapeError, match=r"h: expected \[M, D\] and weight \[V, D\], got \[4, 3\] and \[5, 2\]"):
        linear_cross_entropy(h, weight[:, :2], targets)
    with pytest.raises(ShapeError, match=r"targets: expected int64 \[4\], got torch.int64 \[3\]"):
        linear_cross_entropy(h, weight, targets[:3])

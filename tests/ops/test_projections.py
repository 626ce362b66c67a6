"""Several linear maps of one input: against linear layers one after the other, in values, gradients and launches."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.core.errors import ShapeError
from perilune.nn.project import project
from perilune.ops import cast_once, projections

SIZES = (5, 1, 16)


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(*shape, 12, dtype=dtype).requires_grad_()
    return x, [torch.randn(n, 12, dtype=dtype).requires_grad_() for n in SIZES]


def run(backend: str, x: Tensor, weights: list[Tensor], autocast: bool = False) -> list[Tensor]:
    """Results, then the gradients of x and all weights."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        results = projections(x, weights, backend=backend)
    torch.manual_seed(1)
    grads = [torch.randn(y.shape).bfloat16().to(y) for y in results]
    return [*(y.detach() for y in results), *torch.autograd.grad(results, [x, *weights], grads)]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (0,), (2, 0)], ids=str)
def test_fast_equals_reference(shape: tuple[int, ...]) -> None:
    got, expected = (run(backend, *inputs(*shape)) for backend in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_autocast_casts_as_linear_layers_would() -> None:
    x, weights = inputs(40, dtype=torch.float32)
    got, expected = (run(backend, x, weights, autocast=True) for backend in ("chunked", "reference"))
    assert [t.dtype for t in got] == [t.dtype for t in expected] == [torch.bfloat16] * 3 + [torch.float32] * 4
    for y, z in zip(got[:3], expected[:3]):
        assert torch.equal(y, z)
    exact = run("reference", x.detach().bfloat16().double().requires_grad_(), rounded(weights))
    for g, e, z in zip(got[3:], exact[3:], expected[3:]):
        off, usual = ((t.double() - e).norm() for t in (g, z))
        assert off <= 1.5 * usual
        assert off <= 8e-3 * e.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a product whose result is wider than its factors")
def test_on_a_gpu_the_gradients_of_weights_are_never_rounded_to_16_bits() -> None:
    torch.use_deterministic_algorithms(False)  # which asks for a setting of cuBLAS
    x = torch.randn(4096, 64, device="cuda").requires_grad_()
    weights = [torch.randn(n, 64, device="cuda").requires_grad_() for n in (8, 96, 128)]
    got, expected = (run(backend, x, weights, autocast=True) for backend in ("chunked", "reference"))
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    exact = run("reference", x.detach().bfloat16().double().requires_grad_(), rounded(weights))
    for g, e, z in zip(got[4:], exact[4:], expected[4:]):
        assert (g.double() - e).norm() < 1e-2 * (z.double() - e).norm() + 1e-5 * e.norm()


def rounded(weights: list[Tensor]) -> list[Tensor]:
    return [w.detach().bfloat16().double().requires_grad_() for w in weights]


def test_float64_under_autocast_stays_float64() -> None:
    x, weights = inputs(4)
    torch.testing.assert_close(
        run("chunked", x, weights, autocast=True), run("reference", x, weights), rtol=1e-12, atol=0
    )


def test_strides_do_not_matter() -> None:
    _, weights = inputs(6)
    loose = torch.randn(12, 6, dtype=torch.float64).T.requires_grad_()
    tight = loose.detach().contiguous().requires_grad_()
    torch.testing.assert_close(run("chunked", loose, weights), run("chunked", tight, weights), rtol=1e-14, atol=1e-14)
    cut = [w.T.contiguous().T.requires_grad_() for w in (t.detach() for t in weights)]
    torch.testing.assert_close(run("chunked", tight, cut), run("chunked", tight, weights), rtol=1e-14, atol=1e-14)


def test_only_what_is_asked_for_and_what_was_used_has_a_gradient() -> None:
    x, weights = inputs(6)
    exact = torch.autograd.grad(projections(x, weights, backend="reference")[2].sum(), [x, weights[2]])
    y = projections(x, weights)
    dx, dfirst, dlast = torch.autograd.grad(y[2].sum(), [x, weights[0], weights[2]], allow_unused=True)
    torch.testing.assert_close((dx, dlast), exact, rtol=1e-14, atol=1e-14)
    assert dfirst is None
    frozen = [weights[0].detach(), *weights[1:]]
    (y := projections(x.detach(), frozen))[1].sum().backward()
    assert weights[1].grad is not None
    assert weights[2].grad is None
    assert not projections(x.detach(), [w.detach() for w in weights])[0].requires_grad


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_one_cast_of_all_weights_and_no_sum_beside_the_products() -> None:
    x, weights = inputs(40, dtype=torch.float32)
    with Launches() as seen, torch.autocast("cpu", torch.bfloat16):
        results = projections(x.bfloat16(), weights)
    assert (seen.names["aten::_foreach_copy_"], seen.names["aten::mm"]) == (1, 3)
    assert seen.names["aten::_to_copy"] == 1  # the test's own
    with Launches() as seen:
        torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    assert seen.names["aten::add"] == seen.names["aten::add_"] == 0
    assert (seen.names["aten::addmm"], seen.names["aten::mm"]) == (2, 4)


def test_weights_cast_once_are_used_until_they_change_or_the_step_is_over() -> None:
    x, weights = inputs(40, dtype=torch.float32)
    casts = []

    def results() -> list[Tensor]:
        with Launches() as seen:
            got = run("chunked", x, weights, autocast=True)
        casts.append(seen.names["aten::_foreach_copy_"])
        return got

    expected = results()
    with cast_once([*weights, x], torch.bfloat16):
        assert all(map(torch.equal, results(), expected))
        assert all(map(torch.equal, results(), expected))
        with torch.no_grad():
            weights[1].mul_(2)  # its copy is old now
        changed = results()
        assert run("chunked", x, weights)[0].dtype == torch.float32  # nobody asked for the copies' dtype
    assert all(map(torch.equal, changed, results()))
    assert not torch.equal(changed[1], expected[1])
    assert casts == [1, 0, 0, 1, 1]
    with pytest.raises(ZeroDivisionError), cast_once(weights, torch.bfloat16):
        raise ZeroDivisionError
    results()
    assert casts[-1] == 1


@pytest.mark.parametrize(
    ("message", "x", "weights"),
    [
        (r"x: expected a floating tensor \[..., D\], got torch.int64", torch.zeros(3, dtype=torch.long), []),
        (r"weights\[1\]: expected \[D_1, 3\]", torch.zeros(2, 3), [torch.zeros(4, 3), torch.zeros(3, 4)]),
        (r"weights\[0\]: expected \[D_0, 3\]", torch.zeros(2, 3), [torch.zeros(3)]),
    ],
)
def test_what_does_not_fit_is_refused(message: str, x: Tensor, weights: list[Tensor]) -> None:
    with pytest.raises(ShapeError, match=message):
        projections(x, weights)


@pytest.mark.parametrize("change", ["none", "hook", "bias", "class", "forward", "no grad"])
def test_layers_that_somebody_changed_are_called_as_they_are(change: str) -> None:
    class Adapted(nn.Linear):
        pass

    layers = [nn.Linear(12, n, bias=False).double() for n in SIZES]
    x = torch.randn(7, 12, dtype=torch.float64)
    called = []
    if change == "hook":
        layers[1].register_forward_hook(lambda module, args, out: called.append(module))
    elif change == "bias":
        layers[1] = nn.Linear(12, 1).double()
    elif change == "class":
        layers[1] = Adapted(12, 1, bias=False).double()
    elif change == "forward":
        plain = layers[1].forward
        layers[1].forward = lambda x: called.append(layers[1]) or plain(x)
    expected = [nn.functional.linear(x, layer.weight, layer.bias) for layer in layers]
    with torch.set_grad_enabled(change != "no grad"), Launches() as seen:
        got = project(x, *layers)
    assert called == ([layers[1]] if change in ("hook", "forward") else [])
    together = all(y.grad_fn is not None and "Projections" in type(y.grad_fn).__name__ for y in got)
    assert together == (change == "none")
    torch.testing.assert_close(list(got), expected, rtol=1e-13, atol=1e-13)
    assert seen.names["aten::mm"] + seen.names["aten::addmm"] == 3

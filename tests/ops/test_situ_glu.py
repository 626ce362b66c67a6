"""SiTU-GLU and SwiGLU: values worked out elsewhere, the precision contract, and derivatives against autograd's."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.core.errors import BackendError, ShapeError
from perilune.ops import blocks, sigmoid_glu, situ_glu, swiglu

BACKENDS = ["reference", "chunked"]
UNITS = [situ_glu, swiglu, sigmoid_glu]


def pair(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> list[Tensor]:
    return [(scale * torch.randn(shape)).to(dtype).requires_grad_() for _ in range(2)]


def value_and_gradients(
    unit: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor, **options: object
) -> list[Tensor]:
    y = unit(*inputs, **options)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("g", "u", "situ", "swi"),
    [
        (1, 1, 0.7158178, 0.7310586),
        (0.1, 0.1, 0.00524867, 0.00524979),
        (4, 25, 56.959320, 98.201),
        (10, 10, 37.4846, 99.99546),
        (100, 100, 99.93293, 10000),
        (-10, 3, -5.349e-4, -1.362e-3),
    ],
)
def test_table_of_values(backend: str, g: float, u: float, situ: float, swi: float) -> None:
    gate, up = torch.tensor([g, u], dtype=torch.float64)
    assert situ_glu(gate, up, backend=backend).item() == pytest.approx(situ, rel=2e-4, abs=0)
    assert swiglu(gate, up, backend=backend).item() == pytest.approx(swi, rel=2e-4, abs=0)
    one = math.tanh(g / 4) * 4 / (1 + math.exp(-g)) * math.tanh(u / 25) * 25
    assert situ_glu(gate, up, backend=backend).item() == pytest.approx(one, rel=1e-14, abs=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_plain_gate_is_a_sigmoid(backend: str) -> None:
    gate, up = torch.tensor([[0.0, 1.0, -1000.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    expected = [1.5, 3 / (1 + math.exp(-1)), 0.0]
    assert sigmoid_glu(gate, up, backend=backend).tolist() == pytest.approx(expected, rel=1e-14, abs=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gate_branch_is_lowest_where_it_should_be(backend: str) -> None:
    gate = torch.linspace(-3, 1, 128001, dtype=torch.float64)  # steps of 1/32000
    up = torch.full_like(gate, 1e-6)
    branch = situ_glu(gate, up, backend=backend) / up
    assert branch.min().item() == pytest.approx(-0.269769, abs=1e-6)
    assert gate[branch.argmin()].item() == pytest.approx(-1.21875, abs=1e-4)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (3, 5, 7), (0, 4), (4, 0), (130, 33)], ids=str)
@pytest.mark.parametrize("block", [16, 2**18])
def test_fast_equals_reference(
    monkeypatch: pytest.MonkeyPatch, unit: Callable[..., Tensor], shape: tuple[int, ...], block: int
) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", block)
    inputs, dy = pair(*shape), torch.randn(shape, dtype=torch.float64)
    got, expected = (value_and_gradients(unit, inputs, dy, backend=b) for b in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("betas", [(4.0, 25.0), (1.0, 0.5), (30.0, 3.0)])
def test_fast_equals_reference_for_other_caps(betas: tuple[float, float]) -> None:
    inputs, dy = pair(40, 9), torch.randn(40, 9, dtype=torch.float64)

    def unit(gate: Tensor, up: Tensor, backend: str) -> Tensor:
        return situ_glu(gate, up, *betas, backend=backend)

    got, expected = (value_and_gradients(unit, inputs, dy, backend=b) for b in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_caps_make_it_swiglu(backend: str) -> None:
    gate, up = pair(50)
    torch.testing.assert_close(
        situ_glu(gate, up, 1e7, 1e7, backend=backend), swiglu(gate, up, backend=backend), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded_once(dtype: torch.dtype, backend: str, unit: Callable[..., Tensor]) -> None:
    gate, up = torch.linspace(-8, 8, 4001).to(dtype), torch.linspace(-30, 30, 4001).to(dtype)
    gate, up = gate.repeat(2), torch.cat([up, up.flip(0)])
    assert torch.equal(unit(gate, up, backend=backend), unit(gate.float(), up.float(), backend=backend).to(dtype))


def test_half_precision_is_the_equation_in_float32_bit_for_bit() -> None:
    gate, up = torch.linspace(-8, 8, 4001).bfloat16(), torch.linspace(-30, 30, 4001).bfloat16()

    def equation(g: Tensor, u: Tensor) -> Tensor:
        return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))

    expected = equation(gate.float(), up.float()).bfloat16()
    assert torch.equal(situ_glu(gate, up), expected)
    assert (equation(gate, up) != expected).float().mean() > 0.4  # what bfloat16 inside would have cost


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_rounded_once(dtype: torch.dtype, unit: Callable[..., Tensor]) -> None:
    inputs, dy = pair(60, 40, dtype=dtype, scale=6), torch.randn(60, 40).to(dtype)
    got = value_and_gradients(unit, inputs, dy)
    exact = value_and_gradients(
        unit, [t.detach().double().requires_grad_() for t in inputs], dy.double(), backend="reference"
    )
    for name, g, e in zip(("y", "dgate", "dup"), got, exact):
        assert g.dtype == dtype
        bound = torch.finfo(dtype).eps / 2 * e.abs() + 4 * torch.finfo(torch.float32).eps * e.abs().max()
        assert ((g.double() - e).abs() <= bound).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_inputs_stay_finite_and_bounded(backend: str, dtype: torch.dtype) -> None:
    ends = [0.0, 1.0, 30.0, 88.0, 90.0, 200.0, 1e4, 1e30]
    ends = torch.tensor(ends + [-x for x in ends], dtype=dtype)
    gate, up = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(ends, ends, indexing="ij"))
    y, dgate, dup = value_and_gradients(situ_glu, [gate, up], torch.ones_like(gate), backend=backend)
    for t in (y, dgate, dup):
        assert torch.isfinite(t).all()
    assert (y.abs() <= 100).all()
    saturated = (gate.abs() >= 1e4) & (up.abs() >= 1e4)
    assert dgate[saturated].eq(0).all()
    assert dup[saturated].eq(0).all()
    assert y[(gate == 1e4) & (up == 1e4)].eq(100).all()
    assert y[(gate == -1e4)].eq(0).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(g=st.floats(-1e6, 1e6, width=32), u=st.floats(-1e6, 1e6, width=32))
def test_bounded_and_zero_at_zero(g: float, u: float) -> None:
    gate, up, zero = (torch.tensor(x) for x in (g, u, 0.0))
    assert situ_glu(gate, up).abs() <= 100
    assert situ_glu(zero, up) == 0
    assert situ_glu(gate, zero) == 0
    assert situ_glu(gate, -up) == -situ_glu(gate, up)


@pytest.mark.parametrize("unit", UNITS)
def test_strides_of_input_and_gradient_do_not_matter(unit: Callable[..., Tensor]) -> None:
    fused = torch.randn(4, 6, 10, dtype=torch.float64)
    transposed = torch.randn(5, 6, 4, dtype=torch.float64).permute(2, 1, 0)
    inputs = [fused[..., :5], fused[..., 5:]], [fused[..., ::2], transposed]
    gradients = (
        transposed * 2,
        torch.randn(5, dtype=torch.float64).expand(4, 6, 5),
        torch.ones(()).double().expand(4, 6, 5),
    )
    for gate_up in inputs:
        for dy in gradients:
            loose = value_and_gradients(unit, [t.detach().requires_grad_() for t in gate_up], dy)
            tight = value_and_gradients(
                unit,
                [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in gate_up],
                dy.contiguous(),
            )
            torch.testing.assert_close(loose, tight, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("R", [1, 600])  # one that takes the plain equation, one that does not
@pytest.mark.parametrize("unit", UNITS)
def test_without_autograd_the_value_is_the_same(
    unit: Callable[..., Tensor], R: int, mode: Callable[[], AbstractContextManager]
) -> None:
    inputs = pair(R, 64, dtype=torch.bfloat16)
    expected = unit(*inputs).detach()
    with mode():
        assert torch.equal(unit(*inputs), expected)


@pytest.mark.parametrize("unit", UNITS)
def test_the_graph_keeps_the_inputs_and_nothing_else(unit: Callable[..., Tensor]) -> None:
    inputs = pair(64, 32, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = unit(*inputs)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in inputs}
    assert sum(t.untyped_storage().nbytes() for t in kept) == 2 * 64 * 32 * 2
    y.sum().backward()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("message", "gate", "up"),
    [
        (r"up: expected torch.float32 \[2, 3\] like gate", torch.zeros(2, 3), torch.zeros(3)),
        ("up: expected torch.float32", torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16)),
        ("gate: expected a floating dtype", torch.zeros(2, dtype=torch.long), torch.zeros(2)),
    ],
)
def test_what_does_not_fit_is_refused(unit: Callable[..., Tensor], message: str, gate: Tensor, up: Tensor) -> None:
    with pytest.raises(ShapeError, match=message):
        unit(gate, up)


@pytest.mark.parametrize("betas", [(0.0, 25.0), (4.0, -1.0), (math.nan, 25.0)])
def test_a_cap_must_be_positive(betas: tuple[float, float]) -> None:
    with pytest.raises(ShapeError, match="expected a positive cap"):
        situ_glu(torch.zeros(2), torch.zeros(2), *betas)


@pytest.mark.parametrize("unit", UNITS)
def test_an_unknown_backend_is_refused(unit: Callable[..., Tensor]) -> None:
    with pytest.raises(BackendError, match="backend: expected one of this operation"):
        unit(torch.zeros(2), torch.zeros(2), backend="cuda")

import pytest
import torch

from perilune.nn import GLU, SiTUGLU, initialize_


def situ(g, u):
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)


def swiglu(g, u):
    return g * torch.sigmoid(g) * u


@pytest.mark.parametrize(("activation", "f"), [("situ", situ), ("silu", swiglu)])
def test_block_is_its_equation_with_all_gradients(activation, f):
    m = GLU(6, 10, activation=activation).double()
    initialize_(m, std=1.0)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    expected = f(x @ m.gate_proj.weight.T, x @ m.up_proj.weight.T) @ m.down_proj.weight.T
    torch.testing.assert_close(m(x), expected, rtol=1e-12, atol=1e-12)
    inputs = [x, *m.parameters()]
    for got, want in zip(torch.autograd.grad(m(x).sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_situ_is_the_default_and_its_caps_can_be_moved():
    x, m = torch.randn(4, 6), SiTUGLU(6, 10, beta_gate=2.0, beta_up=3.0)
    g, u = m.gate_proj(x), m.up_proj(x)
    expected = m.down_proj(2 * torch.tanh(g / 2) * torch.sigmoid(g) * 3 * torch.tanh(u / 3))
    torch.testing.assert_close(m(x), expected)
    assert GLU(6, 10).activation == SiTUGLU(6, 10).activation == "situ"
    assert sorted(name for name, _ in m.named_parameters()) == [
        "down_proj.weight",
        "gate_proj.weight",
        "up_proj.weight",
    ]


def test_bfloat16_activation_is_rounded_once():
    m = GLU(1, 1).bfloat16()
    for p in m.parameters():
        torch.nn.init.ones_(p)
    x = torch.linspace(-8, 8, 1001).bfloat16()[:, None]
    assert m(x).equal(situ(x.float(), x.float()).bfloat16())


def test_no_input_passes_the_cap():
    m = GLU(1, 1).double()
    for p in m.parameters():
        torch.nn.init.ones_(p)
    assert m(torch.tensor([[1e6], [-1e6]]).double()).abs().max() <= 100

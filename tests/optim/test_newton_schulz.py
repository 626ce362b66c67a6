import pytest
import torch

from perilune.optim import newton_schulz as module
from perilune.optim.newton_schulz import COEFFICIENTS, newton_schulz


def scalar_map(s):
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize(
    ("value", "expected"), [(1e-4, 0.0485), (1e-3, 0.4705), (1e-2, 0.6989), (0.1, 0.7121), (0.3, 1.0796), (1, 0.6964)]
)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_singular_values_go_through_the_scalar_map_and_vectors_stay(value, expected, shape):
    n = min(shape)
    U, V = (torch.linalg.qr(torch.randn(rows, n, dtype=torch.float64)).Q for rows in shape)
    S = torch.full((n,), ((1 - value**2) / (n - 1)) ** 0.5, dtype=torch.float64)
    S[0] = value  # of a matrix with Frobenius norm 1
    got = U.mT @ newton_schulz((U * S) @ V.mT) @ V
    assert scalar_map(value) == pytest.approx(expected, abs=5e-5)
    torch.testing.assert_close(got, torch.diag(scalar_map(S)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(20, 128, 64), (20, 64, 256), (20, 64, 64)])
def test_singular_values_of_random_matrices_come_near_one(shape):
    values = torch.linalg.svdvals(newton_schulz(torch.randn(shape)))
    low, high = (0.0, 1.25) if shape[1] == shape[2] else (0.68, 1.14)  # a square one may be nearly singular
    assert low <= values.min()
    assert values.max() <= high


def test_every_block_is_on_its_own(monkeypatch):
    blocks = torch.randn(2, 5, 6, 3, dtype=torch.float64)
    single = torch.stack([newton_schulz(block) for block in blocks.flatten(0, 1)]).view_as(blocks)
    torch.testing.assert_close(newton_schulz(blocks), single, rtol=0, atol=1e-14)
    monkeypatch.setattr(module, "CPU_BATCH", 3 * 18)  # 10 blocks, 3 at a time
    torch.testing.assert_close(newton_schulz(blocks), single, rtol=0, atol=1e-14)


def test_a_transposed_block_gives_the_transposed_result():
    blocks = torch.randn(3, 4, 7, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(blocks.mT), newton_schulz(blocks).mT, rtol=0, atol=1e-14)


@pytest.mark.parametrize("factor", [1e-3, 1e-6, 1e6])
def test_the_scale_of_a_block_does_not_matter(factor):
    blocks = torch.randn(3, 8, 16, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(factor * blocks), newton_schulz(blocks), rtol=0, atol=1e-12)


def test_a_zero_block_stays_zero_and_a_vanishing_one_fades():
    blocks = torch.randn(3, 8, 16)
    blocks[1] = 0
    blocks[2] *= 1e-13
    updates = newton_schulz(blocks)
    assert updates[1].eq(0).all()
    assert 0 < updates[2].norm() < 1e-2 * updates[0].norm()


@pytest.mark.parametrize(
    ("dtype", "given", "error"),
    [
        (torch.float64, None, 0),
        (torch.float32, None, 1e-5),
        (torch.bfloat16, None, 1e-2),
        (torch.float32, torch.bfloat16, 0.1),
    ],
)
def test_computes_in_float32_or_wider_unless_told(dtype, given, error):
    blocks = torch.randn(4, 16, 32, dtype=torch.float64).to(dtype)
    got = newton_schulz(blocks, dtype=given)
    exact = newton_schulz(blocks.double())
    assert got.dtype == dtype
    assert (got - exact).norm() <= error * exact.norm()

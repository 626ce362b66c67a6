from typing import ClassVar

import pytest
import torch
from torch import nn

from perilune.nn.norm import GatedHeadNorm, RMSNorm
from perilune.nn.precision import Float32Parameters, at_least_float32

FINE = 1 + 2**-12  # no bfloat16 number


class Kept(Float32Parameters):
    float32: ClassVar[tuple[str, ...]] = ("weight", "table", "absent")

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), FINE))
        self.coarse = nn.Parameter(torch.full((3,), FINE))
        self.register_buffer("table", torch.full((3,), FINE))
        self.register_buffer("absent", None)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.child = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "cast",
    [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(dtype=torch.bfloat16), lambda m: m.to(torch.half)],
)
def test_named_tensors_survive_a_cast_and_nothing_else_does(cast):
    m = nn.Sequential(Kept())  # as part of a model that knows nothing of it
    before = m[0].weight
    cast(m)
    assert m[0].weight is before
    assert m[0].weight.dtype == m[0].table.dtype == torch.float32
    assert m[0].weight.eq(FINE).all()
    assert m[0].table.eq(FINE).all()
    assert m[0].coarse.dtype == m[0].child.weight.dtype
    assert m[0].coarse.dtype.itemsize == 2
    assert m[0].count.dtype == torch.int64
    assert m[0].absent is None


def test_named_tensors_follow_wider_dtypes_and_devices():
    m = Kept().double()
    assert {p.dtype for p in m.parameters()} == {torch.float64}
    assert m.float().weight.dtype == torch.float32
    m.double().bfloat16()
    assert m.weight.dtype == m.table.dtype == torch.float32
    m.to("meta", torch.bfloat16)
    assert (m.weight.device.type, m.weight.dtype) == ("meta", torch.float32)
    assert (m.coarse.device.type, m.coarse.dtype) == ("meta", torch.bfloat16)


def test_named_tensors_survive_loading_that_takes_the_files_dtype():
    m = nn.Sequential(Kept())
    m.load_state_dict({name: t.bfloat16() for name, t in m.state_dict().items()}, assign=True)
    assert m[0].weight.dtype == m[0].table.dtype == torch.float32
    assert m[0].coarse.dtype == torch.bfloat16
    assert m[0].weight.requires_grad


def test_gradients_go_with_their_parameters():
    m = Kept()
    (m.weight.sum() * FINE + m.coarse.sum()).backward()
    m.bfloat16()
    assert m.weight.grad.dtype == torch.float32
    assert m.weight.grad.eq(FINE).all()
    assert m.coarse.grad.dtype == torch.bfloat16


def test_an_island_raises_narrow_types_and_leaves_wide_ones():
    for dtype, wide in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        assert at_least_float32(torch.zeros(1, dtype=dtype)).dtype == wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norms_return_what_they_were_given(dtype):
    """Also under autocast, and with weights of another dtype: what comes next refuses a mixture."""
    x = torch.randn(4, 3, 8, dtype=dtype)
    for norm, args in ((RMSNorm(8, 1e-5), ()), (GatedHeadNorm(8, 1e-5), (torch.randn_like(x),))):
        assert norm(x, *args).dtype == dtype
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert norm(x, *args).dtype == dtype


def test_rms_norm_casts_before_it_scales():
    x, m = torch.randn(5, 64).bfloat16(), RMSNorm(64, 1e-5).bfloat16()
    nn.init.normal_(m.weight)
    wide = x.float()
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert m(x).equal(unit * m.weight)


def test_gated_head_norm_is_its_equation_with_one_rounding():
    x, gate = torch.randn(2, 5, 3, 8).bfloat16().unbind()
    m = GatedHeadNorm(8, 1e-5).bfloat16()
    nn.init.normal_(m.weight)
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert m(x, gate).equal((unit * m.weight * gate.float().sigmoid()).bfloat16())

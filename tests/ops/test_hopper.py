"""What goes to the kernels written for Hopper, asked on any machine."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from perilune.bench.kda.problem import Shape, make, path
from perilune.cli.main import main
from perilune.ops import BoundedGate, SoftplusGate
from perilune.ops import fused as shared
from perilune.ops.grouped_experts import fused as experts
from perilune.ops.hopper import not_hopper
from perilune.ops.kda import decode, fused
from perilune.ops.kda.api import BACKENDS

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tensors lay on it; nothing is launched."""
    monkeypatch.setattr(shared, "TRITON", True)
    monkeypatch.setattr(shared, "INTERPRETED", True)
    for module in (fused, decode, experts):
        monkeypatch.setattr(module, "not_hopper", lambda x: None)


@pytest.mark.parametrize(
    ("capability", "hip", "served"), [((9, 0), None, True), ((9, 4), "6.4", False), ((10, 0), None, False)]
)
def test_hopper_is_known_by_its_capability_and_maker(
    capability: tuple[int, int], hip: str | None, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (not_hopper(SimpleNamespace(is_cuda=True, device="cuda:0")) is None) == served
    assert not_hopper(torch.zeros(1)) is not None


def choice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, gate: object, normalize_qk: bool = True) -> str | None:
    options = {"initial_state": None, "gate": gate, "normalize_qk": normalize_qk}
    return BACKENDS.choice(q, k, v, g, q[..., 0], **options)[0]


@pytest.mark.usefixtures("_hopper")
def test_what_hopper_serves() -> None:
    x = torch.zeros(1, 3, 2, 128, dtype=bf16)
    A_log, dt_bias = torch.zeros(2), torch.zeros(2, 128)
    bounded = BoundedGate(A_log, dt_bias)
    wide = x.float()
    assert choice(x, x, x, x, bounded) == "gluon"
    assert choice(x, x, x, wide, bounded) == "gluon"
    assert choice(x.half(), x, x, x, bounded) == "gluon"
    for rows in ((wide, x, x), (x, wide, x), (x, x, wide), (x, x, x[..., :64])):
        assert choice(*rows, x, bounded) == "triton"
    assert choice(x, x, x, x, SoftplusGate(A_log, dt_bias)) == "triton"
    low = BoundedGate(A_log, dt_bias, -5.2)
    assert [choice(x, x, x, x, low, normalize) for normalize in (True, False)] == ["gluon", "triton"]


@pytest.mark.usefixtures("_hopper")
def test_those_that_only_ask_are_told(capsys: pytest.CaptureFixture) -> None:
    problem = make(Shape(1, 3, 2), "fast", CPU)
    assert [path(problem), path(problem.activate())] == ["gluon", "triton"]
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for op in ("kda", "kda_decode"):
        assert any(f"ops.{op} " in line and "gluon, then triton" in line for line in lines)

"""The comparisons of norms and gated units on a GPU, run on the CPU: small shapes, a clock that is told the time."""

import dataclasses

import pytest
import torch

from perilune.bench import cases, runner
from perilune.bench.meter import Meter
from perilune.bench.rows import BYTES_PER_MS, Shape


class Told(Meter):
    def median_ms(self, call):
        call()
        return 2.0

    def held(self):
        return 2**20

    def peak(self, call):
        call()
        return 3 * 2**20


def small(name, **changes):
    case = cases.find()[name]
    shapes = tuple(Shape(op, 20, 16) for op in case.operations)
    options = {"shapes": shapes, "checked": (*shapes, Shape(shapes[0].op, 7, 24)), "meter": Told()}
    return dataclasses.replace(
        case, **options | {"contenders": ("plain", "reference"), "device": torch.device("cpu")} | changes
    )


@pytest.fixture
def served(monkeypatch):
    for name in ("rms_norm", "situ_glu"):
        for operation in cases.find()[name].operations.values():
            kept = {x: y for x, y in operation.backends._backends.items() if x != "triton"}
            monkeypatch.setattr(operation.backends, "_backends", kept)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("name", "rows"),
    [("rms_norm", {"norm": 1, "gated": 2}), ("situ_glu", dict.fromkeys(("situ", "swiglu", "sigmoid"), 2))],
)
def test_what_is_right_is_timed_against_its_bytes(name, rows, capsys):
    case = small(name)
    result = case.run()
    assert result["passed"], result["check"]
    assert [(row["op"], row["label"]) for row in result["times"]] == [(x, y) for x in rows for y in case.contenders]
    one = 20 * 16 * 2 / BYTES_PER_MS
    for row in result["times"]:
        n = rows[row["op"]]
        assert row["forward"]["floor_ms"] == pytest.approx((n + 1) * one)
        assert row["both"]["floor_ms"] == pytest.approx((n + 1 + n + 1 + n) * one)
        assert row["both"]["ratio"] == pytest.approx(2 / row["both"]["floor_ms"])
        assert row["forward"]["bytes"] == 2**21
    runner.show(case.parts(result), True)
    assert f"{next(iter(rows))}, 20 x 16, plain" in capsys.readouterr().out


@pytest.mark.usefixtures("served")
def test_what_is_wrong_is_not_timed():
    case = small("rms_norm")
    wrong = dataclasses.replace(case.operations["norm"], rest=(1.0, torch.bfloat16))
    right = case.operations["norm"].call("reference")
    object.__setattr__(wrong, "call", lambda label: right if label == "reference" else type(wrong).call(wrong, label))
    result = small("rms_norm", operations={**case.operations, "norm": wrong}, contenders=("plain",)).run()
    assert not result["passed"]
    assert "out of plain is off" in result["check"]
    assert not result["times"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_a_machine_without_a_gpu_says_so():
    for name in ("rms_norm", "situ_glu"):
        assert cases.find()[name].run()["skipped"].startswith("triton: its kernels run on a GPU")

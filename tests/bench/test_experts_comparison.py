"""The comparison of the routed experts on a GPU, run on the CPU: small shapes, and a clock that is told the time."""

import pytest
import torch

from perilune.bench import runner
from perilune.bench.experts import Comparison, Shape, make
from perilune.bench.meter import Meter
from perilune.ops.grouped_experts.api import BACKENDS


class Told(Meter):
    def median_ms(self, call):
        call()
        return 2.0

    def held(self):
        return 2**20

    def peak(self, call):
        call()
        return 3 * 2**20


def small(**changes):
    options = {
        "shapes": (Shape(6, 20, 2, 8, 8),),
        "checked": (Shape(4, 30, 2, 16, 8), Shape(9, 5, 1, 8, 8)),
        "contenders": {"perilune": "chunked", "loop": "reference"},
        "device": torch.device("cpu"),
        "meter": Told(),
    }
    return Comparison(**options | changes)


def test_what_is_right_is_timed(capsys):
    case = small()
    result = case.run()
    assert result["passed"]
    assert [row["label"] for row in result["times"]] == ["perilune", "loop"]
    row = result["times"][0]
    assert row["forward"] == {"ms": 2.0, "tflops": 6 * 40 * 64 / 2e9, "bytes": 2**21}
    assert row["both"]["tflops"] == pytest.approx(3 * row["forward"]["tflops"])
    runner.show(case.parts(result), True)
    assert "6 x 40, perilune" in capsys.readouterr().out


def test_what_is_wrong_is_not(monkeypatch, capsys):
    monkeypatch.setitem(BACKENDS._backends, "wrong", BACKENDS._backends["chunked"].__class__("wrong", wrong, never))
    case = small(contenders={"perilune": "wrong"})
    result = case.run()
    assert not result["passed"]
    assert result["times"] == []
    assert result["check"].startswith("failed: out of perilune is off by")
    runner.show(case.parts(result), True)
    assert "not timed" in capsys.readouterr().out


def wrong(*arguments, **options):
    return BACKENDS._backends["chunked"].run(*arguments, **options) * 1.1


def never(*arguments, **options):
    return None


def test_without_the_gpu_it_is_written_for_it_says_so(capsys):
    case = small(contenders={"perilune": "gluon"})
    result = case.run()
    assert result["passed"]
    runner.show(case.parts(result), True)
    assert "gluon: " in capsys.readouterr().out


def test_inputs_are_the_same_at_every_call():
    shape, device = Shape(4, 6, 2, 8, 8), torch.device("cpu")
    assert all(map(torch.equal, make(shape, device), make(shape, device)))

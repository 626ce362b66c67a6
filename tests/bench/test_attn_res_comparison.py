"""The comparison of attention residuals on a GPU, run on the CPU: small shapes, and a clock that is told the time."""

from functools import partial

import pytest
import torch

from perilune.bench import runner
from perilune.bench.attn_res import BYTES_PER_MS, Comparison, Shape, make
from perilune.bench.meter import Meter
from perilune.ops import attn_res
from perilune.ops.attn_res.api import BACKENDS

CHUNKED = partial(attn_res, backend="chunked")


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
        "shapes": (Shape(3, 20, 16),),
        "checked": (Shape(4, 30, 16), Shape(2, 5, 24)),
        "contenders": {"perilune": CHUNKED, "equation": partial(attn_res, backend="reference")},
        "device": torch.device("cpu"),
        "meter": Told(),
    }
    return Comparison(**options | changes)


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(BACKENDS, "_backends", {x: y for x, y in BACKENDS._backends.items() if x != "triton"})


@pytest.mark.usefixtures("served")
def test_what_is_right_is_timed(capsys):
    case = small()
    result = case.run()
    assert result["passed"]
    assert [row["label"] for row in result["times"]] == ["perilune", "equation"]
    row = result["times"][0]
    source = 20 * 16 * 2 / BYTES_PER_MS
    assert row["forward"]["floor_ms"] == pytest.approx(4 * source)
    assert row["both"]["floor_ms"] == pytest.approx(11 * source)
    assert row["both"]["ratio"] == pytest.approx(2 / (11 * source))
    assert row["forward"]["bytes"] == 2**21
    runner.show(case.parts(result), True)
    assert "3 x 20 x 16, perilune" in capsys.readouterr().out


@pytest.mark.usefixtures("served")
def test_what_is_wrong_is_not(capsys):
    case = small(contenders={"perilune": lambda *arguments: CHUNKED(*arguments) * 1.1})
    result = case.run()
    assert not result["passed"]
    assert result["times"] == []
    assert result["check"].startswith("failed: out of perilune is off by")
    runner.show(case.parts(result), True)
    assert "not timed" in capsys.readouterr().out


def test_where_the_kernels_cannot_run_it_says_so(capsys):
    case = small(checked=(Shape(17, 3, 16),))
    result = case.run()
    assert result["passed"]
    runner.show(case.parts(result), True)
    assert "triton: " in capsys.readouterr().out


def test_inputs_are_the_same_at_every_call():
    shape, device = Shape(4, 6, 8), torch.device("cpu")
    first, second = make(shape, device), make(shape, device)
    assert all(map(torch.equal, (*first[:2], *first[2], first[3]), (*second[:2], *second[2], second[3])))

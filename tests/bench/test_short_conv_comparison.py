"""The comparison of short convolutions on a GPU, run on the CPU: small shapes, and a clock that is told the time."""

from functools import partial

import pytest
import torch

from perilune.bench import runner
from perilune.bench.meter import Meter
from perilune.bench.short_conv import BYTES_PER_MS, Comparison, Shape, documents, equation, make, offsets, ours
from perilune.ops.short_conv.api import BACKENDS

CHUNKED = partial(ours, backend="chunked")


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
        "shapes": (Shape(20, 16, 3),),
        "checked": (Shape(60, 16, 5), Shape(7, 24, 3)),
        "contenders": {
            "perilune": CHUNKED,
            "equation": lambda x, weight, cu: equation(x, weight, offsets(cu, x.device)),
        },
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
    assert result["passed"], result["check"]
    assert [row["label"] for row in result["times"]] == ["perilune", "equation"]
    row = result["times"][0]
    rows = 20 * 16 * 2 / BYTES_PER_MS
    assert row["forward"]["floor_ms"] == pytest.approx(2 * rows)
    assert row["both"]["floor_ms"] == pytest.approx(5 * rows)
    assert row["both"]["ratio"] == pytest.approx(2 / (5 * rows))
    assert row["forward"]["bytes"] == 2**21
    runner.show(case.parts(result), True)
    assert "20 x 16, perilune" in capsys.readouterr().out


@pytest.mark.usefixtures("served")
def test_what_is_wrong_is_not(capsys):
    case = small(contenders={"perilune": lambda x, weight, cu: CHUNKED(x, weight, [0, x.shape[1]])})
    result = case.run()
    assert not result["passed"]
    assert result["times"] == []
    assert result["check"].startswith("failed: y of perilune is off by")
    runner.show(case.parts(result), True)
    assert "not timed" in capsys.readouterr().out


def test_documents_fill_the_row():
    for shape in (Shape(32768, 1024, 32), Shape(7, 8, 3), Shape(5, 8, 1)):
        cu = documents(shape)
        assert (cu[0], cu[-1], len(cu)) == (0, shape.T, shape.N + 1)
        assert cu == sorted(cu)


def test_inputs_are_the_same_at_every_call():
    first, second = (make(Shape(6, 8, 2), torch.device("cpu")) for _ in range(2))
    assert all(map(torch.equal, first[:3], second[:3]))
    assert first[3] == second[3]

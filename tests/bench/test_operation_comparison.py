"""Comparisons of an operation's backends on a GPU, run on the CPU: small shapes, and a clock that is told the time."""

from dataclasses import replace

import pytest
import torch

from perilune.bench import runner
from perilune.bench.cases import attn_res, cross_entropy, route, short_conv, wide_linear
from perilune.bench.meter import Meter
from perilune.bench.operation import BYTES_PER_MS, FLOPS_PER_MS

CPU = torch.device("cpu")
SMALL = [
    (cross_entropy.CASE, cross_entropy.Head(70, 16, 40), "chunked"),
    (wide_linear.CASE, wide_linear.Scores(300, 16, 5), "reference"),
    (route.CASE, route.Choice(30, 12, 3), "chunked"),
    (attn_res.CASE, attn_res.Sources(4, 30, 16), "chunked"),
    (short_conv.CASE, short_conv.Rows(60, 16, 5), "chunked"),
]


class Told(Meter):
    def median_ms(self, call):
        call()
        return 2.0

    def held(self):
        return 2**20

    def peak(self, call):
        call()
        return 3 * 2**20


def small(case, shape, **contenders):
    return replace(case, shapes=(shape,), checked=(shape,), contenders=contenders, device=CPU, meter=Told())


@pytest.mark.parametrize(("case", "shape", "backend"), SMALL, ids=lambda x: getattr(x, "name", None))
def test_what_is_right_is_timed(case, shape, backend, capsys, monkeypatch):
    monkeypatch.setattr(type(case), "reasons", lambda self, inputs: {})
    case = small(case, shape, perilune=backend, other="reference")
    result = case.run()
    assert result["check"] == "passed"
    assert [row["label"] for row in result["times"]] == ["perilune", "other"]
    for what, floor in (("forward", shape.forward_ms), ("both", shape.both_ms)):
        figures = result["times"][0][what]
        assert figures == {"ms": 2.0, "floor_ms": floor, "ratio": 2.0 / floor, "bytes": 2**21}
    assert set(result["errors"]["perilune"]) == set(case.allowed)
    runner.show(case.parts(result), True)
    assert f"{shape}, perilune" in capsys.readouterr().out


@pytest.mark.parametrize(("case", "shape", "backend"), SMALL, ids=lambda x: getattr(x, "name", None))
def test_what_is_wrong_is_not(case, shape, backend, capsys, monkeypatch):
    made = type(shape).make
    monkeypatch.setattr(type(case), "reasons", lambda self, inputs: {})

    def wrong(self, device):
        inputs = made(self, device)
        scale = {"reference": 1.0, backend: 1.1} if backend != "reference" else {"auto": 1.1, "reference": 1.0}
        return inputs._replace(op=lambda *leaves, backend: scale[backend] * inputs.op(*leaves, backend=backend))

    monkeypatch.setattr(type(shape), "make", wrong)
    case = small(case, shape, perilune=backend if backend != "reference" else "auto")
    result = case.run()
    assert not result["passed"]
    assert result["times"] == []
    assert "of perilune is off by" in result["check"]
    runner.show(case.parts(result), True)
    assert "not timed" in capsys.readouterr().out


@pytest.mark.parametrize("case", [case for case, _, _ in SMALL], ids=lambda x: x.name)
def test_where_the_kernels_cannot_run_it_says_so(case, capsys):
    case = replace(case, device=CPU, meter=Told())
    result = case.run()
    assert result["passed"]
    assert result["times"] == []
    runner.show(case.parts(result), True)
    assert "not timed" in capsys.readouterr().out


def test_floors_are_the_work():
    assert cross_entropy.Head(10, 20, 30).both_ms == 6 * 6000 / FLOPS_PER_MS + 6 * 300 / BYTES_PER_MS
    assert wide_linear.Scores(10, 20, 30).forward_ms == (2 * 200 + 4 * 300) / BYTES_PER_MS  # too small to compute
    assert wide_linear.Scores(10**4, 10**4, 10**4).both_ms == pytest.approx(18e12 / FLOPS_PER_MS)
    assert route.Choice(10, 20, 3).forward_ms == 10 * (80 + 36) / BYTES_PER_MS
    assert attn_res.Sources(3, 20, 16).both_ms == pytest.approx(11 * 20 * 16 * 2 / BYTES_PER_MS)
    assert short_conv.Rows(20, 16, 3).both_ms == pytest.approx(5 * 20 * 16 * 2 / BYTES_PER_MS)


@pytest.mark.parametrize("shape", [x for _, x, _ in SMALL], ids=lambda x: type(x).__name__)
def test_inputs_are_the_same_at_every_call(shape):
    first, second = ([*inputs.leaves, inputs.slope] for inputs in (shape.make(CPU), shape.make(CPU)))
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_gradients_of_one_name_are_all_looked_at(monkeypatch):
    """The last name's: one wrong source among right ones is found."""
    shape = attn_res.Sources(4, 30, 16)

    def wrong(query, key_weight, *sources, backend):
        if backend == "chunked":
            sources = [x if i != 2 else x.detach() + 2 * (x - x.detach()) for i, x in enumerate(sources)]
        return attn_res.mixture(query, key_weight, *sources, backend=backend)

    inputs = shape.make(CPU)._replace(op=wrong)
    monkeypatch.setattr(attn_res.Sources, "make", lambda self, device: inputs)
    errors = small(attn_res.CASE, shape, perilune="chunked").errors("perilune")
    assert [name for name, x in errors.items() if x > attn_res.CASE.allowed[name]] == ["dsources"]


def test_the_equation_that_a_compiler_is_given_is_the_operation():
    x, weight = (t.detach() for t in short_conv.Rows(60, 16, 5).make(CPU).leaves)
    bounds = short_conv.Rows(60, 16, 5).bounds
    got = short_conv.equation(x, weight, short_conv.offsets(bounds, CPU))
    torch.testing.assert_close(got, short_conv.packed(bounds, x, weight, backend="reference"))


def test_documents_fill_the_row():
    for shape in (short_conv.Rows(32768, 1024, 32), short_conv.Rows(7, 8, 3), short_conv.Rows(5, 8, 1)):
        bounds = shape.bounds
        assert (bounds[0], bounds[-1], len(bounds)) == (0, shape.T, shape.N + 1)
        assert bounds == sorted(bounds)

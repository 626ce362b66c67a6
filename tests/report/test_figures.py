"""Charts hold the files' numbers, and are figures that plotly takes."""

import json
import re
from itertools import pairwise

import example_run
import numpy as np
import plotly.graph_objects as go
import pytest

from perilune.report import compare, draw, figures, measures, page
from perilune.report.read import read_run
from perilune.report.theme import COLOURS, LIGHT
from perilune.report.variants import grouped


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return example_run.healthy(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def run(folder):
    return read_run(folder)


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    return read_run(example_run.sick(tmp_path_factory.mktemp("runs") / "sick"))


def charts_of(run):
    return [chart for section in page.sections_of(run) for chart in section.charts if chart is not None]


def trace(chart, name, label=None):
    figure = chart.figures[label or list(chart.figures)[chart.chosen]]
    return next(t for t in figure["data"] if t["name"] == name)


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_plotly_takes_every_figure(run, sick):
    drawn = [*charts_of(run), *charts_of(sick)]
    drawn += [c for s in compare.sections_of(grouped([run, sick])) for c in s.charts if c is not None]
    assert len(drawn) > 40
    for chart in drawn:
        for figure in chart.figures.values():
            go.Figure(figure)  # raises on a property that plotly does not know
            json.dumps(figure, allow_nan=False)


def test_every_colour_has_a_dark_side(run, sick):
    light = set(LIGHT.values())
    assert len(light) == len(COLOURS)
    for chart in [*charts_of(run), *charts_of(sick)]:
        assert set(re.findall("#[0-9a-fA-F]{3,8}", json.dumps(chart.figures))) <= light


def test_curves_are_the_files_numbers(folder, run):
    written = lines(folder)
    tokens = [line["tokens"] for line in written]
    loss = trace(figures.loss(run), "each step")
    assert loss["x"] == tokens
    assert loss["y"] == [line["losses"]["next_token"] for line in written]
    for chart, key, name in (
        (figures.learning_rate, "lr", "Learning rate"),
        (figures.grad_norm, "grad_norm", "each step"),
        (figures.gini, "gini", "each step"),
        (figures.max_violation, "max_violation", "each step"),
        (figures.dead, "dead", "Experts without a token, share of all"),
    ):
        assert trace(chart(run), name)["y"] == [line[key] for line in written]
    speeds = [example_run.BATCH / line["seconds"] for line in written]
    assert trace(figures.throughput(run), "each step")["y"] == pytest.approx(speeds)


def test_maps_are_the_snapshots_numbers(folder, run):
    for snapshot, label in zip(lines(folder, "snapshots.jsonl"), figures.expert_load(run).figures):
        assert label == snapshot["stage"]
        load = figures.expert_load(run).figures[label]["data"][0]["z"]
        assert np.array(load) == pytest.approx(np.array(list(snapshot["expert_load"].values())), rel=1e-3)
        depth = figures.depth_attention(run).figures[label]["data"][0]["z"]
        for row, written in zip(depth, snapshot["depth_attention"], strict=True):
            assert [w for w in row if w is not None] == pytest.approx(written["weights"], rel=1e-3)
        heads = figures.half_life(run).figures[label]["data"][0]
        assert heads["y"] == [h[1] for layer in snapshot["half_life"].values() for h in layer]
        assert heads["error_y"]["array"] == [h[2] - h[1] for layer in snapshot["half_life"].values() for h in layer]
        reads, writes = figures.activations(run).figures[label]["data"]
        assert reads["x"] == [row["input"] for row in snapshot["activation_rms"]]
        assert writes["x"] == [row["output"] for row in snapshot["activation_rms"]]
        states = figures.states(run).figures[label]["data"][0]["x"]
        assert states == [value for layer in snapshot["state_rms"].values() for value in layer]


def test_bars_points_and_cells_are_the_results_numbers(folder, run):
    result = json.loads((folder / "result.json").read_text())
    bars = figures.bits_bars(run).figures[""]["data"][0]
    named = {"this model" if n == "perilune" else n: v for n, v in result["bits_per_byte"].items()}
    assert dict(zip(bars["y"], bars["x"])) == named
    tasks = result["long_context"]["tasks"]
    for name, entries in tasks.items():
        assert trace(figures.tasks(run), name)["y"] == [entry["accuracy"] for entry in entries]
        assert trace(figures.tasks(run), f"{name}, chance")["y"] == [entry["chance"] for entry in entries]
    cells = figures.needle(run).figures[""]["data"][0]["z"]
    for row, entry in zip(cells, tasks["needle"], strict=True):
        assert row == pytest.approx([p["accuracy"] for p in entry["positions"]], rel=1e-3)
    for curve in result["long_context"]["loss_by_position"]:
        name = {1024: "1K", 4096: "4K", 16384: "16K"}[curve["context"]] + " tokens"
        assert trace(figures.loss_by_position(run), name)["y"] == [b["nats"] for b in curve["buckets"]]


def test_the_trained_length_is_marked(run):
    needle = figures.needle(run).figures[""]["layout"]
    assert [shape["y0"] for shape in needle["shapes"]] == [4.5]  # 256, 512, 1K, 2K, 4K are trained, 8K and 16K are not
    for chart in (figures.tasks(run), figures.loss_by_position(run)):
        layout = chart.figures[""]["layout"]
        assert [shape["x0"] for shape in layout["shapes"]] == [4096]
        assert layout["annotations"][0]["x"] == pytest.approx(np.log10(4096))


def test_stage_borders_stand_where_stages_begin(folder, run):
    written = lines(folder)
    starts = [a["tokens"] for a, b in pairwise(written) if a["stage"] != b["stage"]]
    layout = figures.loss(run).figures[""]["layout"]
    assert [shape["x0"] for shape in layout["shapes"]] == starts
    assert [label["text"] for label in layout["annotations"]] == [stage[0] for stage in example_run.STAGES]


def test_what_is_not_a_number_is_a_gap_and_is_shown(sick):
    chart = figures.loss(sick)
    assert trace(chart, "each step")["y"][-12:] == [None] * 12
    assert len(trace(chart, "not a number")["x"]) == 12


def test_long_curves_keep_their_extremes():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50_000)
    values[33_333], values[44_444] = 99.0, -99.0
    values[10_000:20_000] = np.nan
    kept = draw.thinned(values)
    assert len(kept) <= draw.MOST_POINTS + 2
    assert {0, 33_333, 44_444, 49_999} <= set(kept)
    assert kept == sorted(set(kept))
    assert draw.thinned(values[:100]) == list(range(100))


def test_smoothing_stays_within_its_part_and_keeps_gaps():
    values = np.array([1.0] * 50 + [5.0] * 50)
    values[[10, 70]] = np.nan
    values[30] = 1e6  # a leap moves no median
    smooth = measures.smoothed(values, [slice(0, 50), slice(50, 100)])
    assert np.flatnonzero(np.isnan(smooth)).tolist() == [10, 70]
    assert np.nan_to_num(smooth[:50], nan=1.0).tolist() == [1.0] * 50
    assert np.nan_to_num(smooth[50:], nan=5.0).tolist() == [5.0] * 50


@pytest.mark.parametrize("plot", [draw.PHONE, draw.DESKTOP])
def test_stage_names_do_not_cover_each_other(plot):
    rng = np.random.default_rng(1)
    for _ in range(50):
        places = np.sort(rng.random(6)).tolist()
        widths = rng.integers(20, 130, 6).tolist()
        rows = draw.rows_apart(places, widths, plot)
        spans = [(row, min(p * plot, plot - w), min(p * plot, plot - w) + w) for row, p, w in zip(rows, places, widths)]
        for i, (row, left, right) in enumerate(spans):
            for other, start, stop in spans[i + 1 :]:
                assert row != other or stop <= left or right <= start
    assert draw.rows_apart([0.0, 0.5], [50, 50], plot) == [0, 0]


def test_sources_stand_in_their_columns(run):
    snapshot = run.snapshots[-1]
    names, rows = figures.sources(snapshot), figures.depth_rows(snapshot)
    assert names == ["embedding", "block 1", "block 2", "block 3", "live sum"]
    assert rows[0][0] == 1.0
    assert np.isnan(rows[0][1:]).all()
    weights = snapshot.depth_attention[6][1]  # the embedding, one block and the live sum
    assert len(weights) == 3
    assert [rows[6][0], rows[6][1], rows[6][4]] == weights
    assert np.isnan(rows[6][2:4]).all()


def test_text_from_files_is_shown_literally():
    assert draw.plain("<b>a</b> & b") == "&lt;b&gt;a&lt;/b&gt; &amp; b"
    assert draw.plain("x" * 99, 10) == "x" * 9 + "…"


def test_wilson_is_the_known_interval():
    low, high = figures.wilson(0.5, 100)  # (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    assert (low, high) == pytest.approx((0.40383, 0.59617), abs=1e-4)
    assert figures.wilson(1.0, 10)[1] == pytest.approx(1.0)

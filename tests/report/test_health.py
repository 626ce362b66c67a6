"""Each rule sees what it is for, and nothing in a healthy run."""

import json
import math

import example_run
import pytest

from perilune.report.health import Level, findings, verdict
from perilune.report.read import read_run


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return example_run.healthy(tmp_path_factory.mktemp("runs") / "healthy")


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def titles(folder, level=None):
    return {f.title for f in findings(read_run(folder)) if level is None or f.level == level}


def each(change):
    """Changes metrics.jsonl line by line: change(line, i, n)."""

    def apply(folder):
        written = lines(folder, "metrics.jsonl")
        for i, line in enumerate(written):
            change(line, i, len(written))
        example_run.write(folder, {"metrics.jsonl": written})

    return apply


def last(change):
    """Changes the last snapshot."""

    def apply(folder):
        written = lines(folder, "snapshots.jsonl")
        change(written[-1])
        example_run.write(folder, {"snapshots.jsonl": written})

    return apply


def result(change):
    def apply(folder):
        values = json.loads((folder / "result.json").read_text())
        change(values)
        example_run.write(folder, {"result.json": values})

    return apply


def nan_loss(line, i, n):
    if i == 40:
        line["losses"]["next_token"] = math.nan


def spike(line, i, n):
    line["losses"]["next_token"] += 1.5 * (i == 150)


def left_out(line, i, n):
    if i == 150:
        line["losses"]["next_token"], line["skipped"] = math.nan, "loss: expected a number, got nan"


def rise(line, i, n):
    line["losses"]["next_token"] += 6 * max(0, i / n - 0.9)


def gradient(line, i, n):
    line["grad_norm"] *= 1 + 12 * i / n


def drift(line, i, n):
    line["gini"] += 0.1 * max(0, i / n - 0.6)


def dips(line, i, n):
    line["seconds"] *= 3 if i % 11 == 5 else 1


def plain_stream(snapshot):
    for row in snapshot["depth_attention"]:
        n = len(row["weights"])
        row["weights"] = [0.04 if j == 0 else 0.05 if j < n - 1 else 1 for j in range(n)]
        row["weights"][-1] = 1 - sum(row["weights"][:-1])


def untrained(snapshot):
    for row in snapshot["depth_attention"]:
        row["weights"] = [1 / len(row["weights"])] * len(row["weights"])


def saturated(snapshot):
    snapshot["half_life"]["0"] = [[0.1387, 0.139, 0.15]] * 2 + snapshot["half_life"]["0"][2:]


def frozen(snapshot):
    snapshot["half_life"]["1"] = [[50.0, 50.1, 50.2]] * 4


def growing(snapshot):
    for i, row in enumerate(snapshot["activation_rms"]):
        row["input"] *= 1.5**i


def overflow(snapshot):
    snapshot["activation_rms"][3]["output"] = math.inf


def fading(values):
    values["long_context"]["tasks"]["needle"][-1]["accuracy"] = 0.2


def lost(values):
    for entry in values["long_context"]["tasks"]["needle"]:
        entry["accuracy"] = 0.02


def blind(values):
    values["long_context"]["tasks"]["needle"][4]["positions"][3]["accuracy"] = 0.4


def guessing(values):
    for entry in values["long_context"]["tasks"]["variables"]:
        entry["accuracy"] = entry["chance"]


def turning_up(values):
    for bucket in values["long_context"]["loss_by_position"][-1]["buckets"]:
        bucket["nats"] += 0.6 * (bucket["from"] >= 4096)


def bits(value):
    return result(lambda values: values["bits_per_byte"].update(perilune=value))


def forgotten(folder):
    written = lines(folder, "snapshots.jsonl")
    for i, snapshot in enumerate(written):
        snapshot["bits_by_source"] = {"web": 1.5 - 0.01 * i, "code": 0.8 + 0.05 * (i == len(written) - 1)}
    example_run.write(folder, {"snapshots.jsonl": written})


def remembered(folder):
    written = lines(folder, "snapshots.jsonl")
    for i, snapshot in enumerate(written):
        snapshot["bits_by_source"] = {"web": 1.5 - 0.01 * i, "code": 0.8}
    example_run.write(folder, {"snapshots.jsonl": written})


CASES = [
    (forgotten, "A source was forgotten", Level.WATCH),
    (remembered, "No source was forgotten", Level.FINE),
    (each(nan_loss), "The loss is not a number", Level.BROKEN),
    (each(spike), "The loss spikes", Level.WATCH),
    (each(left_out), "Steps were left out", Level.WATCH),
    (each(rise), "The loss rises at the end", Level.POOR),
    (each(gradient), "The gradient norm grows", Level.WATCH),
    (each(drift), "The experts' load drifts apart", Level.WATCH),
    (each(dips), "Throughput dips", Level.WATCH),
    (result(lambda v: v["expert_load"].update(gini=0.15)), "The experts' load is uneven", Level.WATCH),
    (result(lambda v: v["expert_load"].update(dead_experts=3)), "Dead experts", Level.WATCH),
    (bits(1.64), "Better than xz -9e", Level.FINE),
    (bits(1.68), "Worse than xz -9e", Level.POOR),
    (bits(2.0), "Worse than gzip -9", Level.POOR),
    (last(lambda s: s.update(bits_per_byte=1.9)), "A later stage lost quality", Level.WATCH),
    (last(plain_stream), "Depth attention ignores a source", Level.WATCH),
    (last(untrained), "Depth attention has not learned", Level.WATCH),
    (last(saturated), "KDA heads saturated at the bound", Level.WATCH),
    (last(frozen), "KDA decay is frozen", Level.WATCH),
    (last(growing), "Activations grow with depth", Level.POOR),
    (last(overflow), "Activations are not numbers", Level.BROKEN),
    (result(fading), "Recall fades beyond the trained length", Level.WATCH),
    (result(lost), "Needles are not found", Level.POOR),
    (result(blind), "There is a blind spot in the text", Level.WATCH),
    (result(guessing), "A task was not learned", Level.WATCH),
    (result(turning_up), "The loss rises beyond the trained length", Level.WATCH),
]


@pytest.mark.parametrize(("harm", "title", "level"), CASES, ids=[title for _, title, _ in CASES])
def test_a_rule_sees_what_it_is_for(tmp_path, healthy, harm, title, level):
    folder = example_run.write(tmp_path / "run", {p.name: p.read_text() for p in healthy.iterdir()})
    if level != Level.FINE:
        assert title not in titles(folder)
    harm(folder)
    assert title in titles(folder, level)


@pytest.mark.parametrize("value", [math.nan, 9.0])
def test_a_step_that_was_left_out_did_no_harm(tmp_path, healthy, value):
    """Its loss is nothing that the model learned from: neither a spike of the run nor the end of it."""

    def change(line, i, n):
        if i == 150:
            line["losses"]["next_token"], line["skipped"] = value, "loss"

    folder = example_run.write(tmp_path / "run", {p.name: p.read_text() for p in healthy.iterdir()})
    each(change)(folder)
    assert titles(folder) == titles(healthy) | {"Steps were left out"}


def test_a_healthy_run_is_called_healthy(healthy):
    found = findings(read_run(healthy))
    assert len(found) == 16
    assert {f.level for f in found} <= {Level.FINE, Level.WATCH}
    assert verdict(found).startswith("This run looks healthy: ")


def test_the_worst_comes_first(tmp_path):
    found = findings(read_run(example_run.sick(tmp_path / "sick")))
    assert found[0].title == "The loss is not a number"
    assert [f.level for f in found] == sorted((f.level for f in found), reverse=True)
    assert verdict(found) == "This run is broken: the loss is not a number."
    named = {f.title for f in found if f.level > Level.FINE}
    assert {"Dead experts", "The loss spikes", "Throughput dips", "The gradient norm grows"} <= named


def test_a_run_that_says_little_is_judged_on_what_it_says(tmp_path):
    few = example_run.metrics()[:3]
    run = read_run(example_run.write(tmp_path / "short", {"metrics.jsonl": few}))
    assert {f.title for f in findings(run)} == {
        "Every loss is a number",
        "The experts' load is uneven",
        "No dead experts",
    }
    nothing = read_run(example_run.write(tmp_path / "new", {"run.json": example_run.config()}))
    assert findings(nothing) == []
    assert verdict([]) == "There is nothing to judge yet."

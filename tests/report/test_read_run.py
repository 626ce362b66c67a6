"""A run's files as they are found: whole, missing, cut short, damaged."""

import json
import math

import example_run
import numpy as np
import pytest

from perilune.core.errors import CheckpointError
from perilune.report.read import FILES, read_run

JSON_LINES = ("metrics.jsonl", "snapshots.jsonl")


@pytest.fixture
def folder(tmp_path):
    return example_run.healthy(tmp_path / "run")


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_every_number_is_read(folder):
    run, written = read_run(folder), lines(folder)
    assert run.notes == []
    assert run.finished
    assert run.name == "run"
    for column in ("step", "tokens", "lr", "seconds", "grad_norm", "gini", "max_violation", "dead"):
        assert getattr(run.steps, column).tolist() == [line[column] for line in written]
    assert run.steps.next_token.tolist() == [line["losses"]["next_token"] for line in written]
    assert run.steps.mtp.tolist() == [line["losses"]["mtp"] for line in written]
    for snapshot, line in zip(run.snapshots, lines(folder, "snapshots.jsonl")):
        assert snapshot.bits_per_byte == line["bits_per_byte"]
        assert snapshot.expert_load == line["expert_load"]
        assert snapshot.half_life == {k: [tuple(h) for h in v] for k, v in line["half_life"].items()}
        assert snapshot.depth_attention == [(row["sublayer"], row["weights"]) for row in line["depth_attention"]]
        assert snapshot.state_rms == line["state_rms"]
    result = json.loads((folder / "result.json").read_text())
    assert run.result.bits_per_byte == result["bits_per_byte"]
    needle = result["long_context"]["tasks"]["needle"]
    assert [e.accuracy for e in run.result.long_context.tasks["needle"]] == [e["accuracy"] for e in needle]
    assert run.result.samples == [(s["prompt"], s["text"]) for s in result["samples"]]


def test_speed_is_tokens_over_seconds(folder):
    written = lines(folder)
    expected = [example_run.BATCH / line["seconds"] for line in written]
    assert read_run(folder).steps.speed == pytest.approx(expected)


def test_stages_and_steps_planned(folder):
    run = read_run(folder)
    assert [stage.name for stage in run.stages] == [stage[0] for stage in example_run.STAGES]
    assert run.planned_steps == len(run.steps)
    assert [run.steps.stage[part.start] for part in run.steps.parts] == [stage[0] for stage in example_run.STAGES]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noted(folder, name):
    (folder / name).unlink()
    run = read_run(folder)
    assert len(run.notes) == 1
    assert run.notes[0].startswith(f"{name} is not there")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_noted_and_left_out(folder, name):
    (folder / name).write_bytes(b'{"step": \xff\xfe\n[1, 2]\n')
    run = read_run(folder)
    assert len(run.notes) >= 1
    assert all(name in note for note in run.notes)
    absent = {
        "run.json": run.config is None,
        "metrics.jsonl": run.steps is None,
        "snapshots.jsonl": run.snapshots == [],
        "result.json": run.result is None,
    }
    assert absent == {other: other == name for other in FILES}


def test_a_half_written_last_line_is_left_out(folder):
    path = folder / "metrics.jsonl"
    whole = len(lines(folder))
    path.write_bytes(path.read_bytes()[:-30])
    run = read_run(folder)
    assert len(run.steps) == whole - 1
    assert run.notes == ["The last line of metrics.jsonl is half-written, and was left out."]


def test_a_last_line_without_its_end_of_line_counts_if_it_is_whole(folder):
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    run = read_run(folder)
    assert len(run.steps) == len(lines(folder))
    assert run.notes == []


def test_damaged_lines_are_counted(folder):
    path = folder / "metrics.jsonl"
    text = path.read_text().splitlines()
    text[3], text[9] = '{"step": "four", "tokens": 1}', "not JSON"
    path.write_text("\n".join(text) + "\n")
    run = read_run(folder)
    assert len(run.steps) == len(text) - 2
    assert run.notes == ["2 lines of metrics.jsonl could not be read, and were left out."]


def test_steps_done_again_after_a_checkpoint_replace_the_first_ones(folder):
    written = lines(folder)
    again = [line | {"grad_norm": 77.0} for line in written[100:]]
    example_run.write(folder, {"metrics.jsonl": written[:120] + again})
    run = read_run(folder)
    assert run.steps.step.tolist() == [line["step"] for line in written]
    assert (run.steps.grad_norm == 77.0).tolist() == [i >= 100 for i in range(len(written))]
    assert "20 steps were done again" in run.notes[0]


def test_what_a_line_does_not_say_is_a_gap(folder):
    written = lines(folder)
    for line in written:
        del line["grad_norm"], line["losses"]["mtp"]
    written[5]["losses"]["next_token"] = math.nan
    run = read_run(example_run.write(folder, {"metrics.jsonl": written}))
    assert np.isnan(run.steps.grad_norm).all()
    assert np.isnan(run.steps.mtp).all()
    assert np.flatnonzero(np.isnan(run.steps.next_token)).tolist() == [5]
    assert run.notes == []


def test_a_folder_without_a_runs_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no run")
    with pytest.raises(CheckpointError, match="expected a run, found none of"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "bad", [{"bits_per_byte": []}, {"samples": [{"prompt": "a"}]}, {"tokens": "many"}, {"long_context": 3}]
)
def test_a_result_of_another_shape_is_left_out(folder, bad):
    result = json.loads((folder / "result.json").read_text()) | bad
    run = read_run(example_run.write(folder, {"result.json": result}))
    assert run.result is None
    assert run.notes == ["result.json is cut short or damaged, and was left out."]


def test_deep_nesting_and_huge_numbers_are_damage(folder):
    (folder / "result.json").write_text("[" * 100_000)
    assert read_run(folder).result is None
    (folder / "result.json").write_text('{"seconds": 1' + "0" * 400 + "}")
    assert read_run(folder).result is None


@pytest.mark.parametrize("count", [-1, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("key", ["step", "tokens"])
def test_a_count_that_is_none_damages_its_line(folder, key, count):
    broken = lines(folder)
    broken[-1][key] = count
    run = read_run(example_run.write(folder, {"metrics.jsonl": broken}))
    assert len(run.steps) == len(broken) - 1
    assert run.notes == ["1 line of metrics.jsonl could not be read, and was left out."]

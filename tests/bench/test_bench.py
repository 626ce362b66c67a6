import json
import time

import pytest

from perilune.bench import runner
from perilune.bench.case import Candidate, Case, Gate, Sheet
from perilune.bench.cases import find, grouped_experts, kda
from perilune.core.errors import ConfigError


def toy(calls=None, check=lambda: None, ratio=2.0, theirs=""):
    """A case whose fast form sleeps a twentieth of the slow one's time."""

    def work(label, seconds):
        def run():
            if calls is not None:
                calls.append(label)
            time.sleep(seconds)

        return run

    def build():
        return [
            Candidate("loop", work("loop", 0.02)),
            Candidate("theirs", work("theirs", 0.01), skipped=theirs),
            Candidate("ours", work("ours", 0.001)),
        ]

    return Case("toy", "sleeping", build, check, (Gate("ours", "loop", ratio), Gate("ours", "theirs", 1.0)))


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(runner, "ROUNDS", 3)


def main(case, tmp_path):
    code = runner.main(["toy"], json_path=tmp_path / "result.json", cases={"toy": case})
    return code, json.loads((tmp_path / "result.json").read_text())


def test_a_case_that_keeps_its_promises(tmp_path, capsys):
    calls = []
    code, written = main(toy(calls), tmp_path)
    assert code == 0
    assert calls == ["loop", "theirs", "ours"] * 4  # a round to warm up, then in turn
    (result,) = written["cases"]
    loop, _, ours = result["times"]
    assert [loop["label"], loop["runs"], ours["runs"]] == ["loop", 3, 3]
    assert 0.02 <= loop["median_s"] < 0.2
    assert 0 <= loop["spread_s"] < 0.2
    gate = result["gates"][0]
    assert gate["ratio"] == pytest.approx(loop["median_s"] / ours["median_s"])
    assert gate["passed"]
    environment = written["environment"]
    assert environment["threads"] == 1
    assert environment["device"]
    assert {"perilune", "python", "torch", "cuda", "triton", "flash-linear-attention"} < set(environment["versions"])
    printed = capsys.readouterr().out
    assert "toy: sleeping" in printed
    assert "ours against loop: expected 2x" in printed


def test_a_red_check_refuses_to_time(tmp_path, capsys):
    def wrong():
        raise AssertionError("dq is off by 3")

    calls = []
    code, written = main(toy(calls, check=wrong), tmp_path)
    assert code == 1
    assert calls == []
    (result,) = written["cases"]
    assert result["check"] == "failed: dq is off by 3"
    assert result["times"] == result["gates"] == []
    assert "dq is off by 3" in capsys.readouterr().out


def test_a_broken_promise_is_a_failure(tmp_path, capsys):
    code, written = main(toy(ratio=1000.0), tmp_path)
    assert code == 1
    assert [gate["passed"] for gate in written["cases"][0]["gates"]] == [False, True]
    assert "FAIL" in capsys.readouterr().out


def test_a_candidate_that_is_not_there_is_said_to_be_skipped(tmp_path, capsys):
    calls = []
    code, written = main(toy(calls, theirs="not installed"), tmp_path)
    assert code == 0
    assert "theirs" not in calls
    assert written["cases"][0]["times"][1] == {"label": "theirs", "skipped": "not installed"}
    assert "passed" not in written["cases"][0]["gates"][1]
    assert "skipped: not installed" in capsys.readouterr().out


def test_a_slow_candidate_runs_once(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "BUDGET_S", 0.015)
    calls = []
    _, written = main(toy(calls), tmp_path)
    assert calls.count("loop") == 1
    assert calls.count("ours") == 4
    assert written["cases"][0]["times"][0]["runs"] == 1


def test_an_unknown_name_is_named():
    with pytest.raises(ConfigError, match="kdaa: expected the name of a benchmark; do you mean 'kda'"):
        runner.main(["kdaa"], cases={"kda": toy()})


def test_every_file_of_cases_is_a_benchmark():
    cases = find()
    assert {"grouped_experts", "kda"} <= set(cases)
    for name, case in cases.items():
        assert case.name == name
        assert isinstance(case, Sheet) or case.gates


@pytest.mark.parametrize("case", [grouped_experts.CASE, kda.ON_CPU], ids=lambda case: case.name)
def test_the_checks_of_the_cases_pass(case):
    case.check()


def test_markdown_tables_are_whole_lines(tmp_path, capsys):
    case = toy(theirs="not installed, and the reason is longer than a terminal is wide" * 2)
    assert runner.main(["toy"], markdown=True, cases={"toy": case}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy: sleeping"
    assert sum(line.startswith("|") for line in lines) == 5  # a head, a rule, three candidates

import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from perilune.bench import progress, runner
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


def test_what_is_going_on_is_said_beside_the_results(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert runner.main(["toy"], cases={"toy": toy(theirs="not installed")}) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    steps = ["checking", "making inputs", "first run of loop", "first run of ours", "round 1", "round 2", "round 3"]
    assert [line.partition(": ")[2].partition(",")[0] for line in lines] == steps
    assert lines[0] == "toy 1/5: checking"
    assert lines[-1] == "toy 7/7: round 3, 0.0 min left"
    assert "checking" not in printed.out


def test_lines_come_now_and_then(capsys):
    with progress.watching("toy", Console(stderr=True)) as tell:
        for done in range(100):
            tell("working", done, 100)
    assert capsys.readouterr().err == "toy 1/100: working\n"


def test_a_bar_on_a_terminal_is_gone_in_the_end():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress.watching("toy", console) as tell:
        tell("working [bold]", 3, 10)
    shown = console.file.getvalue()
    assert "toy: working [bold]" in shown
    assert "3/10" in shown
    assert shown.endswith("\x1b[2K")  # the line is erased


def test_what_is_done_is_kept_when_the_rest_is_stopped(tmp_path):
    def stopped():
        raise KeyboardInterrupt

    target, link = tmp_path / "result.json", tmp_path / "link.json"
    target.write_text("older")
    link.symlink_to(target)
    cases = {"toy": toy(), "other": toy(check=stopped)}
    with pytest.raises(KeyboardInterrupt):
        runner.main(["toy", "other"], json_path=link, cases=cases)
    assert [case["name"] for case in json.loads(target.read_text())["cases"]] == ["toy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "result.json"]
    assert link.is_symlink()


def test_a_file_that_cannot_be_written_stays_as_it_was(monkeypatch, tmp_path):
    target = tmp_path / "result.json"
    target.write_text("older")
    monkeypatch.setattr(Path, "replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.write(target, {})
    assert target.read_text() == "older"
    assert [*tmp_path.iterdir()] == [target]

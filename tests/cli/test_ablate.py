"""Variants and seeds of a recipe by one command, each a run in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from perilune.cli.main import main
from perilune.recipes import get
from perilune.recipes.ablations import ABLATIONS
from tiny_run import OVERRIDES, write_corpus

FEW = ["stages.0.tokens=192", "stages.1.tokens=96"]


def test_runs_are_trained_compared_and_kept(tmp_path, capsys):
    out, texts = tmp_path / "runs", tmp_path / "texts"
    texts.mkdir()
    changes = [*OVERRIDES, *FEW, f"data.sources.text.path={write_corpus(texts)}"]
    command = ["ablate", "nano", *changes, "--variants", "base,plain", "--seeds", "1", "--jobs", "2", "--out", str(out)]
    assert main(command) == 0
    runs = {name: json.loads((out / name / "run.json").read_text()) for name in ("base-seed0", "plain-seed0")}
    assert runs["base-seed0"]["model"].pop("attn_res_block_size") == 2
    assert runs["plain-seed0"]["model"].pop("attn_res_block_size") is None
    assert runs["base-seed0"] == runs["plain-seed0"]
    assert "plain" in (out / "compare.html").read_text()
    results = {name: (out / name / "result.json").stat().st_mtime_ns for name in runs}
    capsys.readouterr()
    assert main(command) == 0
    assert "2 of 2 runs are finished already" in capsys.readouterr().out
    assert results == {name: (out / name / "result.json").stat().st_mtime_ns for name in runs}
    assert main([*command, "stages.0.lr=1e-3"]) == 2
    assert f"{out / 'base-seed0'}: expected the same run or none, got stages.0.lr=0.001 (there " in (
        capsys.readouterr().err
    )


def test_a_run_that_fails_is_named_with_its_reason(tmp_path, capsys):
    out = tmp_path / "runs"
    changes = [*OVERRIDES, f"data.sources.text.path={tmp_path / 'nowhere'}"]
    assert main(["ablate", "nano", *changes, "--variants", "base", "--seeds", "2", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"{out / 'base-seed0.log'}: expected a finished run, got perilune train: " in error
    assert "nowhere: expected a folder" in error
    assert not (out / "compare.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "plane"], "--variants: there is none called 'plane'; do you mean 'plain'?"),
        (["--device", "gpu"], "expected auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["seed=5"], "seed: expected none for all variants, got seed=5; say how many, from 0 on: --seeds N"),
        (["stages.0.lr=-1"], "lr: expected a finite rate above 0"),
        (["--variants", "base", "--seeds", "1"], "--variants: expected two runs or more, got 1"),
    ],
)
def test_mistakes_show_before_anything_is_trained(words, message, tmp_path, capsys):
    assert main(["ablate", "nano", *words, "--out", str(tmp_path / "runs")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_plotly_nothing_is_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["ablate", "nano", "--out", str(tmp_path / "runs")]) == 2
    assert "plotly: expected it for the report's charts, found none" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_at_work_are_asked_once_to_stop(number, tmp_path):
    """As a terminal does: the signal goes to the whole group."""
    texts, out = tmp_path / "texts", tmp_path / "runs"
    texts.mkdir()
    changes = [*OVERRIDES, "stages.0.tokens=100000000", f"data.sources.text.path={write_corpus(texts)}"]
    program = "from perilune.cli.main import entry; entry()"
    words = ["ablate", "nano", *changes, "--variants", "base", "--seeds", "2", "--out", str(out)]
    ablation = subprocess.Popen(
        [sys.executable, "-c", program, *words], process_group=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics, deadline = out / "base-seed0" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(ablation.pid, number)
    assert ablation.wait(timeout=120) == 128 + number
    assert "stopped after step" in (out / "base-seed0.log").read_text()
    assert len(list((out / "base-seed0" / "checkpoints").iterdir())) >= 1


def test_every_variant_fits_the_recipe_and_differs_from_it():
    nano = get("nano")
    made = [nano.override(changes) for changes in ABLATIONS.values()]
    assert made[0] == nano
    assert all(a != b for i, a in enumerate(made) for b in made[:i])

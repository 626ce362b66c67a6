"""`torchrun -m perilune train ...` on two processes of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.cli.main import main
from perilune.models.k3 import K3Model
from tiny_run import OVERRIDES, write_corpus

pytestmark = pytest.mark.slow


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, "-m", "perilune", "train", *words],
        cwd=folder, env=os.environ | paths, capture_output=True, text=True, timeout=250,
    )  # fmt: skip


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_make_the_folder_of_one(tmp_path, monkeypatch, capsys):
    """The same losses and loads, text and tokenizer; one line of an error from each rank; then one process goes on."""
    (tmp_path / "texts").mkdir()
    write_corpus(tmp_path / "texts")
    monkeypatch.chdir(tmp_path)
    words = ["nano", *OVERRIDES, "data.sources.text.path=texts", "data.sources.text.pattern=*.txt"]
    done = torchrun(tmp_path, *words, "--out", "two", "--layout", "expert=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks") == 1
    assert main(["train", *words, "--out", "one"]) == 0
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == len(two)
    for a, b in zip(one, two):
        assert b["losses"]["next_token"] == pytest.approx(a["losses"]["next_token"], rel=1e-5)
        assert (b["step"], b["tokens"], b["stage"], b["lr"]) == (a["step"], a["tokens"], a["stage"], a["lr"])
        assert b["gini"] == pytest.approx(a["gini"], abs=0.02)
    assert (tmp_path / "one" / "tokenizer.json").read_text() == (tmp_path / "two" / "tokenizer.json").read_text()
    verdicts = [json.loads((tmp_path / run / "result.json").read_text())["bits_per_byte"] for run in ("one", "two")]
    assert verdicts[1] == pytest.approx(verdicts[0], rel=1e-4)

    checkpoint = next(iter(sorted((tmp_path / "two" / "checkpoints").iterdir(), reverse=True)))
    assert main(["eval", str(checkpoint)]) == 2
    assert main(["export", "two", "--out", "exported"]) == 0
    exported, kept = (K3Model.from_pretrained(folder).state_dict() for folder in ("exported", "two/model"))
    assert all(torch.equal(exported[name], kept[name]) for name in kept)
    assert main(["export", "two", "--out", "exported"]) == 2
    assert main(["export", "texts", "--out", "another"]) == 2
    said = capsys.readouterr().err
    assert "found the parts that several ranks wrote; make a model of them with perilune export" in said
    assert "exported: expected a new or empty folder, found another" in said
    assert "texts: expected a run with a checkpoint, found none" in said

    (tmp_path / "two" / "result.json").unlink()  # as if it had been killed after the last step
    assert main(["train", "--resume", "two"]) == 0
    again = json.loads((tmp_path / "two" / "result.json").read_text())["bits_per_byte"]
    assert again == pytest.approx(verdicts[1], rel=1e-6)

    refused = torchrun(tmp_path, *words, "--out", "two")
    assert refused.returncode != 0
    assert refused.stderr.count("perilune train: two: expected a new or empty folder, found a run") == 2

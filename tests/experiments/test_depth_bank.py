"""The comparison of banks: on a tiny net and made-up rows."""

import json

import pytest
import torch

from experiments.depth import bank
from experiments.depth.recipes import SCALES
from experiments.depth.texts import Rows


def test_banks_are_trained_and_read_through(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    stack = SCALES["tiny"].stack("deep")
    monkeypatch.setattr(bank, "STACK", stack)
    monkeypatch.setattr(bank, "TIMED", (8, 16, 3))
    torch.manual_seed(0)
    rows = Rows(*torch.randint(0, 300, (2, 40, stack.context + 1)), tokens_a_byte=0.25)
    runs = [{name: bank.once(tmp_path, name, seed, rows) for name in bank.BANKS} for seed in (0, 1)]
    assert len(list(tmp_path.iterdir())) == 2 * len(bank.BANKS)
    assert json.loads((tmp_path / "float8-seed1.json").read_text()) == runs[1]["float8"]
    times = bank.mixture_times()
    figures = [{"bank": name, **bank.merged([run[name] for run in runs]), "ms": times[name]} for name in bank.BANKS]
    assert [row["bytes"] for row in figures] == [64, 32, 20, 32, 8]  # of 16 numbers
    read = figures[0]["read so"]
    assert read["whole"] == {"error": 0.0, "bits": figures[0]["bits"]}
    errors = [read[name]["error"] for name in bank.BANKS]
    assert 1e-4 < errors[1] < 4e-3 < errors[2] < 0.04 < errors[3] < errors[4]
    assert len({row["bits"] for row in figures}) == len(figures)
    assert bank.table_of(figures).row_count == len(figures)

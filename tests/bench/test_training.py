"""The benchmark of a training step, on a model that takes a second."""

import json

import pytest
import torch

from perilune import recipes
from perilune.bench import runner, training
from perilune.bench.cases import find
from perilune.bench.training import MadeUp, Training, Work, fault
from perilune.models.k3.flops import TRAINING, flops_per_token
from perilune.ops.cross_entropy import IGNORED
from perilune.train.loop import Trainer
from tiny_run import run

WORK = Work("tiny", 16, 96)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "tiny", run)


def small(**changes):
    return Training(
        **{"works": (WORK,), "device": torch.device("cpu"), "warmup": 1, "timed": 15, "profiled": 1, **changes}
    )


def test_the_loop_of_a_run_is_what_is_timed(monkeypatch, tmp_path, capsys):
    steps, plain = [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, batch: (steps.append(batch), plain(self, batch))[1])
    assert runner.main(["train"], json_path=tmp_path / "out.json", cases={"train": small()}) == 0
    assert len(steps) == 1 + 15 + 1
    (result,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    (row,) = result["times"]
    assert (row["runs"], row["label"], row["precision"]) == (15, "tiny, 6 x 16 tokens", "float32")
    assert row["tokens_per_s"] == pytest.approx(96 / row["median_s"])
    counted = TRAINING * sum(flops_per_token(run().model, 16, kda_chunk=0).values())
    assert row["flops_per_token"] == pytest.approx(counted) == pytest.approx(sum(row["flops_by_part"].values()))
    assert row["tflops"] == pytest.approx(counted * row["tokens_per_s"] / 1e12)
    assert (row["utilisation"], row["peak_bytes"]) == (None, None)  # of a GPU
    kinds = row["kinds"]
    assert {"KDA", "experts", "attention", "attention residuals", "products", "head and loss", "optimizer"} < set(kinds)
    assert sum(spent["seconds"] for spent in kinds.values()) == pytest.approx(row["profiled_s"], rel=1e-6)
    assert fault(row["losses"]) == ""
    printed = capsys.readouterr().out
    assert "where a step's time goes" in printed
    assert "optimizer" in printed


def test_a_loss_that_rises_is_not_timed(monkeypatch, capsys):
    plain = Trainer._set_lr
    monkeypatch.setattr(Trainer, "_set_lr", lambda self, lr: plain(self, -lr))
    case = small()
    result = case.run()
    assert not result["passed"]
    assert result["check"].startswith("failed: tiny, 6 x 16 tokens: expected a loss that falls, got ")
    runner.show(case.parts(result), True)
    assert "not timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([3.0, 2.0, 1.0], ""),
        ([3.0, 2.9, 3.1, 2.5, 2.4, 2.6], ""),
        ([1.0, 1.0], "expected a loss that falls, got 1.0000, then 1.0000"),
        ([1.0, float("nan"), 0.5], "expected finite losses, got [1.0, nan, 0.5]"),
    ],
)
def test_faults(losses, said):
    assert fault(losses) == said


def test_what_has_no_room_is_said_and_the_rest_is_timed(monkeypatch, capsys):
    large = Work("tiny", 16, 9600)
    plain = Training._measured

    def measured(self, work, steps):
        if work == large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(self, work, steps)

    monkeypatch.setattr(Training, "_measured", measured)
    case = small(works=(large, WORK))
    result = case.run()
    assert result["passed"]
    assert [row.get("skipped") for row in result["times"]] == ["CUDA out of memory", None]
    runner.show(case.parts(result), True)
    assert "skipped: CUDA out of memory" in capsys.readouterr().out


def test_made_up_batches_are_whole_documents_of_frequent_and_rare_tokens():
    made = WORK.run(3)
    first, second = (MadeUp(made) for _ in range(2))
    for feed in (first, second):
        feed.begin(made.stages[0])
    batch = first.next()
    assert torch.equal(batch.input_ids, second.next().input_ids)
    assert not torch.equal(batch.input_ids, second.next().input_ids)
    assert batch.cu_seqlens.tolist() == list(range(0, 97, 16))
    ends = torch.arange(15, 96, 16)
    assert batch.labels[0, ends].eq(IGNORED).all()
    inside = torch.ones(96, dtype=torch.bool).index_fill(0, ends, False)[:-1]
    assert torch.equal(batch.labels[0, :-1][inside], batch.input_ids[0, 1:][inside])
    first.begin(made.stages[0].replace(batch_tokens=9600))
    ids = first.next().input_ids
    assert ids.max() < made.model.vocab_size
    counts = ids.flatten().bincount(minlength=made.model.vocab_size)
    assert counts[:30].sum() > 3 * counts[-30:].sum()


def test_a_gpus_works_are_the_presets_own_recipe():
    assert find()["train"].name == "train"
    for work in (*training.ON_GPU, *training.ON_CPU):
        made = work.run(2)
        assert made.model == recipes.get(work.recipe).model
        assert (made.stages[0].batch_tokens, made.stages[0].steps) == (work.tokens, 2)
        assert made.precision == ("bfloat16" if work.recipe == "1b_8k" else "float32")
        assert work.tokens % work.context == 0

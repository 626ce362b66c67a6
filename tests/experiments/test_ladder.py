"""The evidence about the climb: its parts at a size of seconds, and the page shows what the file says."""

import json
import math
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from experiments import publish
from experiments.ladder import charts, evidence, page, probes, recipes, runs, texts, train
from experiments.ladder.__main__ import main
from perilune.core.errors import ConfigError, DataError
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model

TINY = recipes.SCALES["tiny"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scale, a seed of every way up and a second of two."""
    home = tmp_path_factory.mktemp("ladder") / "tiny"
    assert runs.run_scale(TINY.limited(1), home, CPU, 1, None, TINY.variants, Console(quiet=True))
    assert runs.run_scale(TINY, home, CPU, 1, None, ("climb", "jump"), Console(quiet=True))
    return home


@pytest.fixture(scope="module")
def exam(home: Path) -> probes.Exam:
    return probes.Exam(TINY, ByteBPE.load(home))


def record(home: Path, variant: str, seed: int = 0) -> dict:
    return json.loads(train.case_file(home, variant, seed).read_text())


# the ways up


@pytest.mark.parametrize("scale", recipes.SCALES.values(), ids=recipes.SCALES)
def test_all_ways_spend_the_same_tokens_and_share_their_first_stage(scale: recipes.Scale) -> None:
    climb = scale.run(recipes.VARIANTS["climb"], 0)
    total = sum(stage.tokens for stage in climb.stages)
    for variant in recipes.VARIANTS.values():
        run = scale.run(variant, 0)
        assert sum(stage.tokens for stage in run.stages) == total
        spent = sum(stage.steps * stage.batch_tokens for stage in run.stages)
        assert spent == pytest.approx(total, rel=0.02)
        assert run.stages[0] == climb.stages[0]
        assert run.stages[-1].context == climb.stages[-1].context
        assert run.stages[-1].lr_end == pytest.approx(climb.stages[-1].lr_end)
        bound = run.model.linear_attn_config.gate_lower_bound
        assert bound == (None if variant.name == "unbounded gate" else -5.0)
        assert run.model.replace(linear_attn_config=climb.model.linear_attn_config) == climb.model
        assert all(stage.mix.keys() == {recipes.TEXT, *recipes.TASKS} for stage in run.stages)


def rates(variant: str, scale: recipes.Scale = recipes.SMALL) -> list[list[float]]:
    """Of every step, by stage."""
    run = scale.run(recipes.VARIANTS[variant], 0)
    found, done = [], 0
    for stage in run.stages:
        found.append([run.schedule.lr(done + n * stage.batch_tokens) for n in range(1, stage.steps + 1)])
        done += stage.steps * stage.batch_tokens
    return found


def test_rates_are_what_the_ways_are_called() -> None:
    climb, steady, sudden, jump = map(rates, ("climb", "no re-warming", "no warm-up", "jump"))
    assert climb[0] == steady[0] == sudden[0] == jump[0]  # to the last step
    for before, own in pairwise(climb):
        assert before[-1] < own[0] < max(own)  # up in more than one step
        assert own.index(max(own)) > 0
    later = [rate for stage in steady[1:] for rate in stage]
    assert later == sorted(later, reverse=True)  # never up
    assert later[0] <= steady[0][-1] * (1 + 1e-9)
    for own in sudden[1:]:
        assert own[0] == pytest.approx(max(own), rel=1e-2)
    assert len(jump) == 2
    assert max(jump[1]) == pytest.approx(max(climb[1]), rel=0.05)


def test_stages_are_the_recipes_but_for_their_sizes() -> None:
    for scale, recipe in ((recipes.SMALL, recipes.MINI), (recipes.LARGE, recipes.FULL)):
        for own, stage in zip(scale.stages, recipe.stages):
            assert (own.name, own.lr, own.lr_end, own.warmup, own.long_times) == (
                stage.name, stage.lr, stage.lr_end, stage.warmup, stage.long_times
            )  # fmt: skip
            assert sum(own.mix.values()) == pytest.approx(sum(stage.mix.values()))
            assert all(own.mix[task] == stage.mix[task] for task in recipes.TASKS)


def test_a_mistyped_way_is_named() -> None:
    assert recipes.chosen_variants(TINY, "jump, climb") == ("jump", "climb")
    with pytest.raises(ConfigError, match="variants: there is none called 'jumps'; do you mean 'jump'"):
        recipes.chosen_variants(TINY, "jumps")


# training


def test_ways_with_one_gate_begin_with_the_same_weights_and_then_part(home: Path) -> None:
    first = TINY.stages[0].steps
    made = {name: record(home, name) for name in recipes.VARIANTS}
    bounded = [made[name] for name in recipes.VARIANTS if name != "unbounded gate"]
    for run in bounded[1:]:
        assert run["steps"][:first] == bounded[0]["steps"][:first]
        assert run["stages"][0] == bounded[0]["stages"][0]
        assert run["steps"][first:] != bounded[0]["steps"][first:]
    assert made["unbounded gate"]["steps"][:first] != bounded[0]["steps"][:first]


def test_a_run_from_its_trunk_is_the_run_in_one_go(home: Path, exam: probes.Exam) -> None:
    """Bit for bit: weights, optimizer, balancers, data and random numbers all went on."""
    place = train.Place(TINY, home, CPU)
    trainer = place.trainer(TINY.run(recipes.VARIANTS["jump"], 0))
    straight = train.Record()
    while trainer.steps_done < trainer.steps:
        train.stretch(trainer, exam, straight, math.inf)
    kept = record(home, "jump")
    assert straight.steps == kept["steps"]
    assert straight.looks == kept["looks"]
    assert straight.stages == kept["stages"]


def test_finished_runs_are_kept_and_lost_ones_made_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = train.case_file(home, "climb", 1)
    before = file.read_text()
    other = train.case_file(home, "jump", 1).stat().st_mtime_ns
    file.unlink()
    assert main(["tiny", "--out", str(home.parent), "--device", "cpu", "--variants", "climb,jump"]) == 0
    again, kept = json.loads(file.read_text()), json.loads(before)
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in kept.items() if k != "seconds"}
    assert train.case_file(home, "jump", 1).stat().st_mtime_ns == other
    assert "all done" in capsys.readouterr().out


def test_time_is_kept(tmp_path: Path) -> None:
    start = time.monotonic()
    done = runs.run_scale(TINY, tmp_path, CPU, 1, 0.0, ("climb",), Console(quiet=True))
    assert not done
    assert time.monotonic() - start < 60
    assert not list(tmp_path.glob("*seed0.json"))


def test_a_look_is_of_the_weights_and_changes_nothing(home: Path, exam: probes.Exam) -> None:
    """A stage's first look is the last of the stage before."""
    looks = record(home, "climb")["looks"]
    firsts = [i for i, look in enumerate(looks) if look["step"] == 0][1:]
    assert len(firsts) == len(TINY.stages) - 1
    for i in firsts:
        assert looks[i]["nats"] == looks[i - 1]["nats"]
    trainer = train.Place(TINY, home, CPU).trainer(TINY.run(recipes.VARIANTS["climb"], 0))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.train()
    exam.look(trainer.model)
    exam.after_stage(trainer.model, 192)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert all(module.training for module in trainer.model.modules())


# what is asked


def test_answers_are_told_apart_by_depth_and_by_hops(exam: probes.Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is right exactly where the first line to be read stands in the second half."""
    monkeypatch.setattr(
        probes, "answers", lambda model, row, size: [s.depth(q) >= 0.5 for s in row for q in s.questions]
    )
    for task in ("retrieval", "chains"):
        found = probes.asked(None, exam.tasks[task, "taught"], 512, 20)
        assert [right for _, right in found["depths"][:2]] == [0, 0]
        assert all(asked == right for asked, right in found["depths"][2:])
        assert found["asked"] == sum(asked for asked, _ in found["depths"]) == sum(n for n, _ in found["hops"])
        assert found["right"] == sum(right for _, right in found["depths"])
        assert len(found["hops"]) == {"retrieval": 1, "chains": 3}[task]
        assert all(asked > 0 for asked, _ in found["hops"])


def test_nothing_held_out_is_in_what_is_trained_on(home: Path, exam: probes.Exam) -> None:
    """Neither its lines in the stages' batches, nor the files its statements hide in."""
    trainer = train.Place(TINY, home, CPU).trainer(TINY.run(recipes.VARIANTS["climb"], 0))
    decode = trainer.feed.tokenizer.decode
    import re

    for stage in trainer.run.stages:
        trainer.feed.begin(stage)
        text = "".join(decode(trainer.feed.next().input_ids[0].tolist()) for _ in range(6))
        for task in recipes.TASKS:
            assert re.search(exam.tasks[task, "held out"].lines, text) is None
            assert re.search(exam.tasks[task, "taught"].lines, text) is not None
    corpus = texts.corpus_of(TINY.text_bytes)
    assert not {d.text for d in corpus.train} & {d.text for d in corpus.held_out}
    assert corpus.train_bytes < 2 * TINY.text_bytes + 300_000


def test_the_loss_by_position_is_of_one_pass_and_of_fresh_pieces(exam: probes.Exam) -> None:
    """Against the model's logits on each piece alone."""
    torch.manual_seed(0)
    model = K3Model(TINY.model())
    found = probes.by_position(model, exam.rows, 192)
    losses = {"nats": torch.zeros(512), "fresh": torch.zeros(512)}
    for row in exam.rows:
        ids = torch.from_numpy(row.astype(np.int64))[None]
        for key, cuts in (("nats", [0, 512]), ("fresh", [0, 192, 384, 512])):
            for start, stop in pairwise(cuts):
                with torch.no_grad():
                    logits = model(ids[:, start:stop]).logits[0]
                losses[key][start:stop] += torch.nn.functional.cross_entropy(
                    logits, ids[0, start + 1 : stop + 1], reduction="none"
                ) / len(exam.rows)
    assert [(b["from"], b["to"]) for b in found] == [(0, 32), (32, 128), (128, 256), (256, 512)]
    for bucket in found:
        for key, values in losses.items():
            assert bucket[key] == pytest.approx(float(values[bucket["from"] : bucket["to"]].mean()), abs=1e-4)
    assert found[0]["nats"] == pytest.approx(found[0]["fresh"], abs=1e-6)
    assert found[3]["nats"] != pytest.approx(found[3]["fresh"], abs=1e-6)


def test_rows_go_through_documents_without_a_gap() -> None:
    documents = [np.arange(a, b) for a, b in ((0, 7), (7, 8), (8, 30))]
    made = texts.rows(documents, 10, 5)
    assert [row.tolist() for row in made] == [list(range(11)), list(range(10, 21))]


# what is made of it


def test_figures_over_seeds_are_worked_out_by_hand() -> None:
    cell = {"task": "retrieval", "form": "taught", "length": 128, "chance": 0.1, "hops": [[4, 1]]}
    cells = [{**cell, "asked": 4, "right": right, "depths": [[2, right], [2, 0]]} for right in (1, 2)]
    found = evidence.pooled(cells)
    assert (found["asked"], found["right"], found["by_seed"]) == (8, 3, [0.25, 0.5])
    assert (found["depths"], found["hops"]) == ([[4, 3], [4, 0]], [[8, 2]])
    assert evidence.accuracy(found) == 3 / 8
    assert evidence.error(found) == pytest.approx(math.sqrt(0.4 * 0.6 / 10))  # more than 0.1768 / sqrt(2)
    assert evidence.error({"asked": 8, "right": 4, "by_seed": [0.0, 1.0]}) == pytest.approx(0.5)
    assert evidence.error({"asked": 2, "right": 0, "by_seed": [0.0]}) == pytest.approx(math.sqrt(0.25 * 0.75 / 4))


def test_a_jolt_is_the_rise_above_where_a_stage_began() -> None:
    run = {
        "stages": [{"name": "a"}, {"name": "b"}],
        "looks": [{"stage": s, "nats": n} for s, n in (("a", 5.0), ("a", 3.0), ("b", 3.0), ("b", 3.4), ("b", 2.5))],
        "steps": [{"stage": "a", "grad_norm": g} for g in (9.0, 1.0, 2.0, 2.0)]
        + [{"stage": "b", "grad_norm": g} for g in (6.0, 1.0, 80.0, 1.0)],
    }
    assert evidence.jolt(run, "b") == {"rise": 0.4, "change": -0.5, "gradient": 3.0}


def test_what_lies_beyond_the_trained_length_is_told_apart() -> None:
    def cell(length: int, right: int) -> dict:
        return {
            "task": "chains",
            "form": "taught",
            "length": length,
            "asked": 4,
            "right": right,
            "by_seed": [right / 4],
        }

    buckets = [(0, 32, 9.0, 9.0), (32, 128, 3.0, 3.0), (128, 256, 4.0, 3.5), (256, 512, 6.0, 3.0)]
    stage = {
        "context": 128, "cells": [cell(64, 4), cell(128, 2), cell(256, 1)],
        "positions": [{"from": a, "to": b, "nats": [n, n + 1], "fresh": [f, f]} for a, b, n, f in buckets],
    }  # fmt: skip
    inside, outside = evidence.beyond(stage, "chains", "taught")
    assert (inside["asked"], inside["right"], outside["asked"], outside["right"]) == (8, 6, 4, 1)
    rise = evidence.position_rise(stage)
    assert rise.values == pytest.approx([(128 * 0.5 + 256 * 3) / 384, (128 * 1.5 + 256 * 4) / 384])
    assert evidence.position_rise({**stage, "context": 512}) is None


def test_the_page_takes_tables_from_the_figures_alone(home: Path) -> None:
    found = evidence.collect(home.parent)
    kinds = "\n".join(f"<!-- table: {kind} tiny -->\nSTALE\n<!-- end -->" for kind in page.TABLES)
    filled = page.filled(f"{kinds}\n<!-- table: jolts full -->\n<!-- end -->", found)
    assert "STALE" not in filled
    assert "2 layers, 16 wide, 4 experts" in filled
    assert "*Not run yet.*" in filled
    assert page.filled(filled, found) == filled
    stage = found["scales"]["tiny"]["variants"]["climb"]["stages"][0]
    share = evidence.cells_of(stage, "retrieval", "taught")[0]
    assert f"| retrieval, taught | climb | 192 | {page.percent(share)} |" in filled
    jolts = found["scales"]["tiny"]["variants"]["jump"]["jolts"]
    assert len(jolts) == 1
    assert f"| jump | 512 | {page.spelled(page.Sample([j['rise'] for j in jolts[0]]), 3)} |" in filled
    with pytest.raises(DataError, match="expected one of setting, "):
        page.filled("<!-- table: nonsense -->\n<!-- end -->", found)


def test_pictures_show_the_figures(home: Path) -> None:
    found = evidence.collect(home.parent)
    drawn = charts.figures(found)
    assert set(drawn) == {f"tiny-{key}" for key in charts.FIGURES}
    scale = found["scales"]["tiny"]
    first = drawn["tiny-lengths"][1]["data"][0]
    cells = evidence.cells_of(scale["variants"]["climb"]["stages"][0], "retrieval", "taught")
    assert first["y"] == pytest.approx([100 * evidence.accuracy(cell) for cell in cells])
    assert first["marker"]["symbol"] == ["circle", "circle-open", "circle-open"]
    losses = [trace for trace in drawn["tiny-positions"][1]["data"] if trace["name"] == "unbounded gate"]
    wanted = scale["variants"]["unbounded gate"]["stages"][0]["positions"]
    assert losses[0]["y"] == pytest.approx([b["nats"][0] - b["fresh"][0] for b in wanted])
    looks = drawn["tiny-jolts"][1]["data"][0]
    end = scale["variants"]["climb"]["stages"][0]["tokens"]
    assert looks["x"][0] == end


def test_the_published_page_says_what_the_figures_file_says() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    found = json.loads(page.RESULTS.read_text())
    assert page.filled(text, found) == text
    for name in charts.figures(found):
        assert (publish.IMAGES / f"ladder-{name}.png").exists()
        assert f"images/ladder-{name}.png" in text

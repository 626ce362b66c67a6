"""The evidence about balancing: its parts at a size of seconds, and that the page shows what the figures file says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import publish
from experiments.balancing import charts, evidence, page, recipes, runs, skew, synthetic, texts, timing, train
from experiments.balancing.__main__ import main
from perilune.core.errors import ConfigError, DataError
from perilune.models.k3 import K3Model
from perilune.nn.load import gini
from perilune.train.folder import write_json
from perilune.train.loop import Trainer

TINY = recipes.SCALES["tiny"].limited(None, None, "skewed,shift")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scale, trained in this process: what `runs` does in others."""
    home = tmp_path_factory.mktemp("balancing") / "tiny"
    texts.prepare(TINY, home)
    skew.prepare(TINY, 0, home, "cpu")
    for case in runs.tuning_cases(TINY):
        trained(home, *case)
    chosen = runs.choose(TINY, home)
    write_json(home / "chosen.json", chosen)
    for case in runs.cases(TINY, chosen):
        trained(home, *case)
    timing.time_rules(TINY, chosen, home, "cpu", page.Console(quiet=True))
    return home


def trained(home, *case):
    folder, words = runs.command(TINY, home, *case)
    assert train.main([*words, "--device", "cpu"]) == 0
    assert (folder / "result.json").exists()


# training


def test_every_rule_is_trained_in_every_situation_and_told_by_its_worst_layer(home):
    found = evidence.collect(home.parent)["scales"]["tiny"]
    assert {(run["situation"], run["rule"]) for run in found["runs"]} == {
        (situation, rule) for situation in TINY.situations for rule in TINY.rules
    }
    for run in found["runs"]:
        assert len(run["curve"]) == len(run["loss"]) == TINY.steps
        assert run["loss"][-1] < run["loss"][0]  # it learns
        assert run["gini_step"][1] in found["layers"] == ["1", "2"]
    loads = runs.read(runs.folder_of(home, "shift", "none", None, 0))["loads"]
    late = [line["gini"] for line in loads[-2:]]
    value, layer = runs.worst_late(loads, "gini")
    assert value == pytest.approx(max(sum(row[i] for row in late) / 2 for i in range(2)))
    assert value == pytest.approx(sum(row[layer] for row in late) / 2)


def test_all_rules_of_a_situation_start_alike_and_only_the_skewed_one_uneven(home):
    first = {
        (situation, rule): runs.read(runs.folder_of(home, situation, rule, None, 0))
        for situation in TINY.situations
        for rule in TINY.rules
    }
    for situation in TINY.situations:
        losses = {first[situation, rule]["metrics"][0]["losses"]["next_token"] for rule in TINY.rules}
        assert len(losses) == 1
        uneven = max(first[situation, "none"]["loads"][0]["gini"])
        assert (uneven > 0.6) == (situation == "skewed"), situation


def test_quantile_mends_the_skewed_start_and_nothing_does_not(home):
    late = {rule: runs.read(runs.folder_of(home, "skewed", rule, None, 0))["loads"][4] for rule in TINY.rules}
    assert max(late["quantile"]["gini"]) < 0.7 * max(late["none"]["gini"])


def test_the_shift_reads_prose_first_and_code_then():
    first, second = recipes.run(TINY, "shift", (), 0, Path("x")).stages
    assert first.mix == {"prose": 1.0}
    assert second.mix == {"code": 1.0}
    assert first.steps == second.steps == TINY.steps // 2


def test_the_seed_that_chooses_is_not_reported(home):
    chosen = json.loads((home / "chosen.json").read_text())["sign"]["normal"]
    assert chosen["chosen"] in recipes.RULES["sign"].candidates
    least = min(entry["bits_per_byte"] for entry in chosen["tried"].values())
    allowed = {c: e for c, e in chosen["tried"].items() if e["bits_per_byte"] <= 1.005 * least}
    assert chosen["tried"][f"{chosen['chosen']:g}"]["gini"] == min(entry["gini"] for entry in allowed.values())
    assert all(run["seed"] != recipes.TUNING_SEED for run in evidence.collect(home.parent)["scales"]["tiny"]["runs"])


def test_a_run_stopped_anywhere_goes_on_to_the_same_figures(home, tmp_path, monkeypatch):
    whole = runs.folder_of(home, "skewed", "quantile", None, 0)
    out = tmp_path / "again"
    words = ["train", "tiny", "skewed", "quantile", "-", "0", str(home), "--out", str(out), "--device", "cpu"]
    step, count = Trainer.step, []

    def stopping(self, batch):
        count.append(1)
        if len(count) == 7:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(Trainer, "step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train.main(words)
    monkeypatch.setattr(Trainer, "step", step)
    assert train.main(["train", "--resume", str(out), "--device", "cpu"]) == 0
    assert (out / "loads.jsonl").read_text() == (whole / "loads.jsonl").read_text()
    results = [json.loads((folder / "result.json").read_text())["bits_per_byte"] for folder in (out, whole)]
    assert results[0] == results[1]


def test_another_run_in_a_folder_is_refused(home):
    folder = runs.folder_of(home, "shift", "none", None, 0)
    kept = json.loads((folder / "run.json").read_text())
    try:
        write_json(folder / "run.json", kept | {"load_window": 7})
        with pytest.raises(ConfigError, match=r"expected the same run or none, got load_window=4 \(there 7\)"):
            runs.command(TINY, home, "shift", "none", None, 0)
    finally:
        write_json(folder / "run.json", kept)


def test_balancers_times_are_part_of_their_steps(home):
    times = timing.read(home)["rules"]
    assert set(times) == set(TINY.rules)
    for values in times.values():
        assert 0 < values["balancers_ms"] < values["step_ms"]
        assert 0 < values["share"] < 1
    assert times["none"]["balancers_ms"] < times["quantile"]["balancers_ms"]


def test_a_clock_of_a_second_gpu_looks_at_that_one(monkeypatch):
    """Which need not be the current one: events on another's stream would time nothing."""
    asked = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            asked.append(stream)

        def elapsed_time(self, other):
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(device))
    second = torch.device("cuda:1")
    clock = timing.Clock(second)
    assert clock.around(lambda x: x + 1)(1) == 2
    assert clock.take() == pytest.approx(0.002)
    assert asked == [("stream", second), ("stream", second), second]


def test_larger_scales_build_and_are_what_they_say():
    counts = {}
    for name in ("small", "full", "wide"):
        scale = recipes.SCALES[name]
        for situation in scale.situations:
            for rule in scale.rules:
                candidates = recipes.RULES[rule].candidates or (None,)
                changes = recipes.RULES[rule].changes(candidates[0])
                made = recipes.run(scale, situation, changes, 0, Path("x"))
                assert sum(stage.steps for stage in made.stages) == scale.steps
        with torch.device("meta"):
            model = K3Model(made.model)
        balancers = list(model.balancers().values())
        counts[name] = balancers[0].num_experts, balancers[0].top_k, len(balancers), made.model.hidden_size
    assert counts == {"small": (64, 4, 3, 128), "full": (896, 16, 3, 256), "wide": (512, 8, 11, 1024)}


def test_parts_of_a_scale_are_asked_for_by_name(capsys):
    assert TINY.limited(5, "sign", "shift,skewed").rules == ("sign",)
    assert TINY.limited(5, None, None).seeds == 1
    assert main(["tiny", "--rules", "quantil", "--out", "nowhere"]) == 2
    assert "--rules: tiny has none called 'quantil'; do you mean 'quantile'?" in capsys.readouterr().err


def test_one_command_does_a_part_and_does_it_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(page.ROOT)
    words = ["tiny", "--rules", "none,quantile", "--situations", "normal", "--jobs", "2", "--device", "cpu"]
    words += ["--out", str(tmp_path)]
    assert main(words) == 0
    assert "2 runs, 2 at a time on cpu" in capsys.readouterr().out
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    assert main(words) == 0
    assert "2 of 2 runs are finished already" in capsys.readouterr().out
    assert made == {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    timed = json.loads((tmp_path / "tiny" / "timing.json").read_text())["rules"]
    assert set(timed) == {"none", "quantile"}
    words[2] = "quantile,sign"  # another rule, whose step has to be chosen
    assert main(words) == 0
    more = json.loads((tmp_path / "tiny" / "timing.json").read_text())["rules"]
    assert list(more) == ["quantile", "sign", "none"]
    assert more["none"] == timed["none"]
    words[2] = "none,quantile"
    assert main(words) == 0
    assert set(json.loads((tmp_path / "tiny" / "chosen.json").read_text())) == {"sign"}  # it is kept


def test_situations_that_are_not_asked_for_are_prepared_for_choosing_alone():
    full = recipes.SCALES["full"]
    assert full.limited(1, "sign,none", "normal").tuned_in == ("normal",)
    assert runs.skewed_seeds(full.limited(1, "sign,none", "normal")) == []
    assert runs.skewed_seeds(full.limited(2, "sign,none", None)) == [0, 1, recipes.TUNING_SEED]
    assert runs.skewed_seeds(full.limited(2, "none", None)) == [0, 1]
    elsewhere = replace(full, tuned_in=("skewed",)).limited(1, "sign", "normal")
    assert (elsewhere.tuned_in, runs.skewed_seeds(elsewhere)) == (("skewed",), [recipes.TUNING_SEED])


def test_the_page_takes_a_part_of_the_rules(home):
    """Also without the one that all are compared with, or without ours."""
    found = evidence.collect(home.parent)["scales"]["tiny"]
    for missing in ("none", "quantile"):
        rules = {rule: times for rule, times in found["timing"]["rules"].items() if rule != missing}
        fewer = found | {"timing": found["timing"] | {"rules": rules}}
        claimed = [row[0] for row in evidence.trained_claims("tiny", fewer, "even at 896 experts")]
        assert "less than 1% of a step's time" not in claimed
        table = page.time_table({"scales": {"tiny": fewer}}, "tiny")
        assert f"\n| {missing} " not in table
        assert "\n| sign " in table


# texts and skew


def test_a_module_is_taken_apart_line_by_line():
    source = '"""Top.\n\nMore."""\nimport os\n\n\ndef f():\n    """Adds."""\n    return "not this"\n'
    prose, code = texts.taken_apart(source)
    assert prose == "Top.\n\nMore.\n\nAdds."
    assert code == 'import os\n\n\ndef f():\n    return "not this"\n'


def test_prose_and_code_of_a_file_are_on_the_same_side(home):
    from perilune.data.corpus import text_files

    sides = {}
    for kind in ("prose", "code"):
        corpus = text_files(home / "texts" / kind)
        sides[kind] = [{document.name for document in part} for part in (corpus.train, corpus.held_out)]
    assert all(sides["prose"][1]), "something is held out"
    assert not sides["prose"][0] & sides["code"][1]
    assert not sides["code"][0] & sides["prose"][1]


def test_tilted_routers_have_the_gini_asked_for(home):
    trainer = Trainer(recipes.run(TINY, "normal", (), 0, home))
    batch = trainer.feed.next()
    found = skew.skew_routers_(trainer.model, batch, 0.7, seed=3)
    assert len(found) == 2
    assert all(value == pytest.approx(0.7, abs=0.03) for value in found.values())
    trainer.step(batch)
    for balancer in trainer.balancers.values():
        assert gini(balancer.loads) == pytest.approx(0.7, abs=0.03)


# the map


def test_the_synthetic_router_is_the_one_described():
    for amount, uneven, dead in ((0.7, 0.87, 210), (1.8, 0.97, 717)):
        scores = synthetic.Router(896, 8192, correlated=False, drift=0.0, seed=0, skew=amount).batch()
        loads = torch.bincount(scores.topk(16).indices.flatten(), minlength=896)
        assert gini(loads) == pytest.approx(uneven, abs=0.02)
        assert int((loads == 0).sum()) == pytest.approx(dead, abs=50)
    router = synthetic.Router(8, 4096, correlated=True, drift=0.0, seed=0)
    wish = (torch.logit(router.batch()) - 1.8 * router.popular) / 0.7
    assert wish.std() == pytest.approx(1, abs=0.15)
    within = wish.view(4, 1024, 8).var(1).mean()
    assert within == pytest.approx(0.5, abs=0.05)  # the other half is the documents'


def test_the_right_bias_leaves_what_chance_alone_gives():
    router = synthetic.Router(64, 4096, correlated=False, drift=0.0, seed=1)
    bias = router.ideal(4)
    loads = torch.bincount((router.batch() + bias).topk(4).indices.flatten(), minlength=64)
    assert gini(loads) < 1.8 * 0.0353  # 1 / sqrt(pi 256), and the bias' own noise


def test_a_cell_is_the_shipped_balancers_step_by_step(monkeypatch):
    cell = synthetic.Cell(16, 2, 128, True)
    monkeypatch.setattr(synthetic, "STEPS", 6)
    monkeypatch.setattr(synthetic, "SETTLED", 2)
    found = synthetic.steady(cell, 0)
    router = synthetic.Router(16, 128, True, synthetic.DRIFT, 0)
    balancer = synthetic.QuantileBalancer(16, 2)
    balancer.bias.copy_(router.ideal(2))
    history = []
    for _ in range(6):
        scores = router.batch()
        history.append(torch.bincount((scores + balancer.bias).topk(2).indices.flatten(), minlength=16))
        balancer.observe(scores, (scores + balancer.bias).topk(2).indices)
        balancer.update()
    assert found["pooled"]["step"] == pytest.approx((gini(history[4]) + gini(history[5])) / 2)
    assert found["pooled"]["window"] == pytest.approx(gini(history[4] + history[5]))


def test_the_map_is_kept_part_by_part(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(synthetic, "CELLS", synthetic.CELLS[:2])
    monkeypatch.setattr(synthetic, "MENDING", {})
    monkeypatch.setattr(synthetic, "cell_figures", lambda cell: made.append(cell.name) or {"name": cell.name})
    (tmp_path / f"{synthetic.CELLS[0].name}.json").write_text("{}")
    synthetic.measure(tmp_path, page.Console())
    assert made == [synthetic.CELLS[1].name]
    assert "1 of 2 parts are there already" in capsys.readouterr().out
    assert len(synthetic.read(tmp_path)["cells"]) == 2


# what is made of it


def test_first_counts_updates():
    assert evidence.first([0.9, 0.2, 0.05], 0.1) == 2
    assert evidence.first([0.05], 0.1) == 0
    assert evidence.first([0.9, 0.2], 0.1) is None


def test_a_worse_loss_and_dead_experts_do_not_pass_for_success():
    def one(rule, seed, bits, dead=0):
        return {
            "situation": "skewed", "rule": rule, "seed": seed, "bits_per_byte": {"prose": bits, "code": bits},
            "gini_step": [0.3, "1"], "gini_window": [0.2, "1"], "dead": [dead, "1"],
        }  # fmt: skip

    found = {"experts": 512, "timing": None, "runs": [], "window": 20, "floor": {"step": 0.03, "window": 0.01}}
    found["runs"] = [one("quantile", s, 2.0 + 0.001 * s, dead=6) for s in range(3)]
    found["runs"] += [one("sign", s, 1.9 + 0.001 * s) for s in range(3)]
    judged = {row[0]: row[3] for row in evidence.trained_claims("wide", found, "even at 896 experts")}
    assert judged["even at 512 experts"] == "does not hold"
    assert judged["fewer than 1% of experts dead"] == "does not hold"
    assert judged["a loss no worse than any other rule's"] == "does not hold"
    for run in found["runs"]:
        run.update(gini_window=[0.05, "1"], dead=[5, "1"])
    judged = {row[0]: row[3] for row in evidence.trained_claims("wide", found, "even at 896 experts")}
    assert judged["even at 512 experts"] == "holds over 20 steps, not in single ones"
    assert judged["fewer than 1% of experts dead"] == "holds"


def test_the_page_takes_tables_from_the_figures_alone(home):
    found = evidence.collect(home.parent) | {"map": None}
    text = "a\n<!-- table: scale tiny -->\nold\n<!-- end -->\nb\n<!-- table: mending -->\n<!-- end -->\n"
    filled = page.filled(text, found)
    assert "old" not in filled
    assert filled.startswith("a\n<!-- table: scale tiny -->\n![Gini")
    assert "\n16 experts, top-2, 2 MoE layers" in filled
    assert "*Not run yet.*" in filled
    assert page.filled(filled, found) == filled
    with pytest.raises(DataError, match="expected one of claims, "):
        page.filled("<!-- table: nonsense -->\n<!-- end -->", found)
    drawn = charts.figures(found)["tiny"][1]
    curve = evidence.chosen_runs(found["scales"]["tiny"], "shift", "sign")[0]["curve"]
    shown = [trace["y"] for trace in drawn["data"] if trace["name"] == "sign"]
    assert shown[1] == pytest.approx(curve)  # panels go as situations do: skewed, shift


def test_the_published_page_says_what_the_figures_file_says():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, json.loads(page.RESULTS.read_text())) == text
    for name in charts.figures(json.loads(page.RESULTS.read_text())):
        assert (publish.IMAGES / f"balancing-{name}.png").exists()
        assert f"images/balancing-{name}.png" in text

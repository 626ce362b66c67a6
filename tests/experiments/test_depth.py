"""The evidence about attention residuals: its parts at a size of seconds, and the page shows what the file says."""

import json
import math
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments import publish
from experiments.depth import charts, evidence, measures, page, recipes, runs, texts, timing, train
from experiments.depth.__main__ import main
from experiments.depth.bypass import add_bypasses
from experiments.depth.compute import compute, fitted, spent
from experiments.depth.graph import Graph
from experiments.panels import log_axis
from perilune.core.errors import BackendError, ConfigError, DataError
from perilune.models.k3 import K3Model
from perilune.models.k3.flops import mixer_sources
from perilune.nn import DepthStream

TINY = recipes.SCALES["tiny"]
STACK = TINY.stacks[0]
HERE = train.Place(torch.device("cpu"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scale, trained in this process: what `runs` does in others."""
    home = tmp_path_factory.mktemp("depth") / "tiny"
    texts.prepare(TINY, home)
    wanted = {STACK.name: list(STACK.variants)}
    work = runs.Work("tiny", home, HERE, "auto", math.inf, torch.get_num_threads())
    runs.begin(work)
    runs.rows_of.cache_clear()
    for name in STACK.variants:
        runs.measure_cost(STACK.name, name)
    for case in runs.tuning_cases(TINY, wanted):
        assert runs.run_case(case, 0.0) is not None
    chosen = runs.choose(TINY, home)
    (home / "chosen.json").write_text(json.dumps(chosen))
    for case in runs.main_cases(TINY, wanted, chosen):
        assert runs.run_case(case, 0.0) is not None
    return home


@pytest.fixture
def rows(home) -> texts.Rows:
    return texts.load(home, STACK.context, TINY.judged_tokens, HERE.device)


def net_of(name: str, seed: int = 0) -> train.Net:
    return train.Net(STACK, STACK.variants[name], seed, HERE)


# compute


@pytest.mark.parametrize("scale", ["tiny", "small", "full"])
def test_all_variants_spend_the_same_within_a_percent(scale):
    for stack in recipes.SCALES[scale].stacks:
        plain = compute(stack.config(), stack.context).total
        for variant in stack.variants.values():
            config = fitted(stack, variant)
            assert abs(spent(stack, variant, config) / plain - 1) <= 0.01, (stack.name, variant.name)
            assert config.attn_res_block_size == variant.block
            assert config.intermediate_size % stack.grain == 0


def test_the_full_scale_is_deep_and_has_the_small_preset():
    deep, preset = recipes.SCALES["full"].stacks
    assert 2 * deep.config().num_hidden_layers >= 100
    small = recipes.presets.small()
    assert preset.config() == small.replace(attn_res_block_size=None, vocab_size=4096)
    assert preset.block == small.attn_res_block_size


@pytest.mark.parametrize("block", [1, 2, 3, 4, 9, "full"])
def test_sources_are_those_that_the_stream_gives(block):
    config = STACK.config().replace(attn_res_block_size=block)
    stream, counts = DepthStream(torch.zeros(1), config.residual_period), []
    for _ in range(2 * config.num_hidden_layers):
        counts.append(len(stream.bank) + 1)
        stream.read(None)
        stream.add(torch.zeros(1))
    assert mixer_sources(config) == [*counts, len(stream.bank) + 1]


def test_matrices_and_attention_are_what_torch_counts():
    config, T = STACK.config(), 16
    model = K3Model(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(3, T, dtype=torch.long))
    counted = compute(config, T)
    attention = counted.attention * 2 * T / (T + 1)  # torch counts the pairs that causality leaves out as well
    assert counter.get_total_flops() == pytest.approx(3 * T * (counted.matrices + attention))


def test_no_width_left_is_refused():
    wide = replace(STACK, config=lambda: recipes.deep(16, 16, 2, 2, 300))
    with pytest.raises(ConfigError, match="got none left"):
        fitted(wide, wide.variants["full"])


# the bypass


def test_a_bypass_is_the_plain_residual_at_first_and_adds_low_rank_attention_then():
    torch.manual_seed(0)
    config = STACK.config()
    plain, other = K3Model(config), K3Model(config)
    other.load_state_dict(plain.state_dict())
    made = add_bypasses(other, [(0, 2), (1, 3)], rank=2)
    ids = torch.randint(0, 300, (2, 8))
    torch.testing.assert_close(other(ids).logits, plain(ids).logits, rtol=0, atol=0)
    torch.nn.init.normal_(made[0].up.weight)
    seen: dict[str, torch.Tensor] = {}
    layers = other.model.layers
    layers[0].self_attn.register_forward_hook(lambda m, a, out: seen.__setitem__("shallow", out))
    layers[1].register_forward_hook(lambda m, a, out: seen.__setitem__("below", a[0].live))
    layers[2].input_layernorm.register_forward_pre_hook(lambda m, a: seen.__setitem__("read", a[0]))
    other(ids)
    added = seen["shallow"] @ made[0].down.weight.T @ made[0].up.weight.T
    torch.testing.assert_close(seen["read"], seen["below"] + added)
    assert added.abs().max() > 0


def test_bypasses_learn(rows):
    net = net_of("bypass")
    training = train.Training(net, STACK, rows, 1e-2, 0, 3)
    before = [p.clone() for p in net.bypasses.parameters()]
    for _ in range(3):
        training.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, net.bypasses.parameters()))


# training


def test_every_variant_is_trained_on_every_seed_and_learns(home):
    found = evidence.collect(home.parent)["scales"]["tiny"]["stacks"]["deep"]
    assert list(found["variants"]) == list(STACK.variants)
    for variant in found["variants"].values():
        assert variant["seeds"] == [0, 1]
        for losses in variant["loss"]:
            assert losses[-1] < losses[0]


def test_all_variants_of_a_seed_read_the_same_rows_and_seeds_differ(rows):
    read = {}
    for name in ("plain", "full"):
        training = train.Training(net_of(name), STACK, rows, 1e-2, 0, 3)
        read[name] = [training.batch(step)[0] for step in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(read["plain"], read["full"]))
    assert not torch.equal(rows.order(0, 0, 4), rows.order(1, 0, 4))
    N = len(rows.train)
    whole = torch.cat([rows.order(0, step, 4) for step in range(-(-N // 4))])[:N]
    assert sorted(whole.tolist()) == list(range(N))  # everything once before anything twice


def test_the_rate_is_the_best_on_a_seed_that_is_not_reported(home):
    chosen = json.loads((home / "chosen.json").read_text())["deep"]
    assert set(chosen) == set(recipes.MAIN)
    for name, entry in chosen.items():
        best = min(entry["tried"], key=entry["tried"].get)
        assert entry["chosen"] == float(best)
        run = json.loads((home / "deep" / f"{name}-seed0.json").read_text())
        assert run["rate"] == entry["chosen"]
        assert run["seed"] != recipes.TUNING_SEED
    run = json.loads((home / "deep" / "block-1-seed0.json").read_text())
    assert run["rate"] == chosen["block"]["chosen"]


def test_a_diverged_run_is_told_as_such(rows):
    found = train.train(TINY, STACK, STACK.variants["plain"], 1e4, 0, 24, rows=rows, place=HERE)
    assert found["bits_per_byte"] is None
    assert found["after"] is None
    assert len(found["loss"]) < 24


def test_time_is_kept_and_the_rest_is_done_later(home, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "LOOK_EVERY", 2)
    with pytest.raises(train.OutOfTime, match="out of time at step 2 of 6"):
        train.train(TINY, STACK, STACK.variants["plain"], 1e-2, 0, 6, rows=rows, place=HERE, deadline=time.time() - 1)
    case = runs.Case("deep", "plain", 1e-2, 0)
    monkeypatch.setitem(runs.WORK[0].__dict__, "deadline", time.time() + 5)
    assert runs.run_case(case, 10.0) is None  # it would not be done in time
    assert runs.finished(runs.Case("deep", "plain", 0.5, 0), home) is False  # another rate was chosen since


class Standing:
    """A pool whose workers never come to an end."""

    def submit(self, function, *args):
        return Future()


def test_a_worker_that_stands_still_holds_up_nothing_for_ever(home, monkeypatch, capsys):
    monkeypatch.setattr(runs, "GRACE", 0.0)
    monkeypatch.setattr(runs, "COMPILING", 0.1)
    work = replace(runs.WORK[0], deadline=time.time() + 0.2, home=home / "nowhere")
    case = runs.Case("deep", "plain", 1e-2, 0)
    assert runs.work_through(TINY, [case], work, {}, Standing(), "runs", Console()) is False
    wanted = {"deep": ["plain"]}
    runs.compile_all(wanted, work, Standing(), Console())
    assert wanted == {"deep": []}
    assert "deep: left out, for its kernels did not compile in time" in capsys.readouterr().out
    monkeypatch.setattr(runs, "TIMING", 0.1)
    cases = [("deep", name) for name in ("plain", "full", "block")]
    late, early = work, replace(work, deadline=math.inf)
    time.sleep(max(0.0, late.deadline - time.time()))
    assert runs.measure_some(cases, early, Standing(), Console()) == cases[1:]  # for another process
    assert "deep, plain: not timed, for that did not end" in capsys.readouterr().out
    assert runs.measure_some(cases, late, Standing(), Console()) == []
    assert "not timed" not in capsys.readouterr().out


def test_bits_are_those_of_the_held_out_rows(rows):
    net = net_of("block")
    with torch.no_grad():
        net.eval()
        nats = float(net.loss(rows.held_out[:, :-1], rows.held_out[:, 1:]))
    assert train.bits_per_byte(net, rows, 3) == pytest.approx(nats / math.log(2) * rows.tokens_a_byte, rel=1e-5)


def test_one_command_does_a_part_once_and_ends_in_time(tmp_path, capsys):
    words = ["tiny", "--device", "cpu", "--variants", "plain", "--seeds", "1", "--out", str(tmp_path), "--jobs", "1"]
    assert main([*words, "--minutes", "0"]) == 0
    assert "not all done; the same command does the rest" in capsys.readouterr().out
    assert main(words) == 0
    assert "tiny: all done" in capsys.readouterr().out
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-seed*.json")}
    assert len(made) == 3  # two rates, one run
    assert main(words) == 0
    assert "1 of 1 runs are finished already" in capsys.readouterr().out
    assert made == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-seed*.json")}


def test_a_variant_that_is_not_there_is_named(capsys):
    assert main(["tiny", "--variants", "blok", "--out", "nowhere"]) == 2
    assert "--variants: tiny has none called 'blok'; do you mean 'block'?" in capsys.readouterr().err


# what is measured


@pytest.mark.parametrize("name", ["plain", "full", "block", "bypass"])
def test_figures_by_depth_are_of_the_pass_itself(rows, name):
    net = net_of(name)
    seen = rows.held_out[:2]
    found = measures.by_depth(net, seen)
    sublayers = 2 * net.model.config.num_hidden_layers
    reads, adds = [], []
    for layer in measures.layers_of(net):
        for norm, body in zip((layer.input_layernorm, layer.post_attention_layernorm), measures.bodies(layer)):
            norm.register_forward_pre_hook(lambda m, a: reads.append(a[0].detach()))
            body.register_forward_hook(lambda m, a, out: adds.append(out.detach()))
    loss = net.loss(seen[:, :-1], seen[:, 1:])
    loss.backward()
    assert found["input_rms"] == pytest.approx([float(x.square().mean().sqrt()) for x in reads], rel=1e-3)
    assert found["output_rms"] == pytest.approx([float(x.square().mean().sqrt()) for x in adds], rel=1e-3)
    assert len(found["gradient"]) == sublayers
    attention = measures.layers_of(net)[1].self_attn
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in attention.parameters()))
    assert found["gradient"][2] == pytest.approx(norm, rel=1e-3)
    assert [len(row) for row in found["attention"]] == mixer_sources(net.model.config)
    for row in found["attention"]:
        assert sum(row) == pytest.approx(1, abs=2e-3)
    a, b = adds[0] + adds[1], adds[2] + adds[3]
    assert found["likeness"][0][1] == pytest.approx(
        float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean()), abs=1e-3
    )
    assert found["likeness"][1][1] == pytest.approx(1, abs=1e-3)


def test_looking_leaves_the_net_as_it_was(rows):
    net = net_of("full")
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    measures.by_depth(net, rows.held_out[:2])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert all(module.training for module in net.modules())


def test_the_plain_stream_grows_with_depth_and_a_mean_of_sources_does_not(home):
    found = evidence.collect(home.parent)["scales"]["tiny"]["stacks"]["deep"]["variants"]
    assert evidence.growth(found["plain"]["after"]["input_rms"]) > 1.01
    assert evidence.growth(found["full"]["after"]["input_rms"]) < 0.5


def test_cost_counts_what_autograd_keeps(rows):
    net = net_of("plain")
    ids, targets = rows.train[:4, :-1].clone(), rows.train[:4, 1:].clone()
    kept, _ = timing.kept_bytes(net, ids, targets)
    twice, _ = timing.kept_bytes(net, ids.repeat(2, 1), targets.repeat(2, 1))
    assert twice == pytest.approx(2 * kept, abs=16)
    more, _ = timing.kept_bytes(net_of("full"), ids, targets)
    assert more != kept


def test_the_backend_asked_for_computes(rows, monkeypatch):
    import perilune.nn.attn_res

    monkeypatch.setattr(perilune.nn.attn_res, "attn_res", perilune.nn.attn_res.attn_res)
    net, losses = net_of("full"), {}
    for name in ("auto", "reference", "chunked"):
        train.use_backend(name)
        losses[name] = float(net.loss(rows.train[:2, :-1], rows.train[:2, 1:]).detach())
    assert losses["auto"] == losses["chunked"] == pytest.approx(losses["reference"], rel=1e-6)
    train.use_backend("triton")
    with pytest.raises(BackendError, match="attn_res cannot run on 'triton'"):
        net.loss(rows.train[:2, :-1], rows.train[:2, 1:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "full", "block", "bypass"])
def test_a_recorded_step_has_the_gradients_of_an_eager_one(rows, name):
    place = train.Place(torch.device("cuda"), bf16=False)
    net = train.Net(STACK, STACK.variants[name], 0, place)
    first, second = (rows.train[i : i + 4].cuda() for i in (0, 4))
    graph = Graph(net, net.loss, first[:, :-1].contiguous(), first[:, 1:].contiguous())
    loss = float(graph(second[:, :-1].contiguous(), second[:, 1:].contiguous()))
    got = {key: p.grad.clone() for key, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    expected = net.loss(second[:, :-1], second[:, 1:])
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for key, p in net.named_parameters():
        torch.testing.assert_close(got[key], p.grad, rtol=1e-3, atol=1e-6)


# what is made of it


def test_verdicts_need_more_than_the_seeds_spread():
    assert evidence.verdict([-0.010, -0.012, -0.011]) == "better"
    assert evidence.verdict([0.010, 0.012, 0.011]) == "worse"
    assert evidence.verdict([-0.010, 0.012, -0.011]) == "not told apart"
    assert evidence.verdict([-0.5]) == "one seed: open"
    assert evidence.interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))


def test_differences_are_taken_seed_by_seed():
    stack = {"variants": {
        "plain": {"seeds": [0, 1, 2], "bits_per_byte": [3.0, 4.0, 5.0]},
        "full": {"seeds": [0, 2, 1], "bits_per_byte": [2.9, None, 3.8]},
    }}  # fmt: skip
    assert evidence.differences(stack, "full") == pytest.approx([-0.1, -0.2])
    assert evidence.differences(stack, "block") is None


def test_the_page_takes_tables_from_the_figures_alone(home):
    found = evidence.collect(home.parent)
    kinds = "\n".join(f"<!-- table: {kind} tiny deep -->\nSTALE\n<!-- end -->" for kind in page.TABLES)
    kinds += "\n<!-- table: scale full deep -->\n<!-- end -->"
    filled = page.filled(kinds, found)
    assert "STALE" not in filled
    assert "4 layers (8 sublayers), 16 wide, dense" in filled
    assert "*Not run yet.*" in filled
    assert page.filled(filled, found) == filled
    bits = found["scales"]["tiny"]["stacks"]["deep"]["variants"]["full"]["bits_per_byte"]
    assert f"{sum(bits) / 2:.4f} ± " in filled
    with pytest.raises(DataError, match="expected one of claims, "):
        page.filled("<!-- table: nonsense -->\n<!-- end -->", found)


def test_pictures_show_the_figures(home):
    found = evidence.collect(home.parent)
    drawn = charts.figures(found)
    assert set(drawn) == {f"tiny-deep-{key}" for key in charts.FIGURES}
    stack = found["scales"]["tiny"]["stacks"]["deep"]
    curves = [t for t in drawn["tiny-deep-profiles"][1]["data"] if t.get("name") == "plain residual"]
    assert curves[1]["y"] == pytest.approx(stack["variants"]["plain"]["after"]["input_rms"])
    maps = drawn["tiny-deep-attention"][1]["data"]
    first = [value for value in maps[0]["z"][4] if value is not None]
    assert sum(first) == pytest.approx(len(first), rel=1e-2)  # times their number, so 1 is the mean
    said = [note["text"] for note in drawn["tiny-deep-likeness"][1]["layout"]["annotations"]]
    for name in recipes.MAIN:  # the mean over pairs that the table has
        pairs = stack["variants"][name]["after"]["pairs"]
        assert f"{charts.NAMED[name]}: {pairs:.3f} between two" in said
    means = drawn["tiny-deep-sizes"][1]["data"][0]
    assert means["x"] == ["every sublayer", "1", "2"]


def test_likeness_is_told_as_the_table_has_it_also_where_layers_differ_in_sign():
    """And where a map shows some of many layers."""
    after = {"likeness": [[1.0, -0.4], [-0.4, 1.0]], "likeness_layers": [0, 49], "pairs": -0.1}
    found = charts.likeness({"variants": {"plain": {"after": after}}})
    assert found["layout"]["annotations"][0]["text"] == "plain residual: -0.100 between two"


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.033, 0.87), [0.05, 0.1, 0.2, 0.5]),
        ((0.0023, 0.0045), [0.003, 0.004, 0.005]),
        ((1e-6, 0.3, 0.0), [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]),
        ((1.0,), [0.9, 1.0]),
        ((0.0,), None),
    ],
)
def test_a_log_axis_has_plain_numbers_and_never_one_alone(values, ticks):
    found = log_axis(values)
    assert found.get("tickvals") == (None if ticks is None else pytest.approx(ticks))
    if ticks is not None:
        low, high = found["range"]
        assert all(low < math.log10(value) < high for value in values if value)
        assert [float(text) for text in found["ticktext"]] == pytest.approx(ticks)


@pytest.mark.parametrize(
    "value",
    [
        {}, [], [[]], {"a": []}, None, "x" * 300, ["x" * 300], ["x" * 300, 1, "y" * 300, 2], {"x" * 300: {"a": "\n"}},
        {"a": [1, 2.5, -3e-05, None], "b": [["x", True]], "c": [{"d": [0.125] * 100}]},
        [{"a": i, "b": [[i, j] for j in range(i)]} for i in range(30)],
    ],
)  # fmt: skip
def test_evidence_is_written_whole(tmp_path, value):
    publish.write_evidence(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert json.dumps(json.loads(text)) == json.dumps(value)
    assert text.endswith("\n")
    assert all(line and line == line.rstrip() for line in text.splitlines())


def test_a_line_has_as_much_as_fits():
    numbers, answer = [0.5] * 100, {"task": "chains", "asked": 1, "hops": [[1, 2], [3, 4]]}
    assert publish.dense({"a": answer}) == '{"a": {"task": "chains", "asked": 1, "hops": [[1, 2], [3, 4]]}}'
    lines = publish.dense({"cells": [answer] * 9, "numbers": numbers}).splitlines()
    assert lines[0] == "{"
    assert lines[1] == ' "cells": ['
    assert [line.count("task") for line in lines[2:5]] == [4, 4, 1]
    assert lines[6] == ' "numbers": ['
    assert [line.count("0.5") for line in lines[7:10]] == [47, 47, 6]
    assert lines[10:] == [" ]", "}"]
    assert max(map(len, lines)) <= publish.WIDTH


def test_the_published_page_says_what_the_figures_file_says():
    text = page.PAGE.read_text(encoding="utf-8")
    found = json.loads(page.RESULTS.read_text())
    assert page.filled(text, found) == text
    for name in charts.figures(found):
        assert (publish.IMAGES / f"depth-{name}.png").exists()
        assert f"images/depth-{name}.png" in text

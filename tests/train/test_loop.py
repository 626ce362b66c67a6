import json
import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.models.k3.config import BalanceConfig
from perilune.nn.load import gini
from perilune.train import loop
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import OptimizerConfig, Stage
from perilune.train.loop import Diverged, Trainer
from perilune.train.metrics import Metrics
from tiny_run import STAGES, corpus, run
from tiny_run import trainer as tiny

ONE_STAGE = (Stage(name="only", context=32, batch_tokens=96, tokens=4000, lr=2e-2, lr_end=1e-3, warmup=0.1),)


@pytest.fixture
def train(tmp_path):
    """Trains to the end; gives the trainer and the lines of metrics.jsonl."""

    def to_the_end(made, watch=lambda progress: None):
        trainer = tiny(made)
        path = tmp_path / "metrics.jsonl"
        path.unlink(missing_ok=True)
        with Metrics(path) as metrics:
            trainer.train(metrics, watch)
        return trainer, [json.loads(line) for line in path.read_text().splitlines()]

    return to_the_end


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(a, b):
    return all(torch.equal(x.nan_to_num(7.0), b[name].nan_to_num(7.0)) for name, x in a.items())


def batches(trainer, n):
    return [trainer.feed.next() for _ in range(n)]


# the same run twice, and what it learns


def test_a_seed_decides_every_bit(train):
    (first, lines), (second, lines_again), (other, lines_other) = (train(run(seed=s)) for s in (3, 3, 4))
    assert [line["losses"] for line in lines] == [line["losses"] for line in lines_again]
    assert same(weights(first), weights(second))
    assert [line["losses"] for line in lines] != [line["losses"] for line in lines_other]
    assert not same(weights(first), weights(other))
    fresh = [tiny(run(seed=s)).feed.next().input_ids for s in (3, 3, 4)]
    assert torch.equal(fresh[0], fresh[1])
    assert not torch.equal(fresh[0], fresh[2])  # other weights, and other text first


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_begun_before_the_line_of_the_last_one_changes_no_line(ahead, tmp_path, monkeypatch):
    """The order of steps and lines; lines, weights and checkpoints are the same either way."""
    made, found = run(checkpoint_every=7), []
    for tells_later in (False, ahead):
        trainer, order, folder = tiny(made), [], tmp_path / str(len(found))
        trainer.ahead = tells_later
        plain = trainer.step
        monkeypatch.setattr(
            trainer, "step", lambda batch, plain=plain, order=order: (order.append("s"), plain(batch))[1]
        )
        with Metrics(tmp_path / f"{len(found)}.jsonl") as metrics:
            watch = lambda progress, order=order: order.append(progress.step)  # noqa: E731
            trainer.train(metrics, watch, checkpoints=Checkpoints(folder))
        lines = [json.loads(line) for line in (tmp_path / f"{len(found)}.jsonl").read_text().splitlines()]
        found.append(([{**line, "seconds": None} for line in lines], weights(trainer), trainer.expert_load()))
        assert (order[:4] == ["s", "s", 1, "s"]) == tells_later
        assert [step for step in order if step != "s"] == list(range(1, 17))
    (lines, state, load), (lines_ahead, state_ahead, load_ahead) = found
    assert lines == lines_ahead
    assert same(state, state_ahead)
    assert load == load_ahead
    resumed = tiny(made, checkpoint=Checkpoints(folder).latest())
    assert (resumed.steps_done, resumed.expert_load()) == (16, load)


def test_the_line_before_a_step_that_diverged_is_not_lost(tmp_path):
    trainer = tiny(run())
    trainer.ahead = True
    plain = trainer.step

    def step(batch):
        if trainer.steps_done == 2:
            poison(trainer, "gradient")
        return plain(batch)

    trainer.step = step
    with Metrics(tmp_path / "metrics.jsonl") as metrics, pytest.raises(Diverged, match="at step 3"):
        trainer.train(metrics)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at all inputs
def test_compiled_norms_are_the_norms(tmp_path):
    """Two steps, within rounding; what is saved has the same names."""
    plain, compiled = tiny(run()), tiny(run(compile_norms=True))
    ran = [0]
    compiled.model.model.norm.register_forward_hook(lambda *_: ran.__setitem__(0, ran[0] + 1))
    for batch in batches(plain, 2):
        one, other = plain.step(batch), compiled.step(batch)
        assert other.losses == pytest.approx(one.losses, rel=1e-4)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
    assert ran == [2]
    assert compiled.model.model.norm._compiled_call_impl is not None
    assert plain.model.model.norm._compiled_call_impl is None
    assert weights(plain).keys() == weights(compiled).keys()


@pytest.mark.parametrize("recompute", ["none", "sublayers"])
def test_a_step_casts_its_weights_once(recompute, monkeypatch):
    """However many parts it is in; to the bit as cast by every layer."""

    class Casts(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numbers = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._foreach_copy_.default:
                self.numbers.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    def two_steps():
        stage = run().stages[0].replace(micro_tokens=32, recompute=recompute)
        made = tiny(run(stages=(stage,), precision="bfloat16"))
        losses = [made.step(made.feed.next()).losses for _ in range(2)]
        made.model.train()
        batch = made.feed.next()
        with Casts() as casts:
            made._accumulate(made._parts(batch), made._whole_step(batch, made._parts(batch)))
        return losses, list(made.model.state_dict().values()), casts.numbers

    losses, after, once = two_steps()
    monkeypatch.setattr(loop, "cast_once", lambda *_: nullcontext())
    others, others_after, each = two_steps()
    assert losses == others
    assert all(map(torch.equal, after, others_after))
    assert len(once) == 1
    assert len(each) > 30


def test_bfloat16_computes_narrow_and_learns_as_float32_does(train):
    """Products in bfloat16, seen from inside; weights and state stay as they are; losses are near."""
    seen, lines = set(), {}
    for precision in ("float32", "bfloat16"):
        made = run(precision=precision)
        trainer = tiny(made)
        handle = trainer.model.model.layers[0].self_attn.q_proj.register_forward_hook(
            lambda module, args, out: seen.add(out.dtype)
        )
        trainer.step(trainer.feed.next())
        handle.remove()
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        assert {t.dtype for state in trainer.optimizer.state.values() for t in state.values()} == {torch.float32}
        lines[precision] = train(made)[1]
    assert seen == {torch.float32, torch.bfloat16}
    first, last = ([lines[p][i]["losses"]["next_token"] for p in lines] for i in (0, -1))
    assert first[1] == pytest.approx(first[0], rel=1e-3)
    assert last[1] == pytest.approx(last[0], rel=0.05)
    assert last[1] < first[1] - 0.5


def test_losses_fall_on_text_that_repeats_itself(train):
    _, lines = train(run(stages=ONE_STAGE))
    losses = [line["losses"]["next_token"] for line in lines]
    assert losses[0] == pytest.approx(math.log(300), rel=0.05)  # nothing known at first
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


def test_every_step_leaves_a_line_and_is_told(train):
    told = []
    trainer, lines = train(run(), told.append)
    assert trainer.steps == trainer.steps_done == len(lines) == len(told) == 16
    assert [line["step"] for line in lines] == [p.step for p in told] == list(range(1, 17))
    assert [line["tokens"] for line in lines] == [p.tokens for p in told] == [96 * n for n in range(1, 17)]
    assert [line["stage"] for line in lines] == ["short"] * 10 + ["long"] * 6
    assert [(p.stage.name, p.stage_number, p.stages) for p in told] == [("short", 1, 2)] * 10 + [("long", 2, 2)] * 6
    for line, progress in zip(lines, told):
        assert set(line) == {
            "step", "stage", "tokens", "lr", "seconds", "losses", "grad_norm", "gini", "max_violation", "dead",
            "worst_dead", "worst_layer", "bias_drift",
        }  # fmt: skip
        assert line["losses"] == progress.losses  # to the last bit
        assert (line["lr"], line["grad_norm"]) == (progress.lr, progress.grad_norm)
        assert 0 <= line["gini"] < 1
        assert line["max_violation"] > 0
        assert line["bias_drift"] > 0
        assert line["worst_layer"] in trainer.balancers
        assert progress.seconds > 0
    load = trainer.expert_load()
    assert (lines[-1]["gini"], lines[-1]["max_violation"]) == (load["gini"], load["max_violation"])


def test_losses_and_gradients_norm_are_those_of_the_step():
    trainer, other = tiny(run()), tiny(run())
    batch = trainer.feed.next()
    output = other.model.train()(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels)
    output.loss.backward()
    squares = sum(p.grad.double().square().sum() for p in other.model.parameters() if p.grad is not None)
    update = trainer.step(batch)
    assert update.losses == {name: loss.item() for name, loss in output.losses.items()}
    assert update.grad_norm == pytest.approx(squares.sqrt().item(), rel=1e-5)


def test_dead_experts_are_a_share_of_all(train, monkeypatch):
    monkeypatch.setattr(loop, "dead_experts", lambda loads: 2)
    _, lines = train(run(model={"num_nextn_predict_layers": 1}, stages=(STAGES[0].replace(tokens=96),)))
    assert lines[0]["dead"] == 4 / 16  # of two layers with 8 experts each


def test_the_end_of_a_stage_is_told_once_and_before_its_checkpoint(tmp_path):
    events = []

    class Noting(Checkpoints):
        def save(self, step, write):
            events.append(f"saved {step}")

    made = run(checkpoint_every=5)
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        tiny(made).train(
            metrics,
            at_stage_end=lambda stage: events.append(f"{stage.name} ended"),
            checkpoints=Noting(tmp_path),
        )
    assert events == ["saved 5", "short ended", "saved 10", "saved 15", "long ended", "saved 16"]


def test_a_run_that_is_asked_to_stop_saves_first(tmp_path):
    made = run(checkpoint_every=100)
    trainer = tiny(made)
    checkpoints = Checkpoints(tmp_path)
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        trainer.train(metrics, checkpoints=checkpoints, stop=lambda: trainer.steps_done == 4)
    assert trainer.steps_done == 4
    assert checkpoints.latest().name == "step-00000004"
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        trainer.train(metrics)
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 17))


# stages and rates


def test_a_stage_of_longer_context_packs_longer_pieces(train, monkeypatch):
    seen = []
    plain = Trainer.step

    def spy(self, batch):
        seen.append(batch)
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "step", spy)
    stages = STAGES[0], STAGES[1].replace(batch_tokens=144, tokens=720)
    train(run(stages=stages))
    longest = [max(b - a for a, b in pairwise(batch.cu_seqlens.tolist())) for batch in seen]
    assert longest[:10] == [16] * 10
    assert max(longest[10:]) == 48
    assert min(longest[10:]) > 16
    assert [batch.input_ids.shape[1] for batch in seen] == [96] * 10 + [144] * 5


def test_the_rate_follows_the_schedule_and_the_first_step_moves(train):
    made = run(optimizer=OptimizerConfig(adamw_lr=5e-3))
    fresh = tiny(made)
    before = weights(fresh)
    fresh.step(fresh.feed.next())
    assert fresh.optimizer.param_groups[0]["lr"] == 1e-2  # half of a warm-up of two steps
    moved = [n for n, p in fresh.model.named_parameters() if not torch.equal(p, before[n])]
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.kv_b_proj.weight"} <= set(moved)
    trainer, lines = train(made)
    rates = [line["lr"] for line in lines]
    assert rates == [made.schedule.lr(line["tokens"]) for line in lines]
    assert rates[1] == max(rates) == 2e-2
    assert rates[9] == 4e-3  # where the first stage ends, the second goes on
    assert rates[15] == 1e-3
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {1e-3}


def test_stages_keep_their_rates_where_batches_are_short():
    """Samples of tasks are never cut: with nothing beside them a batch holds 256 of the 400 tokens."""
    needles = Stage(
        name="first", context=256, batch_tokens=400, tokens=1600, lr=1e-3, lr_end=1e-4, warmup=0.5, mix={"needle": 1}
    )
    trainer, rates, tokens = tiny(run(stages=(needles, needles.replace(name="second")))), [], []
    while trainer.steps_done < trainer.steps:
        progress = trainer._advance()()
        rates.append(progress.lr)
        tokens.append(progress.tokens)
    assert tokens == [256 * (i + 1) for i in range(8)]
    assert rates[:4] == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])
    assert rates[4:] == pytest.approx([5.5e-4, 1e-3, 5.5e-4, 1e-4])


# a step that went wrong


def poison(trainer, where):
    """Makes the next step's loss or gradient NaN; gives what undoes it."""
    if where == "gradient":
        handle = trainer.model.lm_head.weight.register_hook(lambda grad: grad * torch.nan)
        return handle.remove
    parameter = trainer.model.get_parameter(where)
    clean = parameter.detach().clone()
    with torch.no_grad():
        parameter[0] = torch.nan
    return lambda: parameter.data.copy_(clean)


@pytest.mark.parametrize(
    "where",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.block_sparse_moe.gate.weight",  # an expert that nobody chooses: the loss is a number
        "gradient",
    ],
)
@pytest.mark.parametrize("kind", ["quantile", "sign"])
def test_a_step_without_a_number_changes_nothing(where, kind):
    options = OptimizerConfig(qk_clip=1e-2, qk_clip_every=1)
    made = run(model={"balance": BalanceConfig(kind=kind)}, optimizer=options)
    trainer, other = tiny(made), tiny(made)
    one, bad, two = batches(trainer, 3)
    for t in (trainer, other):
        t.step(one)
    undo = poison(trainer, where)
    before, state = weights(trainer), trainer.optimizer.state_dict()["state"]
    momenta = {key: {k: v.clone() for k, v in value.items()} for key, value in state.items()}
    what = "gradient norm" if "gate" in where or where == "gradient" else "loss"
    with pytest.raises(Diverged) as error:
        trainer.step(bad)
    place = "step 2 (stage short, tokens 96 to 192)"
    assert str(error.value) == f"{what}: expected a number, got nan at {place}; lower the learning rate"
    assert same(before, weights(trainer))
    for key, values in trainer.optimizer.state_dict()["state"].items():
        assert same(values, momenta[key])
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(not statistic.any() for b in trainer.balancers.values() for statistic in b.statistics())
    assert all(a.max_logits is None for a in trainer.attentions.values())
    assert (trainer.steps_done, trainer.tokens_done) == (1, 96)
    undo()  # and the run goes on as if the step had not been
    assert trainer.step(two) == other.step(two)
    assert same(weights(trainer), weights(other))


def test_adamw_has_a_rate_of_its_own():
    """A model of AdamW's parameters moves by its peak, which at the first step is all that Adam's update has."""
    moves = []
    for rate in (None, 5e-3):
        trainer = tiny(run(optimizer=OptimizerConfig(adamw_lr=rate, weight_decay=0.0, qk_clip=None)))
        before = weights(trainer)
        trainer.step(trainer.feed.next())
        after = weights(trainer)
        moves.append({name: float((after[name] - before[name]).abs().max()) for name in after})
    adamw, muon = "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"
    assert moves[0][adamw] == pytest.approx(1e-2, rel=1e-3)
    assert moves[1][adamw] == pytest.approx(2.5e-3, rel=1e-3)
    assert moves[0][muon] == moves[1][muon] > 0


# what is done beside the optimizer


def test_logits_above_the_threshold_are_clipped(monkeypatch):
    calls = []

    def spy(q_weight, kv_b_weight, max_logits, **options):
        before = q_weight.clone()
        gamma = plain(q_weight, kv_b_weight, max_logits, **options)
        calls.append((before, q_weight.clone(), max_logits.clone(), gamma, options))
        return gamma

    plain = loop.qk_clip_
    monkeypatch.setattr(loop, "qk_clip_", spy)
    trainer = tiny(run(optimizer=OptimizerConfig(qk_clip=1e-2, qk_clip_every=2)))
    counts = []
    for batch in batches(trainer, 5):
        trainer.step(batch)
        counts.append(len(calls))
        assert all(a.max_logits is None for a in trainer.attentions.values())
    assert counts == [1, 1, 2, 2, 3]  # one latent attention; every second step, the first included
    before, after, max_logits, gamma, options = calls[-1]
    assert options == {"threshold": 1e-2, "nope": 8, "rope": 4, "v": 6}
    assert (max_logits > 1e-2).all()
    torch.testing.assert_close(gamma, 1e-2 / max_logits)
    ratio = (after / before).view(2, 12, -1)  # [H, nope + rope, r]
    torch.testing.assert_close(ratio[:, :8], gamma.sqrt()[:, None, None].expand(2, 8, 12))
    torch.testing.assert_close(ratio[:, 8:], gamma[:, None, None].expand(2, 4, 12))


def test_the_clipped_step_is_the_plain_one_below_the_threshold():
    results = []
    for clip in (None, 1e9):
        trainer = tiny(run(optimizer=OptimizerConfig(qk_clip=clip, qk_clip_every=1)))
        for batch in batches(trainer, 3):
            trainer.step(batch)
        results.append(weights(trainer))
    assert same(*results)


def test_balancers_move_once_a_step(monkeypatch):
    trainer = tiny(run())
    (balancer,) = trainer.balancers.values()
    updates = []
    plain = balancer.update
    monkeypatch.setattr(balancer, "update", lambda: (updates.append(trainer.steps_done), plain()))
    for n, batch in enumerate(batches(trainer, 3), 1):
        bias = balancer.bias.clone()
        trainer.step(batch)
        assert len(updates) == n
        assert balancer.loads.sum() == 96 * 2  # every token's two experts
        assert not torch.equal(balancer.bias, bias)
        assert not balancer.counts.any()


class Twin:
    """A pool with another rank that saw the same tokens."""

    def __init__(self, trainer):
        self.trainer, self.steps = trainer, []

    def sum_(self):
        self.steps.append(self.trainer.steps_done)
        for balancer in self.trainer.balancers.values():
            for statistic in balancer.statistics():
                statistic.mul_(2)


def test_ranks_pool_what_they_saw_once_a_step():
    trainer, alone = tiny(run()), tiny(run())
    trainer.pool = Twin(trainer)
    one, bad, two = batches(trainer, 3)
    (balancer,) = trainer.balancers.values()
    for n, batch in enumerate((one, two)):
        trainer.step(batch)
        alone.step(batch)
        assert balancer.loads.sum() == 2 * 96 * 2  # two experts of every token, on two ranks
        assert same(weights(trainer), weights(alone))  # twice every count has the same quantiles
        assert trainer.expert_load() == alone.expert_load()
        assert trainer.pool.steps == list(range(n + 1))
    undo = poison(trainer, "gradient")
    with pytest.raises(Diverged):
        trainer.step(bad)
    undo()
    assert trainer.pool.steps == [0, 1]


def test_loads_are_judged_over_a_window():
    trainer = tiny(run(load_window=3))
    (balancer,) = trainer.balancers.values()
    steps = []
    for batch in batches(trainer, 5):
        trainer.step(batch)
        steps.append(balancer.loads.clone())
    total = sum(steps[-3:])
    assert not torch.equal(total, sum(steps))
    load = trainer.expert_load()
    assert load["gini"] == gini(total)
    assert load["max_violation"] == pytest.approx(total.max().item() / (96 * 2 * 3 / 8) - 1)
    assert load["dead_experts"] == (total == 0).sum()


def test_a_model_without_experts_trains():
    trainer = tiny(run(model={"num_experts": 0}))
    first, *_, last = (trainer.step(batch).losses["next_token"] for batch in batches(trainer, 8))
    assert last < first
    assert trainer.expert_load() == {
        "gini": 0.0, "max_violation": 0.0, "worst_dead": 0.0, "worst_layer": None, "dead_experts": 0, "layers": {},
    }  # fmt: skip


def test_the_worst_layer_is_named_and_every_layer_has_its_figures():
    trainer = tiny(run(model={"num_nextn_predict_layers": 1}))
    first, second = trainer.balancers
    before = {name: balancer.bias.clone() for name, balancer in trainer.balancers.items()}
    trainer.step(trainer.feed.next())
    for name, balancer in trainer.balancers.items():
        assert trainer.bias_drift[name] == pytest.approx((balancer.bias - before[name]).square().mean().sqrt().item())
    for name, loads in ((first, [5, 5, 5, 5, 5, 5, 5, 0]), (second, [1, 1, 1, 1, 1, 1, 1, 90])):
        trainer.loads[name].clear()
        trainer.loads[name].add(torch.tensor(loads))
    load = trainer.expert_load()
    assert load["worst_layer"] == second
    assert load["gini"] == load["layers"][second]["gini"] > load["layers"][first]["gini"] > 0
    assert (load["worst_dead"], load["dead_experts"]) == (1 / 8, 1)  # of the other layer
    assert [load["layers"][name]["dead"] for name in (first, second)] == [1 / 8, 0]
    assert load["max_violation"] == pytest.approx(90 * 8 / 97 - 1)


# what is left


def test_what_is_saved_is_what_was_trained(tmp_path):
    trainer = tiny(run())
    trainer.step(trainer.feed.next())
    trainer.save(tmp_path / "run" / "model")
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"model"}
    assert {p.name for p in (tmp_path / "run" / "model").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    loaded = K3Model.from_pretrained(tmp_path / "run" / "model")
    assert same(weights(trainer), loaded.state_dict())
    words = corpus().held_out[0].text
    assert ByteBPE.load(tmp_path / "run" / "model").encode(words) == trainer.feed.tokenizer.encode(words)


def test_little_text_gives_a_smaller_vocabulary():
    trainer = tiny(run())
    assert 257 < trainer.feed.tokenizer.vocab_size < 300
    assert trainer.model.config.vocab_size == 300

"""Steps far from usual change nothing, on all ranks or on none."""

import json
import math
import random

import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.train import guard
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import GuardConfig, OptimizerConfig
from perilune.train.guard import LEAST, Guard
from perilune.train.loop import Diverged
from perilune.train.metrics import Metrics
from perilune.train.parallel.ranks import Ranks
from ranks import run_ranks
from tiny_run import run, trainer

# judging


def judged(figures, **config):
    """A guard that has seen so many losses, and what it said of each."""
    one = Guard(GuardConfig(**{"width": 10, **config}))
    return one, [one.judge({"loss": value}) for value in figures]


def usual(n, seed=0):
    draw = random.Random(seed)
    return [2 + draw.gauss(0, 0.05) for _ in range(n)]


def test_what_is_usual_is_taken_and_what_is_far_is_not():
    one, said = judged(usual(500))
    assert said == [None] * 500
    limit = one.limit("loss")
    assert 2.3 < limit < 2.8  # ten deviations of 0.05, as 100 values show them
    assert one.judge({"loss": limit}) is None
    assert one.judge({"loss": math.nextafter(one.limit("loss"), 9)}) is not None
    said = one.judge({"loss": 7.25})
    assert said == f"loss: expected at most {one.limit('loss'):.4g} by the last 100 steps, got 7.25"
    assert one.judge({"loss": 0.01}) is None  # easy text is no accident


def test_the_limit_is_that_of_the_equation():
    values = [float(x) for x in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6)]
    one, _ = judged(values, width=4)  # the middle one is 5, the middle distance from it 2
    assert one.limit("loss") == pytest.approx(5 + 4 * 1.4826 * 2)
    steady, _ = judged([2.0] * 30, width=4)  # no spread at all
    assert steady.limit("loss") == pytest.approx(2 + 4 * 0.01 * 2)


def test_what_was_left_out_does_not_move_the_limit():
    one, _ = judged(usual(100))
    limit = one.limit("loss")
    for _ in range(50):
        assert one.judge({"loss": 50.0})
    assert one.limit("loss") == limit
    assert (one.skipped, one.in_a_row) == (50, 50)
    assert one.judge({"loss": 2.0}) is None
    assert (one.skipped, one.in_a_row) == (50, 0)


def test_little_is_known_at_the_beginning_and_after_a_stage():
    one, said = judged([2.0] * (LEAST - 1) + [1e6])
    assert said == [None] * LEAST
    one, said = judged([2.0] * LEAST + [1e6])
    assert said[-1]
    one.begin()
    assert one.limit("loss") == math.inf
    assert one.judge({"loss": 1e6}) is None
    assert one.skipped == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_always_far(value):
    _, said = judged([value, 2.0, value])
    assert [bool(reason) for reason in said] == [True, False, True]
    assert said[0] == f"loss: expected a number, got {value}"


def test_any_figure_may_be_the_one():
    one = Guard(GuardConfig(width=10))
    for value in usual(30):
        one.judge({"loss": value, "gradient norm": 1 / value})
    assert one.judge({"loss": 2.0, "gradient norm": 40.0}).startswith("gradient norm: expected at most 0.")
    assert one.judge({"loss": 40.0, "gradient norm": 0.5}).startswith("loss: ")


def test_a_slow_rise_is_followed():
    _, said = judged([1.01**i for i in range(600)])
    assert not any(said)


def test_without_a_width_nothing_is_left_out():
    one, said = judged([*usual(100), 1e9, math.nan], width=None)
    assert not any(said)
    assert one.state_dict() == {"skipped": 0, "in_a_row": 0, "recent": {}}


def test_it_goes_on_from_its_state():
    values = [*usual(90), 9.0, 9.0, *usual(90, seed=1)]
    one, said = judged(values, window=40)
    for stop in (0, 5, 91, 92, 100, 182):
        first, before = judged(values[:stop], window=40)
        other = Guard(first.config)
        other.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + [other.judge({"loss": value}) for value in values[stop:]] == said
        assert other.state_dict() == one.state_dict()
    old = Guard(one.config)
    old.load_state_dict({})  # of a checkpoint from before there were guards
    assert old.state_dict() == Guard(one.config).state_dict()


def test_mistakes_are_refused():
    for values, line in (
        ({"width": 0.0}, "width: expected a number above 0, or null, got 0.0"),
        ({"width": math.inf}, "width: expected a number above 0"),
        ({"window": 19}, "window: expected at least 20, got 19"),
        ({"patience": 0}, "patience: expected at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=line):
            GuardConfig(**values)


# training

BAD = 9  # the step that is spoiled


@pytest.fixture
def soon(monkeypatch):
    """What is usual is known after four steps."""
    monkeypatch.setattr(guard, "LEAST", 4)


def guarded(**changes):
    return run(
        guard=GuardConfig(width=30.0),
        optimizer=OptimizerConfig(qk_clip=1e-2, qk_clip_every=2),
        checkpoint_every=1,
        **changes,
    )


def spoil(made, *steps, by=1e6):
    """Has gradients of those steps be so many times as large, on this rank alone."""
    plain = made._accumulate

    def spoiled(parts, whole):
        losses = plain(parts, whole)
        if made.steps_done + 1 in steps:
            for p in made.model.parameters():
                if p.grad is not None:
                    getattr(p.grad, "_local_tensor", p.grad).mul_(by)
        return losses

    made._accumulate = spoiled
    return made


def everything(made):
    """Weights, the optimizer's state, the balancers'."""
    tensors = [*made.model.state_dict().values()]
    tensors += [x for state in made.optimizer.state.values() for x in state.values()]
    return [x.detach().clone() for x in tensors]


def equal(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("micro_tokens", [None, 48])
@pytest.mark.parametrize("by", [1e6, math.nan])
def test_a_step_far_from_usual_changes_nothing(soon, by, micro_tokens):
    made = guarded()
    made = made.replace(stages=tuple(stage.replace(micro_tokens=micro_tokens) for stage in made.stages))
    one, other = spoil(trainer(made), BAD, by=by), trainer(made)
    batches = [one.feed.next() for _ in range(12)]
    for number, batch in enumerate(batches, 1):
        before = everything(one)
        update = one.step(batch)
        assert (update.skipped is not None) == (number == BAD)
        assert equal(before, everything(one)) == (number == BAD)
        assert all(p.grad is None for p in one.model.parameters())
        if number == BAD:
            assert update.skipped.startswith("gradient norm: expected ")
            assert all(not statistic.any() for b in one.balancers.values() for statistic in b.statistics())
            assert all(attention.max_logits is None for attention in one.attentions.values())
            other.steps_done, other.tokens_done = one.steps_done, one.tokens_done  # the same text, and rates, pass by
        else:
            assert other.step(batch).losses == update.losses
    assert one.guard.skipped == 1
    assert equal(everything(one), everything(other))
    assert one.expert_load() == other.expert_load()


def test_without_a_guard_the_same_step_spoils_the_weights(soon):
    made = guarded().replace(guard=GuardConfig())
    one, other = spoil(trainer(made), BAD), trainer(made)
    for _ in range(BAD):
        update = one.step(one.feed.next())
        other.step(other.feed.next())
    assert update.skipped is None
    assert not equal(everything(one), everything(other))


@pytest.mark.parametrize("ahead", [False, True])
def test_lines_say_what_was_left_out(soon, ahead, tmp_path):
    one, plain = spoil(trainer(guarded()), BAD), trainer(guarded())
    one.ahead = plain.ahead = ahead
    for name, made in (("one", one), ("plain", plain)):
        with Metrics(tmp_path / name) as metrics:
            made.train(metrics)
    lines, others = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("one", "plain")
    )
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert [line["step"] for line in lines if "skipped" in line] == [BAD]
    line, before = lines[BAD - 1], lines[BAD - 2]
    assert line["skipped"].startswith("gradient norm: expected at most ")
    assert line["losses"] == others[BAD - 1]["losses"]
    assert line["bias_drift"] == 0 < before["bias_drift"]
    assert {key: line[key] for key in ("gini", "dead")} == {key: before[key] for key in ("gini", "dead")}
    assert [{**line, "seconds": 0} for line in lines[: BAD - 1]] == [{**x, "seconds": 0} for x in others[: BAD - 1]]


def test_a_run_goes_on_around_a_step_that_was_left_out(soon, tmp_path):
    """From any checkpoint before, at or after it: to the same bits, in every file."""

    class Keeping(Checkpoints):
        def _found(self):
            return []

    spoil(trainer(guarded()), BAD).train(None, checkpoints=Keeping(tmp_path / "whole"))
    end = tmp_path / "whole" / "checkpoints"
    for step in (3, BAD - 1, BAD, 10, 13):
        again = spoil(trainer(guarded(), checkpoint=end / f"step-{step:08}"), BAD)
        assert again.guard.skipped == (step >= BAD)
        folder = tmp_path / str(step)
        again.train(None, checkpoints=Checkpoints(folder))
        for name in ("model.safetensors", "training.safetensors", "training.json"):
            last = "step-00000016"
            assert (folder / "checkpoints" / last / name).read_bytes() == (end / last / name).read_bytes()


def test_the_first_step_may_be_the_one(tmp_path):
    one = spoil(trainer(guarded()), 1, by=math.nan)
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        one.train(metrics)
    first, second, *_ = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["skipped"] == "gradient norm: expected a number, got nan"
    assert (first["dead"], first["gini"], second["dead"] < 1) == (1, 0, True)


def test_too_many_in_a_row_end_the_run(soon):
    made = guarded().replace(guard=GuardConfig(width=30.0, patience=3))
    one = spoil(trainer(made), 6, 8, 9, 10)
    with pytest.raises(Diverged) as error:
        one.train(None)
    assert one.steps_done == 9
    assert str(error.value).startswith("gradient norm: expected at most ")
    assert str(error.value).endswith(
        " at step 10 (stage short, tokens 864 to 960), number 3 in a row; lower the learning rate"
    )
    assert "\n" not in str(error.value)


def test_another_stage_is_judged_by_itself(soon):
    """Ten steps, then six of another: none of those is judged by the ten, and four of them are not judged."""
    one = spoil(trainer(guarded()), 11, 16)
    one.train(None)
    assert one.guard.skipped == 1


# ranks


def check_ranks(rank, ranks, expected, layouts):
    guard.LEAST = 4
    for layout in layouts:
        many = trainer(guarded(), ranks=Ranks("cpu", layout))
        if rank == ranks - 1:
            spoil(many, BAD)
        said = []
        for _ in range(12):
            said.append(many.step(many.feed.next()).skipped is not None)
        everywhere = many.ranks.from_first(lambda: said)  # noqa: B023
        assert said == everywhere == [number == BAD for number in range(1, 13)]
        whole = many.whole_model()
        if whole is not None:
            for key, value in whole.state_dict().items():
                difference = (value - expected[key]).norm() / expected[key].norm().clamp(min=1e-3)
                assert difference < 1e-4, f"{key}: {difference:.1e}"
        states = [many.guard.state_dict()] * 2
        assert states[0] == many.ranks.from_first(lambda: states[1])  # noqa: B023


def test_all_ranks_leave_out_what_one_finds_far(tmp_path):
    """The gradients of one rank alone are spoiled; none of them moves, and after that they are as one process is."""
    from perilune.train.parallel.layout import Layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "LEAST", 4)
        alone = spoil(trainer(guarded()), BAD)
        for _ in range(12):
            alone.step(alone.feed.next())
    assert alone.guard.skipped == 1
    run_ranks(
        2, tmp_path, check_ranks, dict(alone.model.state_dict()), [Layout(), Layout(context=2), Layout(pipeline=2)]
    )

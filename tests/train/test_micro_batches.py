"""A step in micro-batches is the step in one pass."""

import gc
import math
from itertools import chain

import numpy as np
import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.data.packing import IGNORE, Batch, packed
from perilune.models.k3 import presets
from perilune.models.k3.config import BalanceConfig
from perilune.optim import qk_clip_
from perilune.train import loop
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import OptimizerConfig, Stage
from perilune.train.loop import Diverged
from perilune.train.metrics import Metrics
from perilune.train.micro_batches import cut, target_counts
from tiny_run import STAGES, run
from tiny_run import trainer as tiny

LENGTHS = (5, 11, 1, 16, 16, 2, 13, 9, 15, 8)  # 96 tokens
STAGE = Stage(name="only", context=16, batch_tokens=96, tokens=960, lr=1e-2, lr_end=1e-3)
SIZES = {1: None, 2: 50, 3: 34, 5: 25}  # micro_tokens of so many parts of it


def batch_of(lengths=LENGTHS, *, silent=(), answers=False, seed=0) -> Batch:
    """Documents of random tokens; those in `silent` have nothing to predict, some others half of it."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 256, sum(lengths))
    starts = np.cumsum([0, *lengths])
    labels = np.append(ids[1:], IGNORE)
    labels[starts[1:] - 1] = IGNORE
    labels[random.random(len(ids)) < np.linspace(0, 0.7, len(ids))] = IGNORE  # fewer towards the end
    for i in silent:
        labels[starts[i] : starts[i + 1]] = IGNORE
    asked = np.where(random.random(len(ids)) < 0.1, ids, IGNORE) if answers else None
    return packed(ids, labels, starts[:-1], asked)


def gradients(trainer, monkeypatch, batch):
    """What `step` hands to the optimizer, its losses, and what balancers and QK-clip saw."""
    found = {}
    model, attentions = trainer.model, trainer.attentions.values()

    def optimize():
        found["grads"] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found["observed"] = [t.clone() for b in trainer.balancers.values() for t in b.statistics()]
        found["logits"] = [a.max_logits if a.max_logits is None else a.max_logits.clone() for a in attentions]

    monkeypatch.setattr(trainer.optimizer, "step", optimize)
    update = trainer.step(batch)
    return update, found


def one_step(monkeypatch, batch, micro, *, double=True, **changes):
    made = run(stages=(STAGE.replace(micro_tokens=micro),), **changes)
    trainer = tiny(made)
    if double:
        trainer.model.double()
    return (*gradients(trainer, monkeypatch, batch), trainer)


def close(got, want, tolerance):
    assert got.keys() == want.keys()
    scale = max(float(g.abs().max()) for g in want.values())
    for name, grad in got.items():
        assert grad.dtype == want[name].dtype
        error = float((grad - want[name]).abs().max())
        assert error <= tolerance * max(float(want[name].abs().max()), 1e-3 * scale), (name, error)


@pytest.mark.parametrize("kind", ["quantile", "sign", "band", "aux"])
@pytest.mark.parametrize("further", [0, 2])
def test_two_three_and_five_parts_are_one_pass(kind, further, monkeypatch):
    """In float64: losses, every gradient, what balancers observed, their new bias, the largest logits."""
    batch = batch_of(silent=(4, 5, 6), answers=True)
    options = {"coefficient": 0.5} if kind == "aux" else {}
    model = {"balance": BalanceConfig(kind=kind, options=options), "num_nextn_predict_layers": further}
    clip = OptimizerConfig(qk_clip=100.0, qk_clip_every=1)
    update, whole, trainer = one_step(monkeypatch, batch, None, model=model, optimizer=clip)
    others = ["mtp"] * bool(further) + ["balance"] * (kind == "aux")
    assert set(update.losses) == {"next_token", "answers", *others}
    for parts in (2, 3, 5):
        assert len(cut(batch, SIZES[parts])) == parts
        other, cut_up, again = one_step(monkeypatch, batch, SIZES[parts], model=model, optimizer=clip)
        assert other.losses == pytest.approx(update.losses, rel=1e-9)
        assert other.grad_norm == pytest.approx(update.grad_norm, rel=1e-9)
        close(cut_up["grads"], whole["grads"], 1e-9)
        assert all(map(torch.equal, cut_up["observed"], whole["observed"]))
        for got, want in zip(cut_up["logits"], whole["logits"], strict=True):
            assert want is not None
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        for name, balancer in trainer.balancers.items():
            assert torch.equal(again.balancers[name].bias, balancer.bias), name
            assert torch.equal(again.balancers[name].loads, balancer.loads)
            assert (balancer.loads.sum() == 2 * 96) == (".mtp." not in name)


@pytest.mark.parametrize(
    ("precision", "tolerance", "loss"), [("float32", 2e-5, 1e-6), ("bfloat16", 3e-2, 1e-3)]
)  # bfloat16: what a part's products round, once each
def test_in_the_precisions_of_a_run(precision, tolerance, loss, monkeypatch):
    """Sums are float32 either way, as the weights are."""
    batch, model = batch_of(silent=(0, 1)), {"num_nextn_predict_layers": 1}
    options = {"double": False, "precision": precision, "model": model}
    update, whole, _ = one_step(monkeypatch, batch, None, **options)
    for parts in (2, 5):
        other, cut_up, _ = one_step(monkeypatch, batch, SIZES[parts], **options)
        assert {grad.dtype for grad in cut_up["grads"].values()} == {torch.float32}
        assert other.losses == pytest.approx(update.losses, rel=loss)
        close(cut_up["grads"], whole["grads"], tolerance)


def test_sums_do_not_stay_in_bfloat16(monkeypatch):
    """Eight equal parts, each with an eighth of the gradient to the bit: bfloat16 could not add five of them up."""
    one = batch_of((9, 7))
    eight = Batch(one.input_ids.repeat(1, 8), one.labels.repeat(1, 8), torch.tensor([0, *(9, 7) * 8]).cumsum(0))
    options = {"double": False, "precision": "bfloat16"}
    _, whole, _ = one_step(monkeypatch, one, None, **options)
    _, cut_up, _ = one_step(monkeypatch, eight, 16, **options)
    close(cut_up["grads"], whole["grads"], 1e-6)


def test_losses_are_means_over_the_step_not_over_parts(monkeypatch):
    """Four targets in one part and one in the other, each with its own loss: by hand."""
    batch = batch_of((16, 16), seed=3)
    labels = torch.full_like(batch.labels, IGNORE)
    labels[0, :4], labels[0, 20] = torch.tensor([1, 2, 3, 4]), 5
    batch = Batch(batch.input_ids, labels, batch.cu_seqlens)
    trainer = tiny(run(stages=(STAGE.replace(micro_tokens=16),)))
    with torch.no_grad():
        logits = trainer.model(batch.input_ids, cu_seqlens=batch.cu_seqlens).logits[0].double()
    each = torch.nn.functional.cross_entropy(logits, labels[0], ignore_index=IGNORE, reduction="none")
    by_part = [each[:4].mean(), each[20]]
    assert abs(sum(by_part) / 2 - each.sum() / 5) > 1e-4
    assert trainer.step(batch).losses["next_token"] == pytest.approx(float(each.sum() / 5), rel=1e-5)


def test_a_step_without_any_target_is_one():
    update = tiny(run(stages=(STAGE.replace(micro_tokens=32),))).step(batch_of(silent=range(len(LENGTHS))))
    assert update.losses == {"next_token": 0.0}
    assert update.grad_norm == 0.0


# cutting


def test_parts_are_the_batchs_own_documents_and_as_few_as_can_be():
    batch = batch_of(answers=True)
    for size in range(16, 110):
        parts = cut(batch, size)
        for field in ("input_ids", "labels", "answers"):
            assert torch.equal(torch.cat([getattr(part, field) for part in parts], 1), getattr(batch, field))
        lengths = [part.cu_seqlens.diff().tolist() for part in parts]
        assert [*chain(*lengths)] == [*LENGTHS]
        assert all(part.cu_seqlens[0] == 0 for part in parts)
        sums = [sum(own) for own in lengths]
        assert max(sums) <= size
        assert all(a + own[0] > size for a, own in zip(sums, lengths[1:]))  # each is filled
    assert cut(batch, 96) == cut(batch, None) == [batch]


def test_empty_documents_are_cut_too():
    ids = torch.arange(12)[None]
    batch = Batch(ids, ids, torch.tensor([0, 0, 5, 5, 10, 12, 12]))
    parts = cut(batch, 5)
    assert [part.input_ids.tolist() for part in parts] == [[[*range(5)]], [[*range(5, 10)]], [[10, 11]]]
    assert sum(len(part.cu_seqlens) - 1 for part in parts) == 6


def test_what_cannot_be_cut_says_so():
    with pytest.raises(ConfigError, match=r"^micro_tokens: expected at least 16, .* got 15; raise it"):
        cut(batch_of(), 15)
    with pytest.raises(ConfigError, match=r"micro_tokens: expected at least the context \(16\), or null, got 15"):
        STAGE.replace(micro_tokens=15)
    trainer = tiny(run(stages=(STAGE.replace(micro_tokens=16),)))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ConfigError, match="the longest document of this batch"):
        trainer.step(batch_of((17, 3)))
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("further", [0, 1, 3])
def test_targets_are_counted_as_the_model_does(further, monkeypatch):
    batch, seen = batch_of(answers=True), []
    trainer = tiny(run(model={"num_nextn_predict_layers": further}))
    plain = trainer.model._cross_entropy

    def spy(features, targets, number, group):
        seen.append(((targets != IGNORE).sum(), number))
        return plain(features, targets, number, group)

    monkeypatch.setattr(trainer.model, "_cross_entropy", spy)
    trainer.model(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels, answers=batch.answers,
                  counts=target_counts(batch, further))  # fmt: skip
    assert len(seen) == 2 + further
    assert all(found == counted for found, counted in seen)


# a step that goes wrong under way


@pytest.mark.parametrize("kind", ["quantile", "aux"])
@pytest.mark.parametrize("failure", ["loss", "gradient", "error"])
def test_a_late_part_that_fails_leaves_everything(failure, kind, monkeypatch):
    made = run(stages=(STAGE.replace(micro_tokens=34),), model={"balance": BalanceConfig(kind=kind)},
               optimizer=OptimizerConfig(qk_clip_every=1))  # fmt: skip
    trainer, other = tiny(made), tiny(made)
    trainer.step(batch_of())
    other.step(batch_of())
    plain, calls, batch = trainer.model.forward, [0], batch_of(seed=1)

    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        calls[0] += torch.is_grad_enabled()
        if calls[0] == 3:
            if failure == "error":
                raise KeyboardInterrupt
            scale = torch.tensor(math.nan if failure == "loss" else 1.0)
            output.loss = output.loss * scale
            if failure == "gradient":
                output.loss.register_hook(lambda grad: grad * math.inf)
        return output

    monkeypatch.setattr(trainer.model, "forward", forward)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt if failure == "error" else Diverged):
        trainer.step(batch)
    monkeypatch.undo()
    assert calls == [3]
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(not t.any() for b in trainer.balancers.values() for t in b.statistics())
    assert all(a.max_logits is None for a in trainer.attentions.values())
    assert (trainer.steps_done, trainer.tokens_done) == (1, 96)
    assert trainer.step(batch) == other.step(batch)  # as if it had not been tried
    assert all(map(torch.equal, trainer.model.state_dict().values(), other.model.state_dict().values()))


def test_too_little_memory_is_one_line_that_says_what_to_do(monkeypatch):
    trainer = tiny(run(stages=(STAGE.replace(micro_tokens=34),)))
    plain = trainer.model.forward

    def forward(*args, **kwargs):
        if trainer.model.lm_head.weight.grad is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return plain(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", forward)
    with pytest.raises(ConfigError) as found:
        trainer.step(batch_of())
    assert str(found.value) == (
        "stages.0.micro_tokens: expected as many as cpu has memory for, got 33 at once; "
        "lower it, or keep less with stages.0.recompute=layers, or blocks"
    )
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(not t.any() for b in trainer.balancers.values() for t in b.statistics())


# around the step


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["quantile", "aux"])
def test_heads_are_clipped_once_by_the_largest_logit_of_all_parts(every, kind, monkeypatch):
    seen = []
    monkeypatch.setattr(
        loop, "qk_clip_", lambda *args, **options: (seen.append(args[2].clone()), qk_clip_(*args, **options))
    )
    made = run(
        optimizer=OptimizerConfig(qk_clip=1e-6, qk_clip_every=every), model={"balance": BalanceConfig(kind=kind)}
    )
    weights = []
    for micro in (None, 16):
        trainer = tiny(made.replace(stages=(STAGE.replace(micro_tokens=micro),)))
        for seed in range(3):
            trainer.step(batch_of(seed=seed))
            assert all(a.max_logits is None for a in trainer.attentions.values())  # or a later step is clipped by it
        weights.append([a.q_weight.detach().clone() for a in trainer.attentions.values()])
    assert len(seen) == 2 * len(trainer.attentions) * (3 if every == 1 else 1)
    torch.testing.assert_close(seen[0], seen[len(seen) // 2], rtol=1e-5, atol=0)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-5)


def test_a_run_in_parts_goes_on_to_the_same_bits(tmp_path):
    stages = tuple(stage.replace(micro_tokens=48) for stage in STAGES)
    made, ends = run(stages=stages, model={"num_nextn_predict_layers": 1}), []
    trainer = tiny(made)
    with Metrics(tmp_path / "whole.jsonl") as metrics:
        trainer.train(metrics)
    ends.append(trainer.model.state_dict())
    stopped, checkpoints = tiny(made), Checkpoints(tmp_path)
    with Metrics(tmp_path / "first.jsonl") as metrics:
        stopped.train(metrics, checkpoints=checkpoints, stop=lambda: stopped.steps_done == 5)
    again = tiny(made, checkpoint=checkpoints.latest())
    with Metrics(tmp_path / "rest.jsonl") as metrics:
        again.train(metrics)
    ends.append(again.model.state_dict())
    assert all(map(torch.equal, *(end.values() for end in ends)))


def test_parts_may_change_when_a_run_goes_on(tmp_path):
    made, checkpoints = run(), Checkpoints(tmp_path)
    trainer = tiny(made)
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        trainer.train(metrics, checkpoints=checkpoints, stop=lambda: trainer.steps_done == 3)
    other = made.replace(stages=tuple(stage.replace(micro_tokens=48) for stage in STAGES))
    assert tiny(other, checkpoint=checkpoints.latest()).steps_done == 3


@pytest.mark.parametrize("unit", ["sublayers", "layers", "blocks"])
def test_a_run_that_recomputes_is_the_same_run(unit, tmp_path):
    """To the bit, through both stages; it may also be changed under way."""
    ends = []
    for kept in ("none", unit):
        stages = tuple(stage.replace(micro_tokens=48, recompute=kept) for stage in STAGES)
        trainer = tiny(run(stages=stages, model={"num_nextn_predict_layers": 1}))
        with Metrics(tmp_path / f"{kept}.jsonl") as metrics:
            trainer.train(metrics)
        assert trainer.model.model.recompute == kept
        ends.append(trainer.model.state_dict())
    assert all(map(torch.equal, *(end.values() for end in ends)))


def test_blocks_are_recomputed_where_there_are_some():
    stages = (STAGE.replace(recompute="blocks"),)
    with pytest.raises(ConfigError, match="recompute: expected none, sublayers or layers without attention residuals"):
        run(stages=stages, model={"attn_res_block_size": None})
    assert tiny(run(stages=stages)).step(batch_of()).losses["next_token"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    """A model of one width for the kernels: parts and second runs give the step of one pass, in less memory."""
    small = presets.small()
    linear = small.linear_attn_config.replace(kda_layers=(1, 2, 3), full_attn_layers=(4,))
    model = small.replace(num_hidden_layers=4, linear_attn_config=linear, attn_res_block_size=2, vocab_size=512)
    batch, found = batch_of((1024,) * 16, seed=2), {}
    peaks = {}
    for micro, recompute in ((None, "none"), (4096, "none"), (None, "sublayers"), (None, "layers"), (4096, "blocks")):
        stage = STAGE.replace(context=1024, batch_tokens=2**14, tokens=2**15, micro_tokens=micro, recompute=recompute)
        trainer = tiny(run(stages=(stage,), precision="bfloat16").replace(model=model), device="cuda")
        gc.collect()  # the trainer before is in circles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found[micro, recompute] = update = trainer.step(batch)
        peaks[micro, recompute] = torch.cuda.max_memory_allocated() - before
        assert update.losses["next_token"] == pytest.approx(found[None, "none"].losses["next_token"], rel=1e-3)
        assert update.grad_norm == pytest.approx(found[None, "none"].grad_norm, rel=2e-2)
        assert len(peaks) == 1 or peaks[micro, recompute] < 0.8 * peaks[None, "none"]

"""Stages of a pipeline, micro-batches in flight, have the losses and gradients of one process."""

import pytest
import torch

from perilune.data.packing import IGNORE, packed
from perilune.models.k3.parallel import whole
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import Stage
from perilune.train.loop import Diverged
from perilune.train.parallel.checkpoint import in_parts
from perilune.train.parallel.layout import Layout
from perilune.train.parallel.ranks import Ranks
from ranks import run_ranks
from tiny_run import run, trainer

LENGTHS = (5, 11, 1, 16, 16, 2, 13, 9, 15, 8)  # 96 tokens
STAGE = Stage(name="only", context=16, batch_tokens=96, tokens=960, lr=1e-2, lr_end=1e-3)


def made(micro=None, *, tied=False, further=1, **changes):
    """Five layers in blocks of two, so that stages begin inside blocks too."""
    small = run(stages=(STAGE.replace(micro_tokens=micro),), **changes)
    linear = small.model.linear_attn_config.replace(kda_layers=(1, 3, 4), full_attn_layers=(2, 5))
    return small.replace(
        model=small.model.replace(
            num_hidden_layers=5,
            linear_attn_config=linear,
            tie_word_embeddings=tied,
            num_nextn_predict_layers=further,
        ),
        optimizer=small.optimizer.replace(qk_clip=0.01, qk_clip_every=1),
    )


def batch_of(lengths):
    """Documents of random tokens, some of which have little to predict, and a few answers."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (sum(lengths),), generator=random)
    labels = tokens.roll(-1)
    ends = torch.tensor(lengths).cumsum(0)
    labels[ends - 1] = IGNORE
    labels[torch.rand(len(tokens), generator=random) < torch.linspace(0, 0.7, len(tokens))] = IGNORE
    answers = torch.where(torch.rand(len(tokens), generator=random) < 0.2, tokens, IGNORE)
    return packed(*(x.numpy() for x in (tokens, labels)), [0, *ends[:-1].tolist()], answers.numpy())


def step(one, batch):
    """One on this batch: losses and norm, what the optimizer is handed, and what balancers counted."""
    grads, feed = {}, getattr(one.feed, "feed", one.feed) if one.ranks.first else None
    if feed is not None:
        feed.next = lambda: batch
    optimize = one.optimizer.step

    def note():
        grads.update({name: whole(p.grad).clone() for name, p in one.model.named_parameters()})
        optimize()

    one.optimizer.step = note
    update = one.step(one.feed.next())
    loads = {name: window.total() for name, window in one.loads.items()}
    return torch.tensor([*update.losses.values(), update.grad_norm]), grads, loads, one.bias_drift


def check(rank, ranks, cases, folder):
    for number, (changes, lengths, layout) in enumerate(cases):
        expected = torch.load(folder / f"{number}.pt")
        many = trainer(made(**changes), ranks=Ranks("cpu", Layout(**layout)))
        figures, grads, loads, drift = step(many, batch_of(lengths))
        narrow = "precision" in changes
        torch.testing.assert_close(figures, expected[0], rtol=2e-3 if narrow else 3e-6, atol=0)
        assert many.ranks.names(grads) == expected[1].keys()  # every parameter is in a stage
        assert len(grads) < len(expected[1])
        largest = max(grad.norm() for grad in expected[1].values())
        for name, grad in grads.items():
            error = (grad - expected[1][name]).norm() / expected[1][name].norm().clamp(min=1e-3 * largest)
            assert error < (3e-2 if narrow else 1e-5), f"{name} of {changes}, {layout}: {error:.1e}"
        assert loads.keys() == expected[2].keys()
        if narrow:  # sums of micro-batches are rounded, then added
            continue
        assert all(torch.equal(own, expected[2][name]) for name, own in loads.items())
        assert drift == pytest.approx(expected[3], rel=1e-4)


CASES = {
    2: [
        ({}, LENGTHS, {"pipeline": 2}),
        ({"micro": 16}, LENGTHS, {"pipeline": 2}),
        ({"micro": 34, "tied": True, "further": 0}, LENGTHS, {"pipeline": 2}),
        ({"micro": 50, "further": 0, "precision": "bfloat16"}, LENGTHS, {"pipeline": 2}),
    ],
    4: [
        ({"micro": 25, "tied": True, "further": 2}, LENGTHS, {"pipeline": 4}),
        ({"micro": 16}, (9, 16, 3), {"pipeline": 2}),  # ranks with unequal parts of a step
        ({}, (9,), {"pipeline": 2}),  # and without any
        ({"micro": 16}, LENGTHS, {"pipeline": 2, "expert": 2}),
        ({"micro": 16}, LENGTHS, {"pipeline": 2, "context": 2}),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_stages_have_the_gradients_of_one_process(tmp_path, ranks):
    """One micro-batch or many, of documents of all lengths; losses, loads and biases of all stages on every rank."""
    for number, (changes, lengths, _) in enumerate(CASES[ranks]):
        one = trainer(made(**{name: value for name, value in changes.items() if name != "micro"}))
        torch.save(step(one, batch_of(lengths)), tmp_path / f"{number}.pt")  # too much to hand over
    run_ranks(ranks, tmp_path, check, CASES[ranks], tmp_path)


def losses_after(one, steps):
    return torch.tensor([list(one.step(one.feed.next()).losses.values()) for _ in range(steps)])


def check_elsewhere(rank, ranks, folder, layout, expected, at):
    """Goes on from the checkpoint of step `at`, in this layout, and leaves one after two steps more."""
    checkpoints = Checkpoints(folder, Ranks("cpu", Layout(**layout)))
    latest = checkpoints.latest()
    assert latest is None or in_parts(latest)
    many = trainer(made(16), ranks=checkpoints.ranks, checkpoint=latest)
    assert many.steps_done == at
    torch.testing.assert_close(losses_after(many, 2), expected, rtol=1e-4, atol=1e-5)
    many.checkpoint(checkpoints)
    if at == 0:
        check_failure(rank, many)


def check_failure(rank, many):
    """A number in one stage that is none stops all of them, and nothing is kept of the step."""
    weight = next(p for p in many.model.model.layers[many.model.model.stage.stop - 1].parameters() if p.dim() > 1)
    kept = weight.to_local().clone()
    with torch.no_grad():
        if rank == 1:
            weight.to_local().fill_(torch.nan)
    with pytest.raises(Diverged, match="loss: expected a number, got nan at step 3"):
        losses_after(many, 1)
    with torch.no_grad():
        weight.to_local().copy_(kept)
    assert all(p.grad is None for p in many.model.parameters())
    assert losses_after(many, 1).isfinite().all()


@pytest.mark.slow
def test_a_run_goes_on_in_other_stages(tmp_path):
    """Two stages, then four, then two that share experts, then one process, which has had the same run."""
    straight = trainer(made(16))
    expected = losses_after(straight, 8)
    worlds = ((2, {"pipeline": 2}), (4, {"pipeline": 4}), (4, {"pipeline": 2, "expert": 2}))
    for number, (ranks, layout) in enumerate(worlds):
        world = tmp_path / str(number)
        world.mkdir()
        run_ranks(ranks, world, check_elsewhere, tmp_path, layout, expected[2 * number : 2 * number + 2], 2 * number)
    last = trainer(made(16), checkpoint=Checkpoints(tmp_path).latest())
    assert last.steps_done == 6
    torch.testing.assert_close(losses_after(last, 2), expected[6:], rtol=1e-4, atol=1e-5)
    own, same = last.model.state_dict(), straight.model.state_dict()
    for name, value in own.items():
        assert (value - same[name]).norm() <= 1e-3 * same[name].norm().clamp(min=1e-3), name

"""A run on several ranks is the run of one process; the ranks are processes of this machine."""

import itertools
from dataclasses import replace

import pytest
import torch

from perilune.core.errors import BackendError, CheckpointError, ConfigError, DataError
from perilune.data.packing import IGNORE, Batch
from perilune.models.k3 import K3Model
from perilune.train.checkpoint import Checkpoints
from perilune.train.loop import Diverged
from perilune.train.parallel import checkpoint as parts
from perilune.train.parallel.checkpoint import export, in_parts
from perilune.train.parallel.feed import dealt, in_passes, shards
from perilune.train.parallel.layout import Layout
from perilune.train.parallel.ranks import Ranks, explained
from ranks import one_rank, run_ranks
from tiny_run import run, trainer

STEPS = 4


def made(**changes):
    """Tokens further ahead are predicted too, and every head is clipped, every other step."""
    plain = run(model={"num_nextn_predict_layers": 1})
    return plain.replace(optimizer=plain.optimizer.replace(qk_clip=0.01, qk_clip_every=2), **changes)


def together(**layout):
    return Ranks("cpu", Layout(**layout))


def curve(trainer, steps):
    """Of every step the losses and the gradient's norm."""
    updates = [trainer.step(trainer.feed.next()) for _ in range(steps)]
    return torch.tensor([[*update.losses.values(), update.grad_norm] for update in updates], dtype=torch.float64)


def weights(trainer):
    whole = trainer.whole_model()
    return None if whole is None else {name: p.detach().clone() for name, p in whole.state_dict().items()}


def assert_same(weights, expected, error=0.0):
    """Up to that share of each tensor's norm; of one that begins at zero, of what steps have made of it."""
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        difference = (value - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
        assert difference <= error, f"{name}: {difference:.1e}"


ROUNDING = 3e-5  # AdamW divides by the size of a gradient, however small


def check_curve(rank, ranks, layouts, expected, state):
    for layout in layouts:
        check_layout(rank, layout, expected, state)


def check_layout(rank, layout, expected, state):
    layout = dict(layout)
    recompute, several = layout.pop("recompute", "none"), layout.pop("in_parts", False)
    stages = (s.replace(recompute=recompute, micro_tokens=s.context if several else None) for s in made().stages)
    many = trainer(made(stages=tuple(stages)), ranks=together(**layout))
    torch.testing.assert_close(curve(many, STEPS), expected, rtol=2e-6, atol=0)
    own = weights(many)
    assert (own is None) == (rank > 0)
    if own is not None:
        assert_same(own, state, ROUNDING)
    loads = [window.total() for window in many.loads.values()]
    first = many.ranks.from_first(lambda: loads)
    assert all(map(torch.equal, loads, first))


LAYOUTS = {
    2: [
        {},
        {"context": 2},
        {"expert": 2},
        {"in_parts": True},
        {"pipeline": 2},
        {"pipeline": 2, "in_parts": True, "recompute": "sublayers"},
        {"context": 2, "expert": 2, "balanced": True, "recompute": "layers"},
    ],
    4: [
        {"recompute": "sublayers"},
        {"context": 2, "expert": 2, "in_parts": True, "recompute": "blocks"},
        {"context": 2},
        {"expert": 2},
        {"context": 2, "expert": 4, "balanced": True},
        {"pipeline": 2, "in_parts": True},
        {"pipeline": 2, "expert": 2, "balanced": True},
        {"pipeline": 2, "context": 2, "expert": 2, "in_parts": True, "recompute": "blocks"},
    ],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_ranks_have_the_curve_of_one_process(tmp_path, ranks):
    """Losses, norms and weights, after steps with QK-clip; four ranks are more than some batches have documents."""
    alone = trainer(made())
    expected = curve(alone, STEPS)
    run_ranks(ranks, tmp_path, check_curve, LAYOUTS[ranks], expected, weights(alone))


def test_ranks_pass_equally_often_with_every_token_once():
    ids = torch.arange(100)[None]
    batch = Batch(ids, ids, torch.tensor([0, 40, 45, 75, 90, 100]), ids + 1)
    rows = dealt(batch, 2)
    passes = in_passes(rows, 40)
    assert [[part.cu_seqlens.diff().tolist() for part in row] for row in passes] == [[[40], [10]], [[5, 30], [15]]]
    short = in_passes([rows[0], *dealt(Batch(ids[:, :3], ids[:, :3], torch.tensor([0, 3]), ids[:, :3]), 1)], 40)
    assert [part.cu_seqlens.tolist() for part in short[1]] == [[0, 3], [0]]  # goes along without a token
    assert all(part.input_ids.numel() <= 40 for row in passes for part in row)
    for row, parts_ in zip(rows, passes):
        for name in ("input_ids", "labels", "answers"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts_], 1), getattr(row, name))
    assert [len(row) for row in in_passes(rows, None)] == [1, 1]


def check_gradients(rank, ranks, expected):
    many = trainer(made(precision="bfloat16"), ranks=together())
    many.model.recompute_activations()
    seen = set()

    def note(module, args, output):
        seen.update(p.dtype for p in module.parameters())

    for module in many.model.modules():
        module.register_forward_hook(note)
    losses, grads = gradients(many)
    assert seen == {torch.float32}
    torch.testing.assert_close(many.ranks.sum_(losses), expected[0], rtol=1e-5, atol=0)
    for name, grad in grads.items():
        # the same roundings of the same products; each rank's sums are rounded, then added
        error = (grad.full_tensor() - expected[1][name]).norm() / expected[1][name].norm().clamp(min=1e-6)
        assert error < 1e-2, f"{name}: {error:.1e}"


def gradients(trainer):
    """Of the first batch: losses and every parameter's gradient, under autocast."""
    batch = trainer.feed.next()
    with torch.autocast("cpu", torch.bfloat16):
        output = trainer.model.train()(
            batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels, mean_over=trainer.ranks.tokens
        )
    output.loss.backward()
    return torch.stack(list(output.losses.values())), {n: p.grad for n, p in trainer.model.named_parameters()}


def test_narrow_products_leave_wide_what_one_process_leaves_wide(tmp_path):
    """Recomputed too: masters and gradients are float32, and gradients those of one process, up to bfloat16's steps."""
    run_ranks(2, tmp_path, check_gradients, gradients(trainer(made(precision="bfloat16"))))


def check_resumed(rank, ranks, folder, layout, expected, state):
    checkpoints = Checkpoints(folder, together(**layout))
    assert not in_parts(checkpoints.latest())
    many = trainer(made(), ranks=checkpoints.ranks, checkpoint=checkpoints.latest())
    assert many.steps_done == 2
    own = weights(many)
    if own is not None:
        assert_same(own, state)  # what was read is what was written
    torch.testing.assert_close(curve(many, 2), expected, rtol=2e-5, atol=1e-6)
    many.checkpoint(checkpoints)
    assert in_parts(checkpoints.latest())
    again = trainer(made(), ranks=checkpoints.ranks, checkpoint=checkpoints.latest())
    for a, b in zip(all_state(many), all_state(again), strict=True):
        assert torch.equal(a, b)


def all_state(trainer):
    """What this rank has of weights and the optimizer's state."""
    states = (tensor for state in trainer.optimizer.state.values() for tensor in state.values())
    return [getattr(x, "to_local", x.detach)() for x in (*trainer.model.parameters(), *states)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (2, {"pipeline": 2}), (4, {"context": 2, "expert": 2})])
def test_a_run_goes_on_in_another_world_and_back(tmp_path, ranks, layout):
    """One process, then several, then one again; each takes up what the one before wrote."""
    straight, first = trainer(made()), trainer(made())
    expected = curve(straight, 6)
    curve(first, 2)
    checkpoints = Checkpoints(tmp_path)
    first.checkpoint(checkpoints)
    run_ranks(ranks, tmp_path, check_resumed, tmp_path, layout, expected[2:4], weights(first))

    checkpoint = checkpoints.latest()
    last = trainer(made(), checkpoint=checkpoint)
    assert last.steps_done == 4
    export(checkpoint, tmp_path / "model")
    model = K3Model.from_pretrained(tmp_path / "model")
    assert_same(dict(model.state_dict()), weights(last))
    torch.testing.assert_close(curve(last, 2), expected[4:], rtol=1e-4, atol=1e-5)
    assert_same(weights(last), weights(straight), ROUNDING)


def check_failures(rank, ranks, folder):
    group = together()
    many = trainer(made(), ranks=group)
    before = weights(many)

    with torch.no_grad():  # one rank's part alone
        weight = many.model.model.norm.weight
        kept = weight.to_local().clone()
        if rank == 1:
            weight.to_local().fill_(torch.nan)
    with pytest.raises(Diverged, match="loss: expected a number, got nan at step 1"):
        many.step(many.feed.next())
    with torch.no_grad():
        weight.to_local().copy_(kept)
    if before is not None:
        assert_same(weights(many) or {}, before)
    else:
        weights(many)
    assert many.steps_done == 0

    checkpoints = Checkpoints(folder, group)
    many.checkpoint(checkpoints)
    curve(many, 1)
    real = parts.dcp.HuggingFaceStorageWriter.write_data
    if rank == 1:

        def full(self, plan, planner):
            raise OSError(28, "No space left on device")

        parts.dcp.HuggingFaceStorageWriter.write_data = full
    with pytest.raises(CheckpointError, match=r"expected every rank to write its part, got .*No space left on device"):
        many.checkpoint(checkpoints)
    parts.dcp.HuggingFaceStorageWriter.write_data = real
    group.any(False)  # all are done with it
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000000"]
    group.any(False)  # all have looked
    many.checkpoint(checkpoints)
    assert checkpoints.latest().name == "step-00000001"

    if rank == 0:
        many.feed.feed.next = lambda: (_ for _ in ()).throw(DataError("text: expected a connection, got none; wait"))
    with pytest.raises(DataError, match="text: expected a connection, got none; wait"):
        many.feed.next()
    with pytest.raises(ConfigError, match="expected a rule without a loss of its own on several ranks, got 'aux'"):
        trainer(run(model={"balance": many.run.model.balance.replace(kind="aux", options={})}), ranks=group)


def test_all_ranks_fail_alike(tmp_path):
    """A part that is no number, a disk that is full for one rank, text that the first cannot read: one line on all."""
    run_ranks(2, tmp_path, check_failures, tmp_path)


def test_a_rank_that_is_lost_is_said_to_be(tmp_path):
    with one_rank(tmp_path):
        ranks = together()
        with (
            pytest.raises(BackendError, match=r"ranks: expected all to go on, lost one .*see what it said"),
            explained(ranks),
        ):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")
        with pytest.raises(RuntimeError, match="another"), explained(ranks):
            raise RuntimeError("another")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_are_the_row(ranks):
    """End to end they are it, and what fills it up is the first token again, with nothing to predict."""
    (row,) = dealt(trainer(made()).feed.next(), 1)
    length = row.input_ids.shape[1] - 1  # 95
    row = replace(row, input_ids=row.input_ids[:, :-1], labels=row.labels[:, :-1], cu_seqlens=torch.tensor([0, 9, 95]))
    cut = shards(row, ranks)
    assert len({part.input_ids.shape for part in cut}) == 1
    ids, labels = (torch.cat([getattr(part, name) for part in cut], 1) for name in ("input_ids", "labels"))
    padding = ids.shape[1] - length
    assert 0 <= padding < ranks
    assert torch.equal(ids[:, :length], row.input_ids)
    assert torch.equal(labels[:, :length], row.labels)
    assert ids[0, length:].tolist() == [int(ids[0, 0])] * padding
    assert labels[0, length:].tolist() == [IGNORE] * padding
    for part in cut:
        assert (part.padding, part.size) == (padding, row.size)
        assert part.cu_seqlens.tolist() == [0, 9, 95, *range(96, 96 + padding)]


def test_an_empty_row_is_cut_too():
    (row,) = dealt(trainer(made()).feed.next(), 1)
    none = replace(row, input_ids=row.input_ids[:, :0], labels=row.labels[:, :0], cu_seqlens=torch.tensor([0]))
    assert [(part.input_ids.shape, part.padding) for part in shards(none, 3)] == [((1, 0), 0)] * 3


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ({"context": 3}, "layout.context: expected a divisor of 4 ranks, got 3"),
        ({"expert": 3}, "layout.expert: expected a divisor of 4 ranks, got 3"),
        ({"expert": 4}, "layout.expert: expected a divisor of 6 experts, got 4"),
        ({"pipeline": 3}, "layout.pipeline: expected a divisor of 4 ranks, got 3"),
        ({"pipeline": 6}, "layout.pipeline: expected at most 5 stages, one for each layer, got 6; lower it"),
        ({"pipeline": 2, "context": 4}, "layout.context: expected a divisor of a stage's 2 of 4 ranks, got 4"),
        ({"pipeline": 4, "expert": 2}, "layout.expert: expected a divisor of a stage's 1 of 4 ranks, got 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, line):
    with pytest.raises(ConfigError, match=line):
        Layout(**layout).check(ranks=4, experts=6, layers=5)
    with pytest.raises(ConfigError, match="context: expected at least 1, got 0"):
        Layout(context=0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 50])
def test_documents_are_dealt_whole_and_evenly(ranks):
    batch = trainer(made()).feed.next()
    spans = list(itertools.pairwise(batch.cu_seqlens.tolist()))
    rows = [(batch.input_ids[0, a:b].tolist(), batch.labels[0, a:b].tolist()) for a, b in spans]
    dealt_rows, sizes = [], []
    for part in dealt(batch, ranks):
        cuts = list(itertools.pairwise(part.cu_seqlens.tolist()))
        dealt_rows += [(part.input_ids[0, a:b].tolist(), part.labels[0, a:b].tolist()) for a, b in cuts]
        sizes.append(part.input_ids.numel())
        assert part.size == batch.size
    assert sorted(dealt_rows) == sorted(rows)
    assert max(sizes) - min(sizes) <= max(b - a for a, b in spans)
    assert ranks < len(spans) or min(sizes) == 0

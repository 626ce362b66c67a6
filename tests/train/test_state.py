"""A run that starts from another's weights, or from a model's; what a checkpoint does not fit."""

import json
import logging
import shutil

import pytest
import torch

from perilune.core.errors import CheckpointError, ConfigError
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3.config import BalanceConfig
from perilune.train import state
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import DataConfig, OptimizerConfig
from perilune.train.feed import Feed
from perilune.train.folder import start_folder
from perilune.train.loop import Trainer
from perilune.train.state import starting_point
from tiny_run import corpus, run, trainer


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of three steps with a checkpoint, its final model, and the trainer as it was."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    start_folder(folder, run())
    made = trainer(run())
    for _ in range(3):
        made.step(made.feed.next())
    made.checkpoint(Checkpoints(folder))
    made.save(folder / "model")
    return folder, made


@pytest.fixture
def copy(first, tmp_path):
    return shutil.copytree(first[0], tmp_path / "copy")


def begun(init, **changes):
    """A trainer of a run that starts from `init`."""
    made = run(init=str(init), **changes)
    return Trainer(made, Feed(made, ByteBPE.load(starting_point(made)), {"text": corpus()}))


def same_weights(a, b):
    values = b.model.state_dict()
    return all(torch.equal(value, values[name]) for name, value in a.model.state_dict().items())


def optimizer_state(made):
    return {
        (name, key): tensor
        for group in made.optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"])
        for key, tensor in made.optimizer.state[param].items()
    }


@pytest.mark.parametrize("place", [".", "checkpoints/step-00000003"])
def test_a_run_hands_on_weights_and_what_training_has_gathered(first, place):
    folder, before = first
    after = begun(folder / place, seed=5)
    assert same_weights(before, after)
    theirs = optimizer_state(before)
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in optimizer_state(after).items())
    assert any(tensor.any() for tensor in theirs.values())
    for a, b in zip(before.balancers.values(), after.balancers.values()):
        assert torch.equal(a.pooled, b.pooled)
    assert (after.steps_done, after.tokens_done) == (0, 0)
    assert all(len(window) == 0 for window in after.loads.values())
    words = corpus().held_out[0].text
    assert after.feed.tokenizer.encode(words) == before.feed.tokenizer.encode(words)


@pytest.mark.parametrize("place", ["model", "."])
def test_a_model_hands_on_weights_alone(first, copy, caplog, place):
    shutil.rmtree(copy / "checkpoints")
    caplog.set_level(logging.INFO, "perilune")
    after = begun(copy / place)
    assert same_weights(first[1], after)
    assert not any(tensor.any() for tensor in optimizer_state(after).values())
    assert caplog.records[-1].getMessage().endswith("model: weights without an optimizer's state, which starts at zero")


def test_the_tokenizer_comes_along_without_a_feed(first, monkeypatch):
    """As a program would say it: the run alone."""
    monkeypatch.setattr("perilune.train.feed.open_source", lambda source: corpus())
    monkeypatch.setattr(ByteBPE, "train", lambda *args: pytest.fail("it comes from there"))
    made = Trainer(run(init=str(first[0])))
    assert made.feed.tokenizer.vocab_size == first[1].feed.tokenizer.vocab_size


def test_rates_and_losses_may_be_others(first):
    after = begun(
        first[0],
        optimizer=OptimizerConfig(adamw_lr=1e-3, momentum=0.5),
        model={"mtp_loss_weight": 0.5, "balance_loss_weight": 0.1, "initializer_range": 0.3, "carried": {"dtype": "x"}},
    )
    assert same_weights(first[1], after)
    groups = {group["kind"]: group for group in after.optimizer.param_groups}
    assert groups["muon"]["momentum"] == 0.5
    assert groups["adamw"]["lr_scale"] == pytest.approx(1e-3 / 2e-2)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"rms_norm_eps": 1e-3}, "got rms_norm_eps=0.001 (there 1e-05)"),  # which no shape shows
        ({"num_experts_per_token": 3}, "got num_experts_per_token=3 (there 2)"),
        ({"balance": BalanceConfig(kind="sign")}, "got balance.kind=sign (there quantile)"),
        ({"hidden_size": 48, "vocab_size": 301}, "got hidden_size=48 (there 32), vocab_size=301 (there 300)"),
    ],
)
def test_another_model_does_not_fit(first, model, named):
    with pytest.raises(CheckpointError) as error:
        begun(first[0], model=model)
    assert named in str(error.value)
    assert str(error.value).endswith("; give both the same configuration")


def test_weights_alone_go_on_under_another_balancer(first):
    made = begun(first[0] / "model", model={"balance": BalanceConfig(kind="sign", options={"step": 0.1})})
    assert same_weights(made, first[1])
    before = {name: balancer.bias.clone() for name, balancer in made.balancers.items()}
    made.step(made.feed.next())
    for name, balancer in made.balancers.items():
        assert balancer.step == 0.1
        assert not torch.equal(balancer.bias, before[name])


def test_where_there_is_nothing_to_start_from(copy, tmp_path):
    assert starting_point(run()) is None
    with pytest.raises(CheckpointError, match="expected a run or a model to start from, found neither; check init"):
        starting_point(run(init=str(tmp_path / "nowhere")))
    path = copy / "checkpoints" / "step-00000003"
    (path / "training.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a whole checkpoint, but training.json is missing"):
        starting_point(run(init=str(path)))
    with pytest.raises(CheckpointError, match=r"found none \(step-00000003: training.json is missing\)"):
        starting_point(run(init=str(copy)))
    with pytest.raises(ConfigError, match=r"data.tokenizer: expected none beside init"):
        starting_point(run(init=str(copy), data=DataConfig(vocab_size=300, tokenizer="somewhere")))


# what a checkpoint does not fit


def rewritten(copy, change):
    """The checkpoint in `copy` with other values in its JSON, as another version of the library would write them."""
    path = copy / "checkpoints" / "step-00000003"
    values = json.loads((path / "training.json").read_text())
    change(values)
    (path / "training.json").write_text(json.dumps(values))
    return path


def test_a_checkpoint_of_another_run(copy):
    path = copy / "checkpoints" / "step-00000003"
    with pytest.raises(
        CheckpointError, match=r"expected a checkpoint of this run, got one with seed=4 \(there 0\); only"
    ):
        trainer(run(seed=4), checkpoint=path)


def test_a_checkpoint_in_a_later_format(copy):
    path = rewritten(copy, lambda values: values.update(format=2, written_by={"perilune": "9.9", "torch": "3"}))
    with pytest.raises(CheckpointError, match=r"expected format 1, got 2; go on with perilune 9.9, which wrote it"):
        trainer(run(), checkpoint=path)


def test_keys_that_came_later_have_their_defaults(copy):
    """A configuration of an older version lacks keys; their defaults are what it meant."""
    path = rewritten(copy, lambda values: values["run"].pop("load_window"))
    assert trainer(run(), checkpoint=path).steps_done == 3


def test_rates_that_changed_are_announced(copy, caplog):
    path = copy / "checkpoints" / "step-00000003"
    made = run(optimizer=OptimizerConfig(weight_decay=0.3), checkpoint_every=7)
    assert trainer(made, checkpoint=path).optimizer.param_groups[0]["weight_decay"] in (0.0, 0.3)
    assert caplog.records[-1].getMessage() == (
        f"{path}: from here on optimizer.weight_decay=0.3 (there 0.1), checkpoint_every=7 (there 100)"
    )


def test_the_state_of_another_optimizer(copy, monkeypatch):
    path = copy / "checkpoints" / "step-00000003"
    read = state._read_tensors

    def one_short(folder):
        tensors = read(folder)
        del tensors["optimizer/lm_head.weight/exp_avg"]
        return tensors

    monkeypatch.setattr(state, "_read_tensors", one_short)
    with pytest.raises(CheckpointError, match=r"the same optimizer, got another \(optimizer/lm_head.weight/exp_avg\)"):
        trainer(run(), checkpoint=path)

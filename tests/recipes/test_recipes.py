import subprocess
import sys

import pytest
import torch

from perilune import recipes
from perilune.core.errors import ConfigError
from perilune.data.tasks import TASKS
from perilune.models.k3 import K3Model
from perilune.optim import PerHeadMuon
from perilune.recipes.joined import joined
from perilune.recipes.long_context import SOURCES
from perilune.train.config import Run


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_is_a_run(name: str) -> None:
    """A run that survives its own file, whose stages mix only what there is."""
    run = recipes.get(name)
    assert Run.from_dict(run.to_dict()) == run
    for stage in run.stages:
        assert stage.mix.keys() <= {*run.data.sources, *TASKS}
        assert stage.lr_end < stage.lr
        assert stage.tokens >= stage.batch_tokens
        assert stage.min_document <= stage.context


LADDERS = ["nano", "small", "1b", "10b", "30b", "100b", "k3", "ladder", "stepladder"]


@pytest.mark.parametrize("name", LADDERS)
def test_every_recipe_builds_on_the_meta_device(name: str) -> None:
    """Model and optimizer, every parameter with a role; the single stages have the ladder's model."""
    run = recipes.get(name)
    assert all(recipes.get(other).model == run.model for other in recipes.RECIPES if other.startswith(f"{name}_"))
    assert all(other.split("_")[0] in LADDERS for other in recipes.RECIPES)
    with torch.device("meta"):
        model = K3Model(run.model)
        optimizer = PerHeadMuon(
            model.parameter_roles(),
            run.stages[0].lr,
            momentum=run.optimizer.momentum,
            weight_decay=run.optimizer.weight_decay,
            adamw_lr=run.optimizer.adamw_lr,
        )
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in model.parameters()}
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", LADDERS)
def test_a_ladder_is_its_stages(name: str) -> None:
    whole = recipes.get(name)
    single = [recipes.get(f"{name}_{stage.name}") for stage in whole.stages]
    assert tuple(run.stages[0] for run in single) == whole.stages
    assert [run.data for run in single] == [whole.data] * 4
    contexts = [stage.context for stage in whole.stages]
    assert contexts == sorted(contexts)
    assert len(set(contexts)) == 4
    peaks = [stage.lr for stage in whole.stages]
    assert peaks == sorted(peaks, reverse=True)
    # AdamW's rate stands to Muon's as in the ladder, wherever one begins.
    rates = [run.optimizer.adamw_lr and run.optimizer.adamw_lr / run.stages[0].lr for run in single]
    assert rates == [rates[0] and pytest.approx(rates[0])] * 4


def test_every_stage_warms_up_again() -> None:
    run = recipes.get("nano")
    ends = [0]
    for stage in run.stages:
        ends.append(ends[-1] + stage.steps * stage.batch_tokens)
    for before, at, stage in zip(run.stages, ends[1:], run.stages[1:]):
        assert run.schedule.lr(at) == pytest.approx(before.lr_end)
        assert run.schedule.lr(at + stage.warmup * stage.tokens) == pytest.approx(stage.lr, rel=0.01)
        assert stage.lr > before.lr_end


@pytest.mark.parametrize("name", ["ladder", "stepladder"])
def test_a_climb_warms_up_again_by_steps_and_repeats_what_is_long(name: str) -> None:
    """Every later stage has a step below its peak; long documents come more often, tasks have a share everywhere."""
    run = recipes.get(name)
    done = 0
    for before, stage in zip((None, *run.stages), run.stages):
        if before is not None:
            rates = [run.schedule.lr(done + n * stage.batch_tokens) for n in range(1, stage.steps + 1)]
            assert before.lr_end < rates[0] <= stage.lr
            assert stage.warmup * stage.steps >= 0.95  # a tenth of ten steps
            assert 0.9 * stage.lr < max(rates) <= stage.lr
            assert stage.long_times >= 3
            assert stage.lr < before.lr
        done += stage.steps * stage.batch_tokens
        assert {"retrieval", "chains"} <= stage.mix.keys()
        assert {**run.data.sources, **TASKS}.keys() >= stage.mix.keys()
    assert recipes.get("ladder").stages[-1].context == 2**20
    assert run.stages[0].tokens > sum(stage.tokens for stage in run.stages[1:])  # most tokens are short


def test_a_ladder_keeps_what_is_the_first_ones() -> None:
    first = recipes.get("nano_128").replace(seed=3)
    assert joined(first, recipes.get("nano_8k")).seed == 3
    assert joined(first) == first


def test_long_context_goes_to_a_million_on_public_text() -> None:
    run = recipes.get("1b")
    assert [stage.context for stage in run.stages] == [2**13, 2**16, 2**18, 2**20]
    assert sum(stage.tokens for stage in run.stages) == pytest.approx(2e10)
    assert all(source.from_hub for source in SOURCES.values())


def test_a_mistyped_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match="recipe: there is none called 'nanno'; do you mean 'nano'"):
        recipes.get("nanno")


def test_recipes_need_no_torch() -> None:
    code = (
        "import sys; from perilune import recipes; "
        "[recipes.get(n) for n in recipes.RECIPES]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

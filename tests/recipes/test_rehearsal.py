"""Large recipes in small: everything that they say is done, on a machine that could never hold them."""

import json

import pytest

from perilune import recipes
from perilune.cli.main import main
from perilune.data.source import TextSource
from perilune.data.tasks import TASKS
from perilune.models.k3 import K3Model
from perilune.nn.load import layer_load
from perilune.recipes.rehearsal import LEAST, STEPS, rehearsal
from perilune.train.config import Run
from perilune.train.loop import Trainer

LARGE = ["10b", "30b", "100b"]


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_what_a_recipe_says_is_what_is_rehearsed(name: str) -> None:
    run = recipes.get(name)
    small = rehearsal(run)
    assert Run.from_dict(small.to_dict()) == small
    assert small.replace(model=run.model, stages=run.stages, data=run.data, init=run.init) == run
    for stage, own in zip(run.stages, small.stages, strict=True):
        sizes = {key: getattr(stage, key) for key in ("context", "batch_tokens", "micro_tokens", "tokens")}
        assert own.replace(**sizes, min_document=stage.min_document, mix=stage.mix) == stage
        assert own.mix.keys() == {name for name, share in stage.mix.items() if share}
        assert own.steps == STEPS
        assert own.min_document < own.context
        assert (own.min_document > 0) == (stage.min_document > 0)
    assert [stage.context for stage in small.stages] == sorted(stage.context for stage in small.stages)
    assert small.data.sources.keys() == run.data.sources.keys()
    assert not any(source.from_hub for source in small.data.sources.values())
    model, own_model = run.model.to_dict(), small.model.to_dict()
    for switch in ("hidden_act", "mla_use_output_gate", "latent_moe_use_norm", "balance", "moe_renormalize", "carried"):
        assert own_model[switch] == model[switch]
    for whether in ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size", "layer_types"):
        assert (own_model[whether] is None) == (model[whether] is None)


def test_no_length_is_too_short_for_a_task() -> None:
    """Words take more tokens than in the recipe, whose vocabulary is larger."""
    assert min(stage.context for name in recipes.RECIPES for stage in recipes.get(name).stages) < LEAST
    lengths = {
        length
        for name in recipes.RECIPES
        for s in rehearsal(recipes.get(name)).stages
        for length in (s.context, s.micro_tokens or s.context)
    }
    assert min(lengths) == LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_rehearsal_goes_through_all_stages(name: str, tmp_path) -> None:
    """Every source and task is read, both kinds of layer learn, no step is without its figures."""
    lines = [f"def word{i}(x):  # the {i}th of many\n    return x + {i % 17}\n" for i in range(4000)]
    for i in range(10):  # one of them is held out; long enough for what asks for long documents
        (tmp_path / f"{i}.txt").write_text("".join(lines[(i * 397 + j * (i + 7)) % 4000] for j in range(400)))
    run = rehearsal(recipes.get(name))
    text = TextSource(path=str(tmp_path))
    trainer = Trainer(run.replace(data=run.data.replace(sources=dict.fromkeys(run.data.sources, text))))
    assert sum(p.numel() for p in trainer.model.parameters()) < 1e6
    assert isinstance(trainer.model, K3Model)
    assert [trainer.model.config.attention(i) for i in range(2)] == ["kda", "mla"]
    before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
    read = {}

    def note(stage) -> None:
        read[stage.name] = trainer.feed.state_dict()["given"]

    trainer.train(None, at_stage_end=note)
    assert list(read) == [stage.name for stage in run.stages]
    assert trainer.steps_done == STEPS * len(run.stages)
    still = [key for key, p in trainer.model.named_parameters() if (p == before[key]).all()]
    first = "model.layers.0.self_attention_res."
    assert still == [first + "query", first + "norm.weight"]  # it has one source to choose from, the embedding
    for stage in run.stages:
        assert 0.9 * stage.tokens <= sum(read[stage.name].values()) <= stage.tokens
        assert read[stage.name].keys() == stage.mix.keys()
        assert {name for name, tokens in read[stage.name].items() if tokens} & {"web", "papers"}
    mixed = {name for stage in run.stages for name in stage.mix}
    assert {name for given in read.values() for name, tokens in given.items() if tokens} == mixed
    assert mixed & TASKS.keys()
    assert all(layer_load(window.total()).dead == 0 for window in trainer.loads.values())


def test_the_command_says_what_it_would_do(capsys) -> None:
    assert main(["train", "100b", "--rehearse", "seed=3", "--print"]) == 0
    printed = Run.from_dict(json.loads(capsys.readouterr().out))
    assert printed == rehearsal(recipes.get("100b")).replace(seed=3)
    assert main(["train", "--resume", "runs/x", "--rehearse"]) == 2
    assert "--rehearse: expected a recipe, got a run to go on with" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_has_a_plan(name: str, capsys) -> None:
    """Every stage fits so many GPUs in some layout."""
    assert main(["plan", name, "--gpus", "256", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in plan["stages"]] == [stage.name for stage in recipes.get(name).stages]
    assert all(0 < stage["peak_bytes"] < 141e9 for stage in plan["stages"])

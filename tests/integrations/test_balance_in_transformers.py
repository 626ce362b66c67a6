"""Balancers in the routers of `transformers`' own models: what they compute, what is counted, what is kept."""

import copy
import importlib
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import perilune.integrations
from perilune.core.errors import CheckpointError, ConfigError, ShapeError
from perilune.integrations import balance
from perilune.integrations.padding import real_tokens
from perilune.integrations.routers import BIASED_SIGMOID, LOG_RANGE, SOFTMAX
from perilune.nn.load import gini
from perilune.ops import quantile_bias
from perilune.ops.quantile_bias import Groups
from ranks import run_ranks

ROOT = Path(__file__).parents[2]
E, K = 8, 2
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
QWEN = {"num_experts": E, "moe_intermediate_size": 16, "output_router_logits": True}
LATENT = {
    "n_routed_experts": E,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MODELS = {  # class, its configuration, how many layers have routers
    "mixtral": ("Mixtral", {"num_local_experts": E, "output_router_logits": True, "router_aux_loss_coef": 0.02}, 3),
    "qwen2": ("Qwen2Moe", QWEN | {"shared_expert_intermediate_size": 16, "norm_topk_prob": False}, 3),
    "qwen3": ("Qwen3Moe", QWEN | {"norm_topk_prob": True, "head_dim": 16}, 3),
    "deepseek2": ("DeepseekV2", LATENT | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}, 2),
    "deepseek2 in groups": (
        "DeepseekV2",
        LATENT | {"topk_method": "group_limited_greedy", "topk_group": 2, "routed_scaling_factor": 1.5},
        2,
    ),
    "deepseek3": ("DeepseekV3", LATENT | {"topk_group": 2, "routed_scaling_factor": 2.5}, 2),
    "deepseek3 without groups": ("DeepseekV3", LATENT | {"n_group": 1, "topk_group": 1}, 2),
}
EACH = pytest.mark.parametrize("name", MODELS)
TWO = pytest.mark.parametrize("name", ["mixtral", "deepseek3"])  # where the bias is ours, and where it was there


def make_model(name: str, **changes) -> transformers.PreTrainedModel:
    kind, config, _ = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | config | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape)


def counts(balancers) -> list[Tensor]:
    """All that was counted, layer by layer."""
    return [statistic.clone() for name in balancers for statistic in balancers[name].statistics()]


def biases(balancers) -> list[Tensor]:
    return [balancers[name].bias.clone() for name in balancers]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_a_zero_bias_the_model_is_what_it_was(name: str, dtype: torch.dtype) -> None:
    model = make_model(name).to(dtype)
    model.eval()
    ids = tokens(2, 40)
    with torch.no_grad():
        before = model(ids, output_router_logits=True)
        written = model.generate(ids[:, :5], max_new_tokens=10, do_sample=False)
        balancers = balance(model)
        after = model(ids, output_router_logits=True)
        assert len(balancers) == MODELS[name][2]
        assert torch.equal(before.logits, after.logits)
        assert torch.equal(written, model.generate(ids[:, :5], max_new_tokens=10, do_sample=False))
    if before.get("router_logits"):  # DeepSeek's models do not give any
        assert len(after.router_logits) == len(before.router_logits)


@EACH
def test_a_bias_equal_for_all_changes_no_choice_and_no_weight(name: str) -> None:
    """So our own choice and weights, in place of the model's, come to the same; gradients too."""
    model = make_model(name).eval()
    ids = tokens(2, 40)
    results = []
    for shift in (None, 0.0, 0.1):
        if shift is not None:
            balancers = balance(model) if shift == 0 else balancers  # noqa: F821
            for layer in balancers:
                balancers[layer].bias.fill_(shift)
        model.zero_grad()
        logits = model(ids).logits
        logits.square().mean().backward()
        results.append((logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    for logits, grads in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads, results[0][1], rtol=1e-4, atol=1e-5)


@EACH
def test_chosen_with_the_bias_weighed_without(name: str) -> None:
    """Every router against its definition, written out for one token after another."""
    model = make_model(name)
    balancers = balance(model)
    layer, where = model.model.layers[-1].mlp.gate, next(reversed(list(balancers)))
    bias = torch.randn(E) * 0.1
    balancers[where].bias.copy_(bias)
    logits, weights, ids = layer(torch.randn(1, 60, 32))
    deepseek3 = name.startswith("deepseek3")
    for row, got, chosen in zip(logits.float(), weights, ids):
        raw = row.sigmoid() if deepseek3 else row.softmax(-1)
        ranked = raw + bias if deepseek3 else raw.log() + LOG_RANGE * bias
        if ("groups" in name and "without" not in name) or name == "deepseek3":
            best = 2 if deepseek3 else 1
            groups = sorted(range(4), key=lambda g: -ranked[2 * g : 2 * g + 2].topk(best).values.sum())
            ranked = torch.where(torch.isin(torch.arange(E) // 2, torch.tensor(groups[:2])), ranked, -torch.inf)
        expected = ranked.topk(K).indices
        assert sorted(expected.tolist()) == sorted(chosen.tolist())
        p = raw[chosen]
        if name in ("mixtral", "qwen3") or deepseek3:
            p = p / p.sum()
        scaling = {"deepseek3": 2.5, "deepseek2 in groups": 1.5}.get(
            name, model.config.to_dict().get("routed_scaling_factor", 1.0)
        )
        torch.testing.assert_close(got, p * scaling, rtol=1e-5, atol=1e-6)


@EACH
@pytest.mark.parametrize("kind", ["quantile", "sign", "band"])
def test_the_bias_moves_by_the_rule_from_what_routers_saw(name: str, kind: str) -> None:
    """Of two micro-batches together, and the bias of this step is not used in it."""
    model = make_model(name)
    options = {"quantile": {"bins": None}, "sign": {"step": 0.01}, "band": {}}[kind]
    balancers = balance(model, kind, **options)
    seen: dict[str, list] = {where: [] for where in balancers}
    for where in balancers:
        model.get_submodule(where).register_forward_hook(lambda _, __, out, where=where: seen[where].append(out))
    before = biases(balancers)
    for batch in (tokens(2, 30), tokens(3, 7)):
        model(batch).logits.sum().backward()
        assert same(biases(balancers), before)
    balancers.update()
    for where in balancers:
        logits, _, ids = (torch.cat(parts).detach() for parts in zip(*seen[where]))
        load = torch.bincount(ids.flatten(), minlength=E)
        assert torch.equal(balancers[where].loads, load)
        if kind == "quantile":
            sigmoid = name.startswith("deepseek3")
            scores = logits.sigmoid() if sigmoid else 1 + logits.float().log_softmax(-1) / LOG_RANGE
            limited = {"deepseek3": Groups(4, 2), "deepseek2 in groups": Groups(4, 2, best=1)}.get(name)
            expected = quantile_bias(scores, torch.zeros(E), K, groups=limited)
            torch.testing.assert_close(balancers[where].bias, expected, rtol=1e-5, atol=1e-6)
        elif kind == "sign":
            step = 0.01 * torch.sign(load.sum() / E - load)
            torch.testing.assert_close(balancers[where].bias, step - step.mean())
        assert model.get_submodule(where).e_score_correction_bias.equal(balancers[where].bias)


@EACH
def test_experts_are_balanced_after_a_few_steps(name: str) -> None:
    model = make_model(name)
    with torch.no_grad():  # what all tokens have in common favours some experts
        model.model.embed_tokens.weight += 0.5 * torch.randn(32)
    balancers = balance(model)
    ginis = []
    for _ in range(8):
        model(tokens(32, 32))
        balancers.update()
        ginis.append(balancers.health(1).worst.gini)
    assert ginis[0] > 0.2
    assert ginis[-1] < 0.4 * ginis[0]
    assert balancers.health(1).worst.dead == 0


@TWO
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["ones and zeros", "boolean", "four axes"])
def test_padding_is_never_counted(name: str, side: str, form: str) -> None:
    """Counts are those of the sequences alone."""
    model = make_model(name)
    balancers = balance(model)
    documents = [tokens(n) for n in (9, 23, 1)]
    for document in documents:
        model(document[None])
    expected = counts(balancers)
    balancers.discard()
    ids, mask = torch.full((3, 23), 7), torch.zeros(3, 23, dtype=torch.long)
    for row, document in enumerate(documents):
        part = slice(23 - len(document), 23) if side == "left" else slice(0, len(document))
        ids[row, part], mask[row, part] = document, 1
    given = mask if form == "ones and zeros" else mask.bool()
    if form == "four axes":
        given = (mask.bool()[:, None, None, :] & torch.ones(23, 23, dtype=torch.bool).tril()) | torch.eye(
            23, dtype=torch.bool
        )
        given = torch.where(given & mask.bool()[:, None, :, None], 0.0, torch.finfo(torch.float32).min)
    model(ids, attention_mask=given, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    got = counts(balancers)
    assert got[0].sum() == 33 * K
    # Rounding can move a token by a bin, or change a near tie.
    assert all((a - b).abs().sum() <= 0.02 * a.sum() for a, b in zip(expected, got))


def test_masks_are_read_in_every_form() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    assert real_tokens(None, 8) is None
    assert real_tokens({"full": None, "sliding": mask}, 8).tolist() == mask.bool().flatten().tolist()
    assert real_tokens(mask, 4).tolist() == [True, True, False, False]  # two are cached
    sees = (mask.bool()[:, None] & torch.ones(4, 4, dtype=torch.bool).tril())[:, None]
    assert real_tokens(sees, 8).tolist() == mask.bool().flatten().tolist()
    assert real_tokens(sees[:1, :, 2:], 6).tolist() == [True] * 6
    for wrong, size in ((mask, 7), (mask, 16), (mask[0], 4), ("text", 8), (sees, 12)):
        with pytest.raises(ShapeError, match="attention_mask: expected"):
            real_tokens(wrong, size)


@TWO
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_counted(name: str, reentrant: bool) -> None:
    """With the backward pass of one batch after the forward pass of the next; gradients are the same."""
    model = make_model(name)
    balancers = balance(model)
    for layer in balancers:
        balancers[layer].bias.copy_(torch.randn(E) * 0.05)
    batches = [tokens(2, 20), tokens(3, 11)]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        model.zero_grad()
        losses = [model(batch, labels=batch, use_cache=False).loss for batch in batches]
        for loss in losses:
            loss.backward()
        counted = counts(balancers)
        balancers.discard()
        return counted, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain, gradients = run()
    runs = []
    model.model.layers[-1].mlp.gate.register_forward_hook(lambda *_: runs.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again, recomputed = run()
    assert len(runs) == 4  # it did run twice
    assert same(plain, again)
    torch.testing.assert_close(recomputed, gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's, about this and that
@TWO
def test_a_compiled_model_counts_alike(name: str) -> None:
    """Training, evaluation and passes without gradients in turn, with padding, each under its own guards."""
    model = make_model(name)
    balancers = balance(model)
    ids, mask = tokens(3, 16), torch.ones(3, 16, dtype=torch.long)
    mask[0, :5] = 0

    def run(forward) -> list[list[Tensor]]:
        seen = []
        for where in balancers:
            balancers[where].bias.zero_()
        for _ in range(2):
            forward(ids, attention_mask=mask, use_cache=False).logits.sum().backward()
            seen.append(counts(balancers))
            balancers.update()
            seen.append(biases(balancers))
        model.eval()
        forward(ids, attention_mask=mask, use_cache=False)
        model.train()
        with torch.no_grad():
            forward(ids, attention_mask=mask, use_cache=False)
        return [*seen, counts(balancers)]

    plain, compiled = run(model), run(torch.compile(model, backend="eager"))
    assert all(map(same, plain, compiled))
    assert plain[0][0].sum() == 43 * K
    assert plain[1][0].any()
    assert not plain[-1][0].any()


@TWO
def test_only_training_with_gradients_is_counted(name: str) -> None:
    model = make_model(name)
    balancers = balance(model)
    ids = tokens(2, 12)
    model.eval()
    model(ids)
    model.train()
    with torch.no_grad():
        model(ids)
    model.generate(ids, max_new_tokens=3, do_sample=False)  # some trainers leave the model in training mode
    balancers.freeze()
    model(ids)
    assert not any(x.any() for x in counts(balancers))
    held = biases(balancers)
    balancers.update()
    assert same(biases(balancers), held)
    balancers.unfreeze()
    model(ids)
    assert counts(balancers)[0].sum() == 24 * K
    balancers.discard()
    assert not any(x.any() for x in counts(balancers))


def test_a_forward_pass_that_fails_leaves_the_next_one_right() -> None:
    model = make_model("mixtral")
    balancers = balance(model)
    ids = tokens(2, 12)
    with pytest.raises(RuntimeError), model.model.layers[2].mlp.experts.register_forward_pre_hook(fail):
        model(ids, attention_mask=torch.zeros(2, 12, dtype=torch.long))
    balancers.discard()
    model.model.layers[1].mlp(torch.randn(2, 9, 32))  # of another shape than that mask
    balancers.discard()
    model(ids)
    assert [balancers[name].counts.sum().item() for name in balancers] == [24 * K] * 3


def fail(*_) -> None:
    raise RuntimeError("an expert burned down")


def test_a_block_called_by_itself_is_counted() -> None:
    model = make_model("qwen3")
    balancers = balance(model)
    model.model.layers[1].mlp(torch.randn(2, 9, 32))
    assert [balancers[name].counts.sum().item() for name in balancers] == [0, 18 * K, 0]


@EACH
def test_auxiliary_loss_is_off_and_said_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(name)
    ids = tokens(2, 20)
    with caplog.at_level(logging.INFO, logger="perilune"):
        balancers = balance(model)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"balance: quantile in {len(balancers)} layers ({MODELS[name][0]}Top")
    had = "router_aux_loss_coef" in type(model.config)().to_dict() and "deepseek" not in name
    assert ("auxiliary loss off: router_aux_loss_coef 0.0" in caplog.messages[0]) == had
    out = model(ids, labels=ids)
    logits = out.logits[:, :-1].flatten(0, 1).float()
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(model(ids, labels=ids, output_router_logits=True).loss, expected)


def test_kind_none_counts_and_leaves_the_models_loss_alone() -> None:
    model = make_model("mixtral", router_aux_loss_coef=0.5)
    ids = tokens(2, 20)
    before = model(ids, labels=ids).loss
    balancers = balance(model, "none")
    assert model(ids, labels=ids).loss.equal(before)
    balancers.update()
    assert not any(b.any() for b in biases(balancers))
    assert balancers.health().worst.gini > 0


@EACH
@pytest.mark.parametrize("checkpointing", [False, True])
def test_our_auxiliary_loss_joins_the_models(name: str, checkpointing: bool) -> None:
    """Its value by the definition, without padding; gradients reach the router through recomputation as without."""
    model = make_model(name)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    labels = torch.where(mask.bool(), ids, -100)
    plain = model(ids, attention_mask=mask, labels=labels, output_router_logits=False).loss
    balancers = balance(model, "aux", coefficient=0.1)
    seen = []
    for where in balancers:
        model.get_submodule(where).register_forward_hook(lambda _, __, out: seen.append(out))
    loss = model(ids, attention_mask=mask, labels=labels).loss
    expected = 0.0
    for logits, _, chosen in seen:
        logits, chosen = logits[mask.flatten().bool()].detach(), chosen[mask.flatten().bool()]
        scores = logits.sigmoid() if name.startswith("deepseek3") else logits.float().softmax(-1)
        share = (scores / scores.sum(-1, keepdim=True)).mean(0)
        expected += 0.1 * E * (torch.bincount(chosen.flatten(), minlength=E) / chosen.numel() * share).sum()
    torch.testing.assert_close(loss - plain, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(balancers.loss.detach(), expected)
    gates = [model.get_submodule(where).weight for where in balancers]
    grads = torch.autograd.grad(balancers.loss, gates, retain_graph=True)
    assert all(g.abs().sum() > 0 for g in grads)
    if checkpointing:
        loss.backward()
        expected_grads = [gate.grad.clone() for gate in gates]
        model.zero_grad()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        again = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        model(tokens(1, 5), use_cache=False)  # another batch before the first is recomputed
        again.backward()
        torch.testing.assert_close([gate.grad for gate in gates], expected_grads)


def test_our_auxiliary_loss_needs_layers_with_gradients() -> None:
    model = make_model("mixtral")
    balance(model, "aux")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ConfigError, match="gradient_checkpointing: expected use_reentrant=False"):
        model(tokens(2, 6), use_cache=False)
    model.eval()
    model(tokens(2, 6))  # nothing to differentiate


def test_a_tuple_gets_the_loss_too() -> None:
    model = make_model("mixtral")
    ids = tokens(2, 20)
    plain = model(ids, labels=ids, output_router_logits=False).loss
    balancers = balance(model, "aux", coefficient=0.1)
    loss = model(ids, labels=ids, return_dict=False)[0]
    torch.testing.assert_close(loss, plain + balancers.loss)
    assert model(ids, return_dict=False)[0].shape == (2, 20, 50)


@EACH
def test_saved_and_loaded_biases_are_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    balancers = balance(model)
    model(tokens(4, 30))
    balancers.update()
    keys = [key for key in model.state_dict() if "correction_bias" in key or "balancer" in key]
    assert keys == [f"{where}.e_score_correction_bias" for where in balancers]

    other = make_model(name)
    other_balancers = balance(other)
    assert not other.load_state_dict(model.state_dict()).missing_keys
    assert same(biases(other_balancers), biases(balancers))

    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids = tokens(2, 30)
    model.eval()
    if name.startswith("deepseek3"):  # as whoever has no Perilune
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    again_balancers = balance(again)
    again_balancers.load(tmp_path)
    assert same(biases(again_balancers), biases(balancers))
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    balancers = balance(make_model("mixtral"))
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.gate.e_score_correction_bias \[8\] in .*, got none"):
        balancers.load(tmp_path)
    model = make_model("mixtral", num_local_experts=4)
    balance(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"got \[4\]"):
        balancers.load(tmp_path)


@TWO
def test_the_bias_is_float32_whatever_the_model_is(name: str) -> None:
    """0.30128125 and 0.3 are one number in bfloat16."""
    model = make_model(name)
    balancers = balance(model)
    where = next(iter(balancers))
    balancers[where].bias[:2] = torch.tensor([0.30128125, 0.3])
    expected = biases(balancers)
    model.bfloat16()
    assert same(biases(balancers), expected)
    model(tokens(2, 20))
    balancers.update()
    assert balancers[where].bias.dtype == torch.float32
    assert balancers[where].bias is model.get_submodule(where).e_score_correction_bias
    model.load_state_dict({key: x.bfloat16() for key, x in model.state_dict().items()}, assign=True)
    model.double()
    assert balancers[where].bias.dtype == torch.float64


@TWO
def test_a_model_cast_before_it_is_balanced_has_its_bias_in_float32_too(name: str) -> None:
    balancers = balance(make_model(name).bfloat16())
    assert [bias.dtype for bias in biases(balancers)] == [torch.float32] * len(balancers)


@TWO
def test_no_optimizer_sees_the_bias_and_no_gradient_reaches_it(name: str) -> None:
    model = make_model(name)
    balancers = balance(model)
    held = {id(balancers[where].bias) for where in balancers}
    assert not held & {id(p) for p in model.parameters()}
    ids = tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    for where in balancers:
        assert balancers[where].bias.grad is None
        assert not balancers[where].bias.requires_grad
        assert model.get_submodule(where).weight.grad.abs().sum() > 0


@TWO
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["quantile", "aux"])
def test_a_copied_model_is_on_its_own(name: str, how: str, kind: str) -> None:
    """Also just after a forward pass, whose auxiliary loss has a graph."""
    model = make_model(name)
    balancers = balance(model, kind)
    ids = tokens(2, 20)
    model(ids, labels=ids)
    balancers.update()
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    twin(tokens(2, 20))
    assert not any(x.any() for x in counts(balancers))
    ids = tokens(2, 20)
    torch.testing.assert_close(twin.eval()(ids).logits, model.eval()(ids).logits)
    where = next(iter(balancers))
    gate = twin.get_submodule(where)
    assert gate.balancer.bias is gate.e_score_correction_bias
    assert gate.balancer.bias is not balancers[where].bias
    assert gate.balancer.counts.sum() == 40 * K
    if kind == "aux":
        losses = [m.train()(ids, labels=ids).loss for m in (model, twin)]
        assert losses[1].equal(losses[0])
        logits = twin(ids).logits[:, :-1].flatten(0, 1)
        assert losses[1] > torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def test_replicas_of_data_parallel_are_refused() -> None:
    """Their counts would be lost with them."""
    balancers = balance(model := make_model("mixtral"))
    replica = model.get_submodule(next(iter(balancers)))._replicate_for_data_parallel()
    scores = torch.rand(4, E)
    with pytest.raises(ConfigError, match="got a replica of nn"):
        replica.observe(scores, scores.topk(K).indices)


def test_going_on_with_training_is_bit_for_bit() -> None:
    batches = [tokens(2, 20) for _ in range(6)]
    model = make_model("mixtral")
    balancers = balance(model)

    def go(model, balancers, batches) -> list[Tensor]:
        for batch in batches:
            model(batch)
            balancers.update()
        return biases(balancers)

    go(model, balancers, batches[:3])
    other = copy.deepcopy(make_model("mixtral"))
    others = balance(other)
    other.load_state_dict(model.state_dict())
    others.load_training_state(balancers.training_state())
    assert same(go(other, others, batches[3:]), go(model, balancers, batches[3:]))
    with pytest.raises(CheckpointError, match="training_state: expected layers"):
        others.load_training_state({"somewhere/pooled": torch.zeros(1)})


def test_health_by_hand() -> None:
    model = make_model("mixtral")
    balancers = balance(model, "sign", step=0.5)
    nothing = balancers.health()
    assert (nothing.layers, nothing.worst_layer, nothing.steps, str(nothing)) == ({}, None, 0, "no step was counted")
    where = "model.layers.1.mlp.gate"
    for loads in ([4, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [0, 4, 8, 0, 0, 0, 0, 0]):
        for name in balancers:
            balancers[name].counts.copy_(torch.tensor(loads if name == where or not any(loads) else [2] * 8))
        balancers.update()
    health = balancers.health(1)
    assert list(health.layers) == list(health.drifts) == list(balancers)
    assert (health.steps, health.worst_layer) == (1, where)
    assert health.layers[where].gini == pytest.approx(gini(torch.tensor([0, 4, 8, 0, 0, 0, 0, 0])))
    assert health.layers[where].max_violation == pytest.approx(8 / 1.5 - 1)
    assert health.worst == health.layers[where]
    assert health.worst.dead == 6 / 8
    step = torch.tensor([1, -1, -1, 1, 1, 1, 1, 1.0]) * 0.5
    assert health.drifts[where] == pytest.approx((step - step.mean()).square().mean().sqrt().item())
    assert health.bias_drift == health.drifts[where]
    assert health.drifts["model.layers.0.mlp.gate"] == health.layers["model.layers.0.mlp.gate"].gini == 0
    both = balancers.health()
    assert both.steps == 2  # the one without tokens is none
    assert both.worst.gini == pytest.approx(gini(torch.tensor([4, 4, 8, 0, 0, 0, 0, 0])))
    lines = str(both).split("\n")
    assert re.match(r"layer +Gini +MaxVio +dead +drift", lines[0])
    assert len(lines) == 5
    assert lines[-1].startswith("worst: model.layers.1.mlp.gate, Gini 0.6")
    with pytest.raises(ConfigError, match="steps: expected 1 or more, got 0"):
        balancers.health(0)


def test_layers_that_count_nothing_are_left_out_of_health() -> None:
    """One in evaluation mode, as when only some layers are trained, and one frozen for longer than is remembered."""
    model = make_model("mixtral")
    balancers = balance(model)
    model.model.layers[0].eval()
    for step in range(70):
        if step == 1:
            balancers["model.layers.2.mlp.gate"].freeze()
        if step < 2:
            model(tokens(2, 12))
        balancers.update()
    assert list(balancers.health().layers) == ["model.layers.2.mlp.gate"]


def test_a_step_never_waits_for_the_device() -> None:
    class NoLookBack(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            assert op.overloadpacket.__name__ not in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal"), op
            return op(*args, **kwargs or {})

    for name in ("mixtral", "deepseek2 in groups", "deepseek3"):
        model = make_model(name)
        balancers = balance(model)
        routers = [model.get_submodule(where) for where in balancers]
        with NoLookBack():
            for _ in range(2):
                for router in routers:
                    router(torch.randn(2, 9, 32))
                balancers.update()
        assert balancers.health().steps == 2


def test_what_is_not_served_is_named() -> None:
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{k: v for k, v in SIZES.items() if k != "num_experts_per_tok"})
    )
    with pytest.raises(ConfigError, match="got LlamaForCausalLM with no router; put a QuantileBalancer"):
        balance(llama)
    config = transformers.JambaConfig(**SIZES, num_experts=4, use_mamba_kernels=False)
    jamba = torch.nn.Module()
    jamba.router = importlib.import_module("transformers.models.jamba.modeling_jamba").JambaTopKRouter(config)
    with pytest.raises(ConfigError, match=r"router of MixtralTopKRouter, .* got Module with JambaTopKRouter") as error:
        balance(jamba)
    assert "\n" not in str(error.value)
    model = make_model("mixtral")
    with pytest.raises(ConfigError, match="do you mean 'quantile'"):
        balance(model, "quantil")
    balance(model)
    with pytest.raises(ConfigError, match=r"got one in model.layers.0.mlp.gate; balance a model once, and keep"):
        balance(model)
    with torch.device("meta"), pytest.raises(ConfigError, match="expected weights, got a model on the meta device"):
        balance(make_model("deepseek3"))
    assert not hasattr(perilune.integrations, "imbalance")


@pytest.mark.parametrize("name", [*SOFTMAX, *BIASED_SIGMOID])
def test_every_router_served_is_in_transformers_and_computes_what_it_did(name: str) -> None:
    """A bias that is equal for all must not show, in any of them."""
    router = find_router(name)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(200, 32)
    outs = [router(x)]
    holder = torch.nn.Module()
    holder.gate = router
    balancers = balance(holder)
    outs.append(router(x))
    balancers["gate"].bias.fill_(0.25)
    outs.append(router(x))
    dense = [torch.zeros(200, E).scatter(1, ids, weights.float()) for _, weights, ids in outs]
    torch.testing.assert_close(dense[1], dense[0], rtol=0, atol=0)
    torch.testing.assert_close(dense[2], dense[0])
    assert (dense[0] > 0).sum() == 200 * K
    assert [w.dtype for _, w, _ in outs] == [outs[0][1].dtype] * 3


def find_router(name: str) -> torch.nn.Module:
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if f"class {name}(" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            break
    config = SimpleNamespace(
        num_experts_per_tok=K, num_local_experts=E, num_experts=E, n_routed_experts=E, hidden_size=32, n_group=4,
        topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=True, topk_method="group_limited_greedy",
    )  # fmt: skip
    return getattr(module, name)(config)


def test_the_callback_updates_once_a_step_and_logs() -> None:
    model = make_model("mixtral")
    balancers = balance(model)
    callback = balancers.callback()
    logs = {"loss": 1.0}
    callback.on_log(None, None, None, logs=logs)
    assert logs == {"loss": 1.0}
    for _ in range(2):
        model(tokens(2, 20))
    before = biases(balancers)
    callback.on_step_end(None, None, None, optimizer=SimpleNamespace(step_was_skipped=True))
    assert same(biases(balancers), before)
    assert not any(x.any() for x in counts(balancers))
    for _ in range(2):
        model(tokens(2, 20))
    callback.on_step_end(None, None, None, optimizer=torch.optim.SGD(model.parameters()))
    assert not same(biases(balancers), before)
    callback.on_log(None, None, None, logs=logs)
    assert logs["expert_gini"] == round(balancers.health().worst.gini, 4)
    assert set(logs) == {"loss", "expert_gini", "expert_max_violation", "expert_dead", "expert_bias_drift"}


def test_a_trainer_keeps_its_experts_balanced(tmp_path: Path) -> None:
    """The real one, with accumulation, checkpointing, evaluation and padding; its checkpoint has the bias."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model = make_model("mixtral")
    balancers = balance(model)
    updates = []
    real = balancers.update
    balancers.update = lambda *a: (updates.append(balancers["model.layers.0.mlp.gate"].counts.sum().item()), real(*a))
    rows = [
        {"input_ids": tokens(20), "labels": tokens(20), "attention_mask": torch.tensor([1] * 15 + [0] * 5)}
        for _ in range(32)
    ]
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_steps=4, report_to=[], use_cpu=True, gradient_checkpointing=True,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, args, train_dataset=rows, eval_dataset=rows[:4], callbacks=[balancers.callback()]
    )
    trainer.train()
    assert updates == [8 * 15 * K] * 4
    again = balance(make_model("mixtral"))
    again.load(tmp_path / "checkpoint-4")
    assert same(biases(again), biases(balancers))


def ranks_are_one_process(rank: int, ranks: int, wrap: str) -> None:
    torch.manual_seed(0)
    model = make_model("mixtral")
    batches = [tokens(2, 12) for _ in range(8)]
    alone_model = copy.deepcopy(model)
    alone, together = balance(alone_model), balance(model)
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))
    for step in range(2):
        for i in range(4):
            alone_model(batches[4 * step + i])
        for i in range(2):  # micro-batches
            out = wrapped(batches[4 * step + 2 * rank + i])
        out.logits.sum().backward()
        for where in alone:
            alone[where].update()
        together.update()
        assert calls == ([1, 1] if step == 0 else [1])  # all layers in one; at first ranks agree on what that is
        calls.clear()
        assert same(biases(together), biases(alone)), (rank, step)
    wrapped(batches[0])
    if rank == 1:
        together.discard()  # a rank without tokens takes part
    together.update()
    before = biases(together)
    together.pool_over(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))  # ranks that hold the same tokens
    wrapped(batches[0])
    held = counts(together)
    together.update()
    assert not same(biases(together), before)
    assert [int(x.sum()) for x in held[::2]] == [int(together[where].loads.sum()) for where in together]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_ranks_count_together(tmp_path: Path, wrap: str) -> None:
    """Two ranks with two micro-batches each are one process with four: DDP must not spread rank 0's counts."""
    run_ranks(2, tmp_path, ranks_are_one_process, wrap)


def test_the_package_itself_needs_no_transformers() -> None:
    code = "import sys, perilune.integrations; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_names_what_it_has() -> None:
    command = [sys.executable, str(ROOT / "examples" / "balance_moe.py"), "llama"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "expected one of mixtral, qwen, deepseek, got llama")


@pytest.mark.parametrize("name", ["mixtral", "qwen", "deepseek"])
def test_the_example_runs(name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "balance_moe.py"), name, "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    ends = dict(re.findall(r"^(none|aux|quantile) +Gini [\d.]+; ([\d.]+)", done.stdout, flags=re.MULTILINE))
    assert set(ends) == {"none", "aux", "quantile"}
    assert float(ends["quantile"]) < float(ends["none"])

"""Several of our techniques in one model of `transformers`: in any order, and what people do with it then."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from perilune.core.errors import ConfigError
from perilune.integrations import add_attn_res, balance, load_attn_res, replace_attention

E, K, LAYERS = 8, 2, 4
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "pad_token_id": 0,
    "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
    "num_experts_per_tok": K,
}  # fmt: skip
QWEN = {"num_experts": E, "moe_intermediate_size": 16}
LATENT = {
    "n_routed_experts": E, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=E)),
    "qwen2": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **QWEN, shared_expert_intermediate_size=16)),
    "qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **QWEN, head_dim=16)),
    "deepseek3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **LATENT)),
}
STEPS = {
    "attention": replace_attention,
    "residuals": lambda model: add_attn_res(model, 2),
    "balancers": balance,
}
EACH = pytest.mark.parametrize("family", FAMILIES)


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]()


def changed(family: str, *steps: str):
    """The model after those steps, its matrices, queries and biases the same for all orders; and the balancers."""
    model = make(family)
    handle = {step: STEPS[step](model) for step in steps}.get("balancers")
    for name, p in sorted(model.named_parameters()):
        if p.dim() == 2 or name.endswith(".query"):
            nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(len(name) + p.numel()))
    for name in handle or ():
        handle[name].bias.copy_(torch.linspace(-0.02, 0.02, E))
    return model.eval(), handle


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(7))


@EACH
def test_any_order_is_the_same_model(family: str) -> None:
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    found = []
    for order in itertools.permutations(STEPS):
        model, balancers = changed(family, *order)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
        prompt = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        written = [model.generate(ids, use_cache=use, **prompt) for use in (True, False)]
        assert torch.equal(*written)
        model.train()
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        assert [int(balancers[name].counts.sum()) for name in balancers] == [19 * K] * len(balancers)
        found.append((logits, written[0], {name: p.grad for name, p in model.named_parameters()}))
    for logits, written, gradients in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert torch.equal(written, found[0][1])
        torch.testing.assert_close(gradients, found[0][2], rtol=0, atol=0)


@EACH
@pytest.mark.parametrize("block_size", ["full", 1, LAYERS])
def test_attention_residuals_start_as_the_mixture_of_experts_that_was_there(family: str, block_size) -> None:
    model, ids = make(family).eval(), tokens(2, 12)
    before = model(ids, output_router_logits=True)
    mixers = add_attn_res(model, block_size)
    after = model(ids, output_router_logits=True)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-4, atol=1e-5)
    if before.get("router_logits"):
        torch.testing.assert_close(after.router_logits, before.router_logits, rtol=1e-5, atol=1e-5)
    for mixer in mixers:
        nn.init.normal_(mixer.query)
    assert (model(ids).logits - before.logits).abs().max() > 1e-4


@EACH
def test_mixers_and_biases_come_back_from_disk(family: str, tmp_path: Path) -> None:
    model, balancers = changed(family, "residuals", "balancers")
    model.save_pretrained(tmp_path)
    again = load_attn_res(type(model), tmp_path).eval()
    others = balance(again)
    others.load(tmp_path)
    assert all(torch.equal(others[name].bias, balancers[name].bias) for name in balancers)
    with torch.no_grad():
        assert torch.equal(again(tokens(2, 9)).logits, model(tokens(2, 9)).logits)
        bare = load_attn_res(type(model.model), tmp_path).eval()  # without its head
        balance(bare).load(tmp_path)
        hidden = model.model(tokens(2, 9)).last_hidden_state
        assert torch.equal(bare(tokens(2, 9)).last_hidden_state, hidden)
    with pytest.raises(ConfigError, match="model_class: expected a model's own class, got AutoModelForCausalLM; give"):
        load_attn_res(AutoModelForCausalLM, tmp_path)


def test_a_model_with_another_attention_is_not_loaded_without_it(tmp_path: Path) -> None:
    model, _ = changed("qwen3", "attention", "residuals")
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"folder: expected the attention of Qwen3Moe.*, got model.layers.0.self_attn.k"
    ):
        load_attn_res(type(model), tmp_path)
    assert any(".kda." in name for name in load_file(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = FAMILIES["qwen3"]()
    replace_attention(again)
    add_attn_res(again, 2)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens(2, 9)).logits, model(tokens(2, 9)).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_trainer_trains_all_of_it(tmp_path: Path, reentrant: bool) -> None:
    """With recomputation, accumulation and padding: what was counted is each token once."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model, balancers = changed("mixtral", *STEPS)
    before = {name: p.clone() for name, p in model.named_parameters()}
    counted, update = [], balancers.update
    balancers.update = lambda: (counted.append([int(balancers[name].counts.sum()) for name in balancers]), update())
    rows = [
        {"input_ids": tokens(20), "labels": tokens(20), "attention_mask": torch.tensor([0] * 5 + [1] * 15)}
        for _ in range(16)
    ]
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, save_strategy="no",
        report_to=[], use_cpu=True, gradient_checkpointing=True, disable_tqdm=True, learning_rate=1e-2,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[balancers.callback()])
    trainer.train()
    assert counted == [[4 * 15 * K] * LAYERS] * 3
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    first = "model.layers.0.self_attention_res"  # which has one source
    assert still == {f"{first}.norm.weight", f"{first}.query"}


def test_models_that_accelerate_has_hooks_in_are_refused() -> None:
    """Their layers' forward is another's, which knows of no new class: mixers would be there and never be asked."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = make("mixtral").eval(), tokens(2, 9)
    before, names = model(ids).logits, [name for name, _ in model.named_parameters()]
    hooks.add_hook_to_module(model.model.layers[2], hooks.ModelHook())
    with pytest.raises(ConfigError, match=r"got a MixtralDecoderLayer with one of its own, as device_map leaves it"):
        add_attn_res(model, 2)
    hooks.add_hook_to_module(model.model.layers[1].mlp.gate, hooks.ModelHook())
    with pytest.raises(ConfigError, match=r"got a MixtralTopKRouter with one .*; load it on one device, add balancers"):
        balance(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(ids).logits, before)
    for module in model.modules():
        hooks.remove_hook_from_module(module)
        vars(module).pop("forward", None)  # which it leaves, bound
    balancers = balance(model)
    mixers = add_attn_res(model, 2)
    hooks.add_hook_to_module(model.model.layers[2], hooks.ModelHook())  # afterwards they do no harm
    for mixer in mixers:
        nn.init.normal_(mixer.query)
    assert (model.train()(ids).logits - before).abs().max() > 1e-4
    assert [int(balancers[name].counts.sum()) for name in balancers] == [18 * K] * LAYERS

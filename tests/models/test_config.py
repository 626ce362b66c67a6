"""Released configs in and out, what is refused, the layer schedule, and that no torch is needed for any of it."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

from perilune import recipes
from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Config, K3Model, presets
from perilune.models.k3.config import hybrid_layers
from perilune.ops import BoundedGate, SoftplusGate

K3_TEXT = {
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 7168,
    "num_hidden_layers": 93, "vocab_size": 163840, "intermediate_size": 33792, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "mla_use_output_gate": True, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.0,
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
    "max_position_embeddings": 1048576, "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
        "gate_lower_bound": -5.0, "full_attn_layers": [*range(4, 93, 4), 93],
        "kda_layers": [i for i in range(1, 93) if i % 4],
    },
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}  # fmt: skip
K3_RELEASED = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "ignore_index": -100,
    "image_placeholder": "<image>", "media_placeholder_token_id": 163605, "tie_word_embeddings": False,
    "text_config": K3_TEXT, "vision_config": presets.VISION,
}  # fmt: skip
KIMI_LINEAR_RELEASED = {
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 2304,
    "num_hidden_layers": 27, "vocab_size": 163840, "intermediate_size": 9216, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "model_max_length": 1048576, "head_dim": 72, "rope_theta": 10000.0,
    "linear_attn_config": {
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [i for i in range(1, 27) if i % 4],
    },
}  # fmt: skip
TINY = {
    **KIMI_LINEAR_RELEASED, "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 24,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 3, "v_head_dim": 5, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 8,
    "linear_attn_config": {
        "num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1],
    },
}  # fmt: skip
ARCHITECTURAL = [
    "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "rms_norm_eps", "num_attention_heads",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_attn_config", "hidden_act",
    "first_k_dense_replace", "moe_layer_freq", "num_experts", "num_experts_per_token", "num_shared_experts",
    "moe_intermediate_size", "moe_router_activation_func", "moe_renormalize", "routed_scaling_factor",
]  # fmt: skip


def changed(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with changes; `linear__head_dim` reaches into `linear_attn_config`."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        where = values["linear_attn_config"] if key.startswith("linear__") else values
        where[key.removeprefix("linear__")] = value
    return values


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        K3Config.from_hf(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_holds(got: dict[str, Any], released: dict[str, Any], where: str = "") -> None:
    """Every released key is in `got` with the same value; null is a missing key."""
    for key, value in released.items():
        if isinstance(value, dict):
            assert_holds(got[key], value, f"{where}{key}.")
        else:
            assert got.get(key) == value, f"{where}{key}"


# released configs


@pytest.mark.parametrize("released", [K3_RELEASED, K3_TEXT, KIMI_LINEAR_RELEASED], ids=["k3", "k3_text", "kimi_linear"])
def test_every_released_key_maps_back(released: dict[str, Any]) -> None:
    config = K3Config.from_hf(copy.deepcopy(released))
    written = config.to_hf()
    assert_holds(written, released)
    assert K3Config.from_hf(written) == config


def test_presets_are_the_released_configs() -> None:
    k3, kimi = K3Config.from_hf(K3_RELEASED), K3Config.from_hf(KIMI_LINEAR_RELEASED)
    assert presets.k3().replace(carried={}) == k3.replace(carried={})
    assert presets.kimi_linear_48b().replace(carried={}) == kimi.replace(carried={})
    assert presets.k3().vision == K3_RELEASED["vision_config"]
    assert kimi.vision is None


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_survive_the_trip(name: str) -> None:
    config = presets.get(name)
    assert K3Config.from_hf(config.to_hf()) == config
    assert K3Config.from_dict(config.to_dict()) == config


def test_own_keys_survive_the_trip() -> None:
    config = presets.nano().replace(layer_types=("mla", "kda", "kda", "mla"), mtp_loss_weight=0.3)
    config = config.override(['balance.options={"bins": null}', "attn_res_block_size=full"])
    assert config.balance.options == {"bins": None}
    assert K3Config.from_hf(config.to_hf()) == config


def test_from_hf_leaves_its_argument_alone() -> None:
    values = copy.deepcopy(K3_RELEASED)
    K3Config.from_hf(values)
    assert values == K3_RELEASED


def test_tying_is_read_from_the_outer_config() -> None:
    assert K3Config.from_hf({**K3_RELEASED, "tie_word_embeddings": True}).tie_word_embeddings
    assert not K3Config.from_hf(K3_RELEASED).tie_word_embeddings


# what a missing switch means


def test_missing_switches_give_kimi_linear() -> None:
    model = K3Model(K3Config.from_hf(TINY))
    kda, mla = (layer.self_attn for layer in model.model.layers)
    assert isinstance(kda.gate, SoftplusGate)
    assert not kda.full_rank_gate
    assert mla.q_lora_rank is None
    assert mla.g_proj is None
    moe = model.model.layers[1].block_sparse_moe
    assert moe.routed_expert_down_proj is None
    assert moe.activation == "silu"
    assert model.config.residual_period is None
    assert model.model.output_attn_res is None


@pytest.mark.parametrize(
    "key",
    ["attn_res_block_size", "routed_expert_hidden_size", "latent_moe_use_norm", "mla_use_output_gate",
     "linear__gate_lower_bound", "linear__use_full_rank_gate"],
)  # fmt: skip
def test_null_is_missing(key: str) -> None:
    assert K3Config.from_hf(changed(TINY, **{key: None})) == K3Config.from_hf(TINY)


def test_a_lower_bound_gives_the_bounded_gate() -> None:
    model = K3Model(K3Config.from_hf(changed(TINY, linear__gate_lower_bound=-5.0)))
    gate = model.model.layers[0].self_attn.gate
    assert isinstance(gate, BoundedGate)
    assert gate.g_min == -5.0


# refusals


@pytest.mark.parametrize("key", ARCHITECTURAL)
def test_a_missing_architectural_key_is_refused(key: str) -> None:
    assert key in refusal({k: v for k, v in TINY.items() if k != key})
    assert key in refusal(changed(TINY, **{key: None}))


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers"])
def test_a_missing_linear_attention_key_is_refused(key: str) -> None:
    values = copy.deepcopy(TINY)
    del values["linear_attn_config"][key]
    assert key in refusal(values)


def test_an_unknown_key_names_the_nearest() -> None:
    assert "'hidden_sizes'; do you mean 'hidden_size'?" in refusal({**TINY, "hidden_sizes": 3})
    assert "do you mean 'gate_lower_bound'?" in refusal(changed(TINY, linear__gate_lower_bond=-5.0))
    assert "'vision_confg'; do you mean 'vision_config'?" in refusal({**K3_RELEASED, "vision_confg": {}})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mla_use_nope": False}, "mla_use_nope: expected true"),
        ({"attention_bias": True}, "attention_bias: expected false"),
        ({"num_key_value_heads": 1}, "num_key_value_heads: expected num_attention_heads (2), got 1"),
        ({"hidden_act": "gelu"}, "hidden_act: expected one of 'situ', 'silu'"),
        ({"hidden_act": "situ"}, "activation_situ_beta"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func: expected one of 'sigmoid'"),
        ({"num_experts_per_token": 5}, "num_experts_per_token: expected from 1 to num_experts (4), got 5"),
        ({"num_expert_group": 3}, "num_expert_group: expected a divisor"),
        ({"num_expert_group": 2, "topk_group": 3}, "topk_group: expected from 1 to num_expert_group (2)"),
        ({"num_expert_group": 4, "num_experts_per_token": 2}, "with room for 2 choices, got 1; keep more groups"),
        ({"attn_res_block_size": 0}, "attn_res_block_size: expected at least 1"),
        ({"hidden_size": "16"}, "hidden_size: expected int, got '16'"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1"),
        ({"linear__kda_layers": []}, "every number from 1 to 2 once, got [2]"),
        ({"linear__kda_layers": [1, 2]}, "every number from 1 to 2 once, got [1, 2, 2]"),
        ({"linear__kda_layers": [0]}, "counted from 1"),
        ({"linear__full_attn_layers": [2, 3]}, "every number from 1 to 2 once, got [1, 2, 3]"),
        ({"num_hidden_layers": 3}, "every number from 1 to 3 once, got [1, 2]"),
    ],
)
def test_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(changed(TINY, **changes))


def test_layer_types_must_name_every_layer() -> None:
    with pytest.raises(ConfigError, match="layer_types: expected 4 entries"):
        presets.nano().replace(layer_types=("kda", "mla"))


# the schedule


@pytest.mark.parametrize(
    ("layers", "mla"),
    [
        (93, [*range(3, 92, 4), 92]),
        (27, [3, 7, 11, 15, 19, 23, 26]),
        (8, [3, 7]),
        (9, [3, 7, 8]),
    ],
)
def test_schedule(layers: int, mla: list[int]) -> None:
    lists = hybrid_layers(layers)
    assert [i - 1 for i in lists["full_attn_layers"]] == mla
    assert sorted((*lists["kda_layers"], *lists["full_attn_layers"])) == list(range(1, layers + 1))


@pytest.mark.parametrize(
    ("released", "mla"),
    [(K3_RELEASED, [*range(3, 92, 4), 92]), (KIMI_LINEAR_RELEASED, [3, 7, 11, 15, 19, 23, 26])],
    ids=["k3", "kimi_linear"],
)
def test_released_lists_are_counted_from_one(released: dict[str, Any], mla: list[int]) -> None:
    config = K3Config.from_hf(released)
    kinds = [config.attention(i) for i in range(config.num_hidden_layers)]
    assert [i for i, kind in enumerate(kinds) if kind == "mla"] == mla
    assert kinds.count("kda") == (69 if released is K3_RELEASED else 20)
    assert [i for i in range(config.num_hidden_layers) if not config.is_moe(i)] == [0]


# building without memory, importing without torch


def test_recipes_build_on_the_meta_device() -> None:
    for name in recipes.RECIPES:
        with torch.device("meta"):
            model = K3Model(recipes.get(name).model)
        assert all(p.is_meta for p in model.parameters())


def test_no_torch_for_configs_and_recipes() -> None:
    code = (
        "import sys; import perilune.recipes, perilune.models.k3.presets as p; from perilune.models.k3 import K3Config;"
        "K3Config.from_hf(p.k3().to_hf()); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"

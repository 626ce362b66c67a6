"""Kimi Linear against the implementation in `transformers`, which nobody here wrote, through files, both ways."""

import copy
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # kernels and configs come from this machine

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear

from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Config, K3Model
from perilune.models.k3.convert import released_views

KEYS = {  # as the Kimi Linear release spells them; sizes chosen to tell every axis from every other
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 26,
    "num_hidden_layers": 5, "vocab_size": 61, "intermediate_size": 34, "first_k_dense_replace": 2,
    "moe_layer_freq": 1, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": None,
    "kv_lora_rank": 10, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 9, "mla_use_nope": True,
    "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 2, "moe_intermediate_size": 11,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "tie_word_embeddings": False, "model_max_length": 512, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
    "linear_attn_config": {
        "num_heads": 5, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [2, 5],
        "kda_layers": [1, 3, 4],
    },
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "query low rank": {"q_lora_rank": 12},
    "expert groups": {"num_expert_group": 3, "topk_group": 2},
    "raw weights": {"moe_renormalize": False},
}


def spread_(name: str, tensor: Tensor) -> None:
    """Values that make every part of the model count: logits of size 1, decay slow and fast, a real selection bias."""
    with torch.no_grad():
        if name.endswith("A_log"):
            tensor.uniform_(-1, 1)
        elif name.endswith("dt_bias"):
            tensor.uniform_(-4, 1)
        elif name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.2)
        elif "norm" in name:
            tensor.normal_(1, 0.2)
        elif "embed_tokens" in name:
            tensor.normal_()
        elif "conv1d" in name:
            tensor.normal_(std=0.5)
        else:
            gain = 0.6 if "lm_head" in name else 1.0
            tensor.normal_(std=gain * tensor.shape[-1] ** -0.5)


def plain(model: KimiLinearForCausalLM) -> KimiLinearForCausalLM:
    """On its eager paths: the fused ones want sizes in multiples of 16 bytes."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model.eval()


def theirs(**changes: Any) -> KimiLinearForCausalLM:
    torch.manual_seed(1)
    model = plain(KimiLinearForCausalLM(KimiLinearConfig.from_dict(KEYS | changes)))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        spread_(name, tensor)
    return model


def ours(**changes: Any) -> K3Model:
    torch.manual_seed(2)
    model = K3Model(K3Config.from_hf(KEYS | changes)).eval()
    for name, view in released_views(model).items():
        spread_(name, view)
    return model


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).logits


def prompt(batch: int = 2, length: int = 70) -> Tensor:
    """Longer than a chunk of 64, so that the state is handed over."""
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(3))


def assert_equal_logits(got: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


class WideTorch:
    """`torch`, but what is called float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def float64_islands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code computes in float64 where it says float32: a whole forward without a float32 rounding."""
    monkeypatch.setattr(modeling_kimi_linear, "torch", WideTorch())
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, K3Model, Path]:
    """Their model, ours read from the folder they wrote, the folder."""
    folder = tmp_path_factory.mktemp("theirs")
    model = theirs(**VARIANTS[request.param])
    model.save_pretrained(folder)
    return model, K3Model.from_pretrained(folder).eval(), folder


def test_their_folder_gives_our_model_their_logits(pair: tuple[nn.Module, K3Model, Path]) -> None:
    their_model, our_model, _ = pair
    ids = prompt()
    assert_equal_logits(logits_of(our_model, ids), logits_of(their_model, ids))


@pytest.mark.usefixtures("float64_islands")
def test_equal_in_float64(pair: tuple[nn.Module, K3Model, Path]) -> None:
    """Tight enough to tell 1e-6 from 1e-5 under a root, and one way of normalising q and k from another."""
    their_model, _, folder = pair
    ids = prompt()
    expected = logits_of(copy.deepcopy(their_model).double(), ids)
    got = logits_of(K3Model.from_pretrained(folder, dtype=torch.float64).eval(), ids)
    assert expected.dtype == got.dtype == torch.float64
    assert_equal_logits(got, expected, atol=1e-12)


@torch.no_grad()
def test_our_cache_against_their_one_pass(pair: tuple[nn.Module, K3Model, Path]) -> None:
    their_model, our_model, _ = pair
    ids = prompt(length=40)
    cache = our_model.new_cache(2)
    pieces = ids.split([17, 1, 9, *[1] * 13], dim=1)
    got = torch.cat([our_model(piece, cache=cache).logits for piece in pieces], dim=1)
    assert_equal_logits(got, logits_of(their_model, ids))


@torch.no_grad()
def test_our_cache_against_their_cache(pair: tuple[nn.Module, K3Model, Path]) -> None:
    their_model, our_model, _ = pair
    ids = prompt(length=24)
    ours_cache, theirs_cache = our_model.new_cache(2), None
    for piece in ids.split([19, 1, 1, 1, 1, 1], dim=1):
        output = their_model(piece, cache=theirs_cache, use_cache=True)
        theirs_cache = output.cache
        assert_equal_logits(our_model(piece, cache=ours_cache).logits, output.logits)


def test_losses_and_gradients(pair: tuple[nn.Module, K3Model, Path]) -> None:
    """The loss, and its gradient at both ends of the network."""
    their_model, our_model, _ = pair
    ids = prompt(length=33)
    their_model.zero_grad()
    our_model.zero_grad()
    expected, got = their_model(ids, labels=ids).loss, our_model(ids, labels=ids).loss
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    expected.backward()
    got.backward()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.4.mlp.gate.weight"):
        mine = our_model.get_parameter(name.replace("layers.4.mlp.gate", "layers.4.block_sparse_moe.gate")).grad
        other = their_model.get_parameter(name).grad
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5 * other.abs().max().item(), msg=name)


def test_their_tensors_are_ours_bit_for_bit(pair: tuple[nn.Module, K3Model, Path], tmp_path: Path) -> None:
    """Read and written again, every tensor has the released name and their bits."""
    _, our_model, folder = pair
    our_model.save_pretrained(tmp_path)
    stored = load_file(folder / "model.safetensors")
    # on their way out dense layers get the experts' prefix, which no release has and both libraries read back
    released = {
        name.replace("block_sparse_moe", "mlp") if name.count(".") == 5 and "_proj" in name else name: tensor
        for name, tensor in stored.items()
    }
    again = load_file(tmp_path / "model.safetensors")
    assert set(again) == set(released)
    for name, tensor in again.items():
        assert tensor.dtype == released[name].dtype, name
        assert torch.equal(tensor, released[name]), name


def test_their_config_is_understood(pair: tuple[nn.Module, K3Model, Path]) -> None:
    their_model, our_model, _ = pair
    config, linear = our_model.config, our_model.config.linear_attn_config
    assert (linear.kda_layers, linear.full_attn_layers) == ((1, 3, 4), (2, 5))
    assert (linear.num_heads, linear.head_dim, linear.short_conv_kernel_size) == (5, 8, 4)
    assert linear.gate_lower_bound is None
    assert [config.is_moe(i) for i in range(5)] == [False, False, True, True, True]
    assert config.q_lora_rank == their_model.config.q_lora_rank
    assert K3Config.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_folder_gives_their_model_our_logits(variant: str, tmp_path: Path) -> None:
    our_model = ours(**VARIANTS[variant])
    our_model.save_pretrained(tmp_path)
    their_model, report = KimiLinearForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    ids = prompt()
    assert_equal_logits(logits_of(plain(their_model), ids), logits_of(our_model, ids))


def test_there_and_back(tmp_path: Path) -> None:
    """Ours, loaded and saved by them, is ours again."""
    our_model = ours()
    our_model.save_pretrained(tmp_path / "ours")
    KimiLinearForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = K3Model.from_pretrained(tmp_path / "theirs")
    for name, view in released_views(again).items():
        assert torch.equal(view, released_views(our_model)[name]), name


def test_their_config_without_a_released_one() -> None:
    """Built from their own arguments, it holds none of the released keys that they rename."""
    config = KimiLinearConfig(
        hidden_size=26, num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"], linear_num_heads=5, linear_head_dim=8,
    )  # fmt: skip
    values = json.loads(config.to_json_string())
    assert "linear_attn_config" not in values
    assert "first_k_dense_replace" not in values
    got = K3Config.from_hf(values)
    assert [got.attention(i) for i in range(3)] == ["mla", "kda", "mla"]
    assert got.first_k_dense_replace == 1
    values["mlp_layer_types"] = ["sparse", "dense", "sparse"]
    with pytest.raises(ConfigError, match="mlp_layer_types: expected all 'dense' before all 'sparse'"):
        K3Config.from_hf(values)


def test_what_they_do_not_know_survives_them() -> None:
    """Their config class carries the keys of K3 along; they still mean what they meant."""
    linear = {**KEYS["linear_attn_config"], "gate_lower_bound": -5.0, "use_full_rank_gate": True}
    values = {**KEYS, "linear_attn_config": linear, "mla_use_output_gate": True, "attn_res_block_size": 2}
    got = K3Config.from_hf(json.loads(KimiLinearConfig.from_dict(values).to_json_string()))
    assert got.replace(carried={}) == K3Config.from_hf(values).replace(carried={})

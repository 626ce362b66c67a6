"""The operations counted on paper, against those torch counts while a model runs on a CPU.

torch counts products of dense matrices.  Two of its kernels it does not see, so they are kept away: experts are in
float64, all chosen, so that they run as one batched product without padding; attention is written out.
"""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tiny_k3
from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Config, K3Model, presets
from perilune.models.k3.audit import audit
from perilune.models.k3.flops import flops_per_token, mixer_sources, training_flops_per_token
from perilune.ops.kda.chunked import CHUNK

TOKENS = 2 * CHUNK
KINDS = ("kda", "mla")


def counted(config: K3Config) -> dict[str, float]:
    """Operations a token of one document of TOKENS, by part."""
    model = K3Model(config).double()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.randint(config.vocab_size, (1, TOKENS)))
    modules = {name: sum(ops.values()) / TOKENS for name, ops in counter.get_flop_counts().items()}

    def total(pattern: str) -> float:
        return sum(flops for name, flops in modules.items() if re.search(pattern + "$", name))

    layers = {kind: [i for i in range(config.num_hidden_layers) if config.attention(i) == kind] for kind in KINDS}
    inside = {kind: "|".join(rf"layers\.{i}\.self_attn" for i in layers[kind]) for kind in KINDS}
    linear = {kind: total(rf"({inside[kind]})\.\w*_proj(_with_mqa)?") for kind in KINDS}
    beside = total(r"block_sparse_moe\.(gate|shared_experts|routed_expert_(up|down)_proj)")
    return {
        "KDA projections": linear["kda"],
        "KDA recurrence": total(f"({inside['kda']})") - linear["kda"],
        "MLA projections": linear["mla"],
        "MLA attention": total(f"({inside['mla']})") - linear["mla"],
        "dense feed-forward": total(r"\.mlp"),
        "shared experts, router, latent projections": beside,
        "routed experts": total("block_sparse_moe") - beside,
        "head": total("lm_head"),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "mla_use_output_gate": False},
        {"routed_expert_hidden_size": None, "latent_moe_use_norm": False, "num_shared_experts": 3},
        {"vocab_size": 70, "first_k_dense_replace": 3, "attn_res_block_size": None},
        {"linear_attn_config": tiny_k3.config().linear_attn_config.replace(use_full_rank_gate=False)},
    ],
    ids=lambda changes: ", ".join(changes) or "as it is",
)
def test_products_are_those_torch_counts(changes) -> None:
    config = tiny_k3.config(num_experts=4, num_experts_per_token=4, **changes)
    measured, parts = counted(config), flops_per_token(config, TOKENS, kda_chunk=CHUNK)
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    # Written out, each token meets all keys, and values are padded to the keys' width
    measured["MLA attention"] *= (TOKENS + 1) / 2 / TOKENS * (key + value) / (2 * key)
    recurrence = measured.pop("KDA recurrence")
    for part, flops in measured.items():
        assert flops == pytest.approx(parts[part], rel=1e-12), part
    # A and P are made block by block below the diagonal there, and counted whole here
    assert 0.5 <= recurrence / parts["KDA recurrence"] <= 1


def test_parts_are_all_there_are() -> None:
    config = tiny_k3.config(num_experts=4, num_experts_per_token=4)
    assert set(flops_per_token(config, TOKENS)) - set(counted(config)) == {"attention residuals", "short convolutions"}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_products_are_twice_the_active_parameters(name: str) -> None:
    """Of any preset: a matrix that a token meets costs it two operations a number."""
    config = presets.get(name)
    parts = flops_per_token(config, 8192)
    beside = ("MLA attention", "KDA recurrence", "short convolutions", "attention residuals")
    products = sum(flops for part, flops in parts.items() if part not in beside)
    assert 0.98 < products / (2 * audit(config).active) < 1  # norms, biases and filters are parameters too
    assert training_flops_per_token(config, 8192) == 3 * sum(parts.values())


def test_a_longer_context_costs_attention_alone() -> None:
    short, long = (flops_per_token(presets.k3(), n) for n in (8192, 1_048_576))
    assert {part for part in short if short[part] != long[part]} == {"MLA attention"}
    assert long["MLA attention"] / short["MLA attention"] == pytest.approx(1_048_577 / 8193)
    layers, heads, widths = 24, 96, 192 + 128
    assert short["MLA attention"] == 2 * layers * heads * widths * 8193 / 2


def test_multi_token_prediction_is_a_layer_and_a_head() -> None:
    config = presets.nano()
    plain, more = flops_per_token(config, 128), flops_per_token(config.replace(num_nextn_predict_layers=2), 128)
    extra = more.pop("multi-token prediction")
    assert more == plain
    experts = sum(plain[p] for p in ("routed experts", "shared experts, router, latent projections")) / 3
    attention = plain["MLA projections"] + plain["MLA attention"]
    assert extra == 2 * (plain["head"] + attention + experts + 4 * 128**2)


def test_sources_of_93_layers() -> None:
    sources = mixer_sources(presets.k3())  # the model's own are counted in test_audit
    assert (len(sources), sum(sources), sources[:3], max(sources)) == (187, 1003, [1, 2, 2], 9)
    assert mixer_sources(presets.kimi_linear_48b()) == []


def test_another_attention_is_refused() -> None:
    config = tiny_k3.config(layer_types=("kda", "mla", "sparse", "kda", "mla"))
    with pytest.raises(ConfigError, match="layer_types: expected kda or mla to count operations, got 'sparse'"):
        flops_per_token(config, 8)

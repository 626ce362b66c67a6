"""Which attention a layer has: names in the configuration, resolved here.

Another attention joins without an edit to this package: `register("name", AttentionKind(build, blocks))`, then
`layer_types` in the configuration may name it.  What `build` returns is called as
`attention(x, cache=..., cu_seqlens=...)` and makes its own cache with `new_cache(batch)`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from perilune.core.errors import ConfigError, nearest
from perilune.models.k3.config import K3Config
from perilune.nn import GatedMLA, KimiDeltaAttention
from perilune.optim.roles import Blocks


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention layer."""

    build: Callable[[K3Config], nn.Module]
    blocks: Callable[[K3Config], dict[str, Blocks]]
    """Per weight matrix, by parameter name inside the module, how Muon cuts it; what is not named goes to AdamW."""


def build_kda(config: K3Config) -> nn.Module:
    linear = config.linear_attn_config
    return KimiDeltaAttention(
        config.hidden_size,
        linear.num_heads,
        linear.head_dim,
        g_min=linear.gate_lower_bound,
        conv_size=linear.short_conv_kernel_size,
        full_rank_gate=linear.use_full_rank_gate,
        norm_eps=config.rms_norm_eps,
    )


def kda_blocks(config: K3Config) -> dict[str, Blocks]:
    heads = Blocks(repeat=config.linear_attn_config.num_heads)
    per_head = {f"{name}.weight": heads for name in ("q_proj", "k_proj", "v_proj")}
    gate = ("g_proj",) if config.linear_attn_config.use_full_rank_gate else ("g_a_proj", "g_b_proj")
    whole = {f"{name}.weight": Blocks() for name in ("f_a_proj", "f_b_proj", "b_proj", *gate, "o_proj")}
    return per_head | whole


def build_mla(config: K3Config) -> nn.Module:
    return GatedMLA(
        config.hidden_size,
        config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        nope_head_dim=config.qk_nope_head_dim,
        rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        output_gate=config.mla_use_output_gate,
    )


def mla_blocks(config: K3Config) -> dict[str, Blocks]:
    heads = config.num_attention_heads
    low_rank = config.q_lora_rank is not None
    per_head = {
        ("q_b_proj.weight" if low_rank else "q_proj.weight"): Blocks(repeat=heads),
        "kv_b_proj.weight": Blocks((config.qk_nope_head_dim, config.v_head_dim), repeat=heads),  # keys, then values
    }
    names = [*(["q_a_proj"] if low_rank else []), "kv_a_proj_with_mqa"]
    names += [*(["g_proj"] if config.mla_use_output_gate else []), "o_proj"]
    return per_head | {f"{name}.weight": Blocks() for name in names}


KINDS: dict[str, AttentionKind] = {
    "kda": AttentionKind(build_kda, kda_blocks),
    "mla": AttentionKind(build_mla, mla_blocks),
}


def register(name: str, kind: AttentionKind) -> None:
    """Makes `name` known to `layer_types`."""
    if name in KINDS:
        raise ConfigError(f"attention: expected a new name, got {name!r}, which is taken; choose another")
    KINDS[name] = kind


def kind_of(name: str) -> AttentionKind:
    if name not in KINDS:
        raise ConfigError(f"layer_types: unknown attention {name!r}; {nearest(name, KINDS)}")
    return KINDS[name]

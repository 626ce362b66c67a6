"""Operations of a token, counted by formula, and the width at which a variant costs what the plain residual does.

Counted are multiplications and additions of matrix products, of attention, and of the mixers; of the forward pass, the
backward being twice that in every part.  Norms, activations and convolutions are left out: all variants have the same.
"""

import json
from dataclasses import dataclass
from functools import cache

import torch

from experiments.depth.recipes import Stack, Variant
from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Config, K3Model
from perilune.models.k3.flops import mixer_sources

CLOSE = 0.01
"""Share by which a variant's compute may differ from the plain residual's."""


@dataclass(frozen=True)
class Compute:
    """Of one token, forward."""

    matrices: float
    attention: float
    mixers: float
    bypass: float

    @property
    def total(self) -> float:
        return self.matrices + self.attention + self.mixers + self.bypass


def compute(config: K3Config, context: int, bypasses: int = 0, rank: int = 0) -> Compute:
    """2 a weight, a query's products with the (T + 1) / 2 keys it sees on average, 7 K V a head of KDA, and 6 D a
    source: its norm, its score and its share of the mixture."""
    linear, D = config.linear_attn_config, config.hidden_size
    mla = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    of_kind = {"mla": 2 * mla * (context + 1) / 2, "kda": 7 * linear.num_heads * linear.head_dim**2}
    return Compute(
        matrices=2 * weights(config),
        attention=sum(of_kind[config.attention(i)] for i in range(config.num_hidden_layers)),
        mixers=6 * D * sum(mixer_sources(config)),
        bypass=bypasses * 4 * D * rank,
    )


def weights(config: K3Config) -> float:
    """Of matrices, those that one token meets: the head counted, the embedding not, of experts those it is sent to."""
    dense = sum(not config.is_moe(i) for i in range(config.num_hidden_layers))
    bare = config.replace(attn_res_block_size=None, intermediate_size=1)  # mixers have no matrices
    return counted(json.dumps(bare.to_dict())) + 3 * config.hidden_size * dense * (config.intermediate_size - 1)


@cache
def counted(config: str) -> float:
    """`weights` of a configuration as JSON, of the model itself, built without memory."""
    with torch.device("meta"):
        model = K3Model(K3Config.from_dict(json.loads(config)))
    share = model.config.num_experts_per_token / max(1, model.config.num_experts)
    matrices = {name: role.param for name, role in model.parameter_roles().items() if role.kind == "muon"}
    matrices["lm_head.weight"] = model.lm_head.weight
    return sum(w.numel() * (share if ".experts." in name else 1) for name, w in matrices.items())


def fitted(stack: Stack, variant: Variant) -> K3Config:
    """The variant's configuration, its dense feed-forward so wide that a token costs what it costs without.

    Raises ConfigError where no width brings it within CLOSE.
    """
    plain = stack.config()
    config = plain.replace(attn_res_block_size=variant.block, rms_norm_eps=variant.eps or plain.rms_norm_eps)
    target, found = compute(plain, stack.context).total, spent(stack, variant, config)
    wider = config.replace(intermediate_size=config.intermediate_size + stack.grain)
    grain = spent(stack, variant, wider) - found
    width = config.intermediate_size - stack.grain * round((found - target) / grain)
    if width < 1:
        raise ConfigError(f"{stack.name}, {variant.name}: expected a feed-forward to make narrower, got none left")
    config = config.replace(intermediate_size=width)
    if abs(spent(stack, variant, config) / target - 1) > CLOSE:
        raise ConfigError(f"{stack.name}, {variant.name}: expected equal compute, got none within {CLOSE:.0%}")
    return config


def spent(stack: Stack, variant: Variant, config: K3Config) -> float:
    taps = len(stack.bypasses()) if variant.bypass else 0
    return compute(config, stack.context, taps, stack.rank).total

"""What one token costs in floating-point operations, by part: 2 a multiply-add, forward only.

A backward pass costs twice that: each product has two gradients.  Imports without torch.
"""

from collections.abc import Iterator
from itertools import chain

from perilune.core.errors import ConfigError
from perilune.models.k3.config import K3Config

KDA_CHUNK = 64  # rows of a chunk in the GPU kernels (`perilune.ops.kda.kernels.plan`)

TRAINING = 3  # forwards: one, and a backward of two

Part = tuple[str, float]


def flops_per_token(config: K3Config, context: int, *, kda_chunk: int = KDA_CHUNK) -> dict[str, float]:
    """Operations of one token's forward pass, by part; 2 for each multiply-add.

    context: tokens of a document; a token of it sees (context + 1) / 2 keys in the mean.
    kda_chunk: rows that KDA takes at a time, whose products grow with it; 0: the recurrence alone, 6 K V a head.

    Counted are matrix products, the head's included, and what attention residuals and short convolutions do; not what
    norms, activations and the routing do element by element.  Raises ConfigError for an attention it does not know.
    """
    parts: dict[str, float] = {}
    layers = (layer_parts(config, i, context, kda_chunk) for i in range(config.num_hidden_layers))
    for name, flops in chain(*layers, mixer_parts(config), end_parts(config, context)):
        parts[name] = parts.get(name, 0.0) + flops
    return parts


def training_flops_per_token(config: K3Config, context: int) -> float:
    """Forward and backward, nothing computed twice: three times the forward pass."""
    return TRAINING * sum(flops_per_token(config, context).values())


def layer_parts(config: K3Config, i: int, context: int, chunk: int = KDA_CHUNK) -> Iterator[Part]:
    """Of layer i, counted from 0, without its mixers."""
    kind = config.attention(i)
    if kind == "kda":
        yield from _kda(config, chunk)
    elif kind == "mla":
        yield from _mla(config, context)
    else:
        raise ConfigError(f"layer_types: expected kda or mla to count operations, got {kind!r}; count it by hand")
    yield from _moe(config) if config.is_moe(i) else _dense(config)


def mixer_parts(config: K3Config) -> Iterator[Part]:
    """Of all attention residuals."""
    if sources := sum(mixer_sources(config)):
        yield "attention residuals", 6.0 * sources * config.hidden_size  # a dot product, a square, a weighted sum


def end_parts(config: K3Config, context: int) -> Iterator[Part]:
    """Of the head, and of the layers that predict further."""
    head = 2.0 * config.hidden_size * config.vocab_size
    yield "head", head
    if config.num_nextn_predict_layers:
        feed = _moe(config) if config.num_experts else _dense(config)
        layer = sum(flops for _, flops in (*_mla(config, context), *feed))
        join = 4.0 * config.hidden_size**2  # [2 D] -> [D]
        yield "multi-token prediction", config.num_nextn_predict_layers * (join + layer + head)


def _kda(config: K3Config, chunk: int) -> Iterator[Part]:
    linear = config.linear_attn_config
    D, H, K = config.hidden_size, linear.num_heads, linear.head_dim
    P = H * K
    gate = D * P if linear.use_full_rank_gate else D * K + K * P
    yield "KDA projections", 2.0 * (4 * D * P + D * K + K * P + D * H + gate)  # q, k, v, o; f; beta; g
    yield "short convolutions", 2.0 * 3 * P * linear.short_conv_kernel_size
    # A, P: [C, K] x [K, C]; U, P U: [C, C] x [C, V]; K S, Q S, K^T U with the state; whole tiles, the inverse left out
    yield "KDA recurrence", 2.0 * H * (4 * chunk * K + 3 * K * K)


def _mla(config: K3Config, context: int) -> Iterator[Part]:
    D, H, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    q_rank = config.q_lora_rank
    query = D * H * key if q_rank is None else D * q_rank + q_rank * H * key
    latent = D * (rank + config.qk_rope_head_dim) + rank * H * (config.qk_nope_head_dim + value)
    gate = D * H * value if config.mla_use_output_gate else 0
    yield "MLA projections", 2.0 * (query + latent + gate + H * value * D)
    yield "MLA attention", 2.0 * H * (key + value) * (context + 1) / 2


def _moe(config: K3Config) -> Iterator[Part]:
    D, F, latent = config.hidden_size, config.moe_intermediate_size, config.routed_expert_hidden_size
    yield "routed experts", 2.0 * config.num_experts_per_token * 3 * (latent or D) * F
    shared = 3 * D * F * config.num_shared_experts
    yield "shared experts, router, latent projections", 2.0 * (shared + D * config.num_experts + 2 * D * (latent or 0))


def _dense(config: K3Config) -> Iterator[Part]:
    yield "dense feed-forward", 2.0 * 3 * config.hidden_size * config.intermediate_size


def mixer_sources(config: K3Config) -> list[int]:
    """How many sources each attention-residual mixer reads, in their order, the last one's included; [] without."""
    period = config.residual_period
    if period is None:
        return []
    return [1 + -(-read // period) for read in range(2 * config.num_hidden_layers + 1)]  # as `DepthStream.depth`

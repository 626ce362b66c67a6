"""Bytes of activations that the graph keeps from the forward pass to the backward, and those a pass needs meanwhile.

Each formula follows one sublayer as it is written: what its autograd functions save, every tensor once.  b is the bytes
of an activation's number: 2 for bfloat16, 4 for float32.  s is the same of the depth stream, what sublayers read and
add to: 4 where weights are float32 and products bfloat16 (`torch.autocast`), b elsewhere.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from perilune.models.k3 import K3Config
from perilune.models.k3.config import Recompute
from perilune.models.k3.flops import KDA_CHUNK, mixer_sources
from perilune.ops.blocks import DEVICE_BLOCK
from perilune.ops.kda.kernels.chunks import LARGE, LEAST, TURNS

Alike = tuple[tuple[int, int], ...]
"""Layers by what they are made of: one of each sort, and how many there are."""


def alike(config: K3Config, layers: Iterable[int]) -> Alike:
    """Layers of one attention and one feed-forward are one sort."""
    sorts = {i: (config.attention(i), config.is_moe(i)) for i in layers}
    first = {sort: i for i, sort in reversed(sorts.items())}
    return tuple((first[sort], count) for sort, count in Counter(sorts.values()).items())


# Per token


def kept_by_norm(width: int, b: int) -> float:
    """RMSNorm: x in float32, one over its size, the normalized x (its product with the weight is the reader's)."""
    return 4 * width + 4 + b * width


def kept_by_attention(config: K3Config, i: int, b: int, s: int, *, fused: bool) -> float:
    """The first sublayer of layer i, its norm included.  fused: by KDA's GPU kernels, not the chunked form."""
    normed = kept_by_norm(config.hidden_size, s) + b * config.hidden_size
    return normed + (_kept_by_kda(config, b, fused) if config.attention(i) == "kda" else _kept_by_mla(config, b))


def _kept_by_kda(config: K3Config, b: int, fused: bool) -> float:
    linear = config.linear_attn_config
    H, K = linear.num_heads, linear.head_dim
    P = H * K
    kept = 3.0 * P * b  # before the convolutions
    kept += b * K * (1 if linear.use_full_rank_gate else 2)  # between the factors of the low-rank gates
    # q, k, v, the decay's logit, beta's, o; or q and k in float32 and of length one, v, five steps of the gate, beta
    kept += 5 * P * b + H * b if fused else 2 * P * (4 + b) + P * b + 5 * 4 * P + 4 * 4 * H
    norm = (4 * P if b < 4 or not fused else 0) + 3 * 4 * P + 4 * H  # o wide; normalized, weighed, the gate's sigmoid
    return kept + norm + P * b


def _kept_by_mla(config: K3Config, b: int) -> float:
    H, value, rank, q_rank = config.num_attention_heads, config.v_head_dim, config.kv_lora_rank, config.q_lora_rank
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    key = nope + rope
    kept = 0.0 if q_rank is None else kept_by_norm(q_rank, b) + b * q_rank
    kept += 4 * (rank if b < 4 else rank + rope) + 4 + b * rank + b * (rank + rope)  # the latent's norm, the latent
    # q, k, v, o and the sums of softmax; v and o as wide as k, or v inside what it was expanded with
    kept += b * H * (3 * key + (key if value < key else nope + value)) + 4 * H
    if config.mla_use_output_gate:
        kept += b * H * value  # its logits
    return kept + b * H * value


def kept_by_feed(config: K3Config, i: int, b: int, s: int) -> float:
    """The second sublayer of layer i, its norm included."""
    normed = kept_by_norm(config.hidden_size, s) + b * config.hidden_size
    return normed + (_kept_by_moe(config, b) if config.is_moe(i) else 3 * b * config.intermediate_size)


def _kept_by_moe(config: K3Config, b: int) -> float:
    D, k, F = config.hidden_size, config.num_experts_per_token, config.moe_intermediate_size
    latent = config.routed_expert_hidden_size
    kept = (4.0 * D if b < 4 else 0.0) + 4 * config.num_experts  # the router's float32 input, its scores
    kept += 2 * k * F * b + 40 * k + 8  # gate and up of every row; ids, weights and where the rows lie
    if latent is not None:
        kept += 2 * b * latent  # what the experts read, and W_up
        kept += kept_by_norm(latent, b) if config.latent_moe_use_norm else 0
    return kept + 3 * b * F * config.num_shared_experts


def kept_by_stream(config: K3Config, sources: Sequence[int], layers: range, s: int, recompute: Recompute) -> float:
    """What is kept between sublayers: every live sum that a mixer reads, finished blocks among them, and two numbers a
    source.  With recomputation, the live sums before the stretches and what the mixer behind the last reads.

    sources: how many the mixers of these layers read, in their order, the last one's included where it is here.
    """
    D, last = config.hidden_size, sources[2 * len(layers) :]
    if recompute != "none":
        return float(s * D * (held_sums(config, layers, recompute) + len(last)) + 8 * sum(last))
    return float(s * D * len(sources) + 8 * sum(sources))


def held_sums(config: K3Config, layers: range, recompute: Recompute) -> int:
    """How many live sums outlast the stretches that are recomputed: those before each, and finished blocks."""
    stretch = sublayers_of_a_stretch(config, recompute)
    period = config.residual_period or stretch
    reads = range(2 * layers.start, 2 * layers.stop)
    return len([read for read in reads if read % stretch == 0 or read % period == 0 or read == reads.start])


def sublayers_of_a_stretch(config: K3Config, recompute: Recompute) -> int:
    """How many are recomputed together, at most."""
    stretches = {"none": 1, "sublayers": 1, "layers": 2, "blocks": max(config.residual_period or 1, 2)}
    return min(stretches[recompute], 2 * config.num_hidden_layers)


def kept_layers(config: K3Config, layers: Alike, b: int, s: int, *, recompute: Recompute, fused: bool = True) -> float:
    """Bytes a token that those layers keep beside the stream."""
    if recompute != "none":
        return 0.0
    return sum(n * (kept_by_attention(config, i, b, s, fused=fused) + kept_by_feed(config, i, b, s)) for i, n in layers)


def kept_by_head(config: K3Config, b: int, s: int) -> float:
    """The last norm, the gradient of its output; what stays of the head's weight is no token's."""
    return kept_by_norm(config.hidden_size, s) + b * config.hidden_size


def kept_in_all(
    config: K3Config, tokens: int, b: int, s: int | None = None, *, recompute: Recompute, fused: bool = True
) -> float:
    """Bytes that the graph of one forward pass over `tokens` keeps, without layers that predict further."""
    s, layers = s or b, range(config.num_hidden_layers)
    each = kept_layers(config, alike(config, layers), b, s, recompute=recompute, fused=fused)
    each += kept_by_stream(config, mixer_sources(config), layers, s, recompute)
    each += kept_by_head(config, b, s) + 8  # the ids
    return tokens * each + b * config.vocab_size * config.hidden_size  # the gradient of the head's weight


# At one time


def largest_stretch(
    config: K3Config, layers: Alike, sources: Sequence[int], b: int, s: int, recompute: Recompute, *, fused: bool = True
) -> float:
    """Bytes a token that are alive while a stretch runs again, at most: a sublayer or a layer; of a block every live
    sum but the first, and one sublayer.

    sources: as `kept_by_stream` takes them.
    """
    if recompute == "none":
        return 0.0
    D, again = config.hidden_size, sublayers_of_a_stretch(config, recompute)
    pairs = [(kept_by_attention(config, i, b, s, fused=fused), kept_by_feed(config, i, b, s)) for i, _ in layers]
    one = (sum(pair) for pair in pairs) if recompute == "layers" else (max(pair) for pair in pairs)
    if not sources:  # the first norm reads, and keeps in float32, what is kept anyway
        return max(one, default=0.0) - (4 * D if s == 4 else 0)
    numbers = 8.0 * max(sources) * (again if recompute == "layers" else 1)
    return max(one, default=0.0) + s * D * (again - 1) + numbers


def backward_workspace(config: K3Config, layers: Alike, tokens: int, b: int) -> float:
    """Bytes that the backward pass of one sublayer needs beside what is kept, at most."""
    kinds = {config.attention(i) for i, _ in layers}
    needs = [0.0]
    if "kda" in kinds:
        needs.append(kda_workspace(config, tokens, b))
    if any(config.is_moe(i) for i, _ in layers):
        needs.append(tokens * expert_rows(config, b))
    if kinds - {"kda"}:
        H, key = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        needs.append(tokens * 4.0 * b * H * key)  # gradients of q, k, v and o
    return max(needs)


def kda_workspace(config: K3Config, tokens: int, b: int) -> float:
    """Gradients of q, k, v, the decay's logit and o; a stretch of records and flow (`ops.kda.kernels.workspace`)."""
    linear = config.linear_attn_config
    return 5.0 * b * tokens * linear.num_heads * linear.head_dim + kda_records(
        tokens, linear.num_heads, linear.head_dim, b
    )


def kda_records(tokens: int, heads: int, width: int, b: int) -> float:
    """Bytes of records and flow that live at once: of all chunks, or of a stretch where they are large."""
    C, K = KDA_CHUNK, max(64, width)
    chunks = -(-tokens // C)
    size = b * heads * (5 * C * K + 2 * C * C + 2 * K * K) * chunks  # as `kept` of ops.kda.kernels.launch counts
    stretches = max(1, min(size // LARGE, TURNS, chunks // LEAST))
    return size / stretches


def keys_and_values(config: K3Config, b: int) -> float:
    """Bytes a token of an MLA layer's keys and values: under context parallelism a GPU expands all of a sequence's."""
    return 2.0 * b * config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)


def expert_rows(config: K3Config, b: int) -> float:
    """Bytes a token: the rows that experts read, their inner gradients twice, and what they return."""
    latent = config.routed_expert_hidden_size or config.hidden_size
    return b * config.num_experts_per_token * (2.0 * latent + 3.0 * config.moe_intermediate_size)


def head_workspace(config: K3Config, tokens: int) -> float:
    """A block of logits, its float32 form and its gradient; the gradient of the weight in float32.  No more: logits
    are never held (`perilune.ops.cross_entropy`)."""
    return min(DEVICE_BLOCK, tokens * config.vocab_size) * (2 + 4 + 2) + 4.0 * config.vocab_size * config.hidden_size

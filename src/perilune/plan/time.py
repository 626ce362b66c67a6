"""Seconds of one step, part by part: a roofline for each, with the shares that `rates` has measured.

    products        operations / (PRODUCTS peak), forward once, backward twice, and once more where recomputed
    routed experts  the same with EXPERTS, or the time to read their weights if that is longer
    KDA             tokens x heads x a measured time
    bytes           bytes / (STREAM bandwidth): attention residuals, what works element by element, the optimizer
    links           bytes / bandwidth of the narrowest link on the way

Gathering weights and summing gradients go on beside the computation and count where they take longer; tokens that
travel to experts, KDA's fragments, latents and pipeline hand-overs are waited for.
"""

from dataclasses import dataclass
from typing import Any

from perilune.models.k3 import K3Config
from perilune.models.k3.flops import end_parts, layer_parts
from perilune.plan.gpus import SERVER, Gpu
from perilune.plan.layout import Layout, Stage, Work
from perilune.plan.memory import GRADIENT, HALF
from perilune.plan.rates import (
    ATTENTION,
    ATTENTION_BACKWARD,
    EXPERTS,
    H200_BANDWIDTH,
    KDA_BOTH,
    KDA_FORWARD,
    KDA_QUEUED,
    MIX,
    PRODUCTS,
    STREAM,
    UNMIX,
)
from perilune.plan.traffic import BACKWARD, STATE, head_traffic, layer_traffic

BESIDE = ("KDA recurrence", "MLA attention", "routed experts", "attention residuals", "short convolutions")
"""Parts of `flops_per_token` that are no plain products."""
AGAIN = {"none": 0, "sublayers": 1, "layers": 1, "blocks": 2}
"""Times that a forward pass is repeated in the backward, by what is recomputed."""


@dataclass(frozen=True)
class Time:
    """Seconds."""

    micro_batch: dict[str, float]
    """Of one micro-batch on a stage, forward and backward."""
    beside: float
    """Of a micro-batch: weights gathered and gradients summed while it computes."""
    once: dict[str, float]
    """Of a step: the optimizer, its exchange, what ZeRO-1 gathers and sums."""

    @property
    def micro(self) -> float:
        return max(sum(self.micro_batch.values()), self.beside)


def step_seconds(time: Time, layout: Layout, work: Work) -> float:
    """1F1B: every stage works on every micro-batch, and waits while the first comes to it and the last goes on."""
    return (layout.micro_batches(work) + layout.pipeline - 1) * time.micro + sum(time.once.values())


def time_of(config: K3Config, stage: Stage, layout: Layout, work: Work, gpu: Gpu) -> Time:
    """Of a stage's GPUs.  Sequences are cut into equal parts; causal attention's last part has twice the mean."""
    tokens, again = layout.micro_tokens(work), AGAIN[layout.recompute]
    parts: dict[str, float] = {}
    for i, count in stage.sorts:
        for name, seconds in _layer(config, i, tokens, again, layout, work, gpu).items():
            parts[name] = parts.get(name, 0.0) + count * seconds
    if stage.last:
        ends = sum(flops for _, flops in end_parts(config, work.context))
        parts["products"] += 3 * tokens * ends / (PRODUCTS * gpu.peak)
        parts["element by element"] += tokens * head_traffic(config) / (STREAM * gpu.bandwidth)
    mixed_again = again if layout.recompute in ("layers", "blocks") else 0
    parts["attention residuals"] = mixers_seconds(config, stage, tokens, gpu, mixed_again)
    parts["context parallelism"] = _context_seconds(config, stage, layout, work, gpu)
    parts["tokens to experts and back"] = _experts_travel(config, stage, tokens, again, layout, gpu)
    parts["to the next stage and back"] = _hand_over(config, stage, tokens, layout, gpu)
    shown = {name: seconds for name, seconds in parts.items() if seconds}
    gathered = _sharding_seconds(stage, layout, gpu)
    if layout.sharding == "weights":
        return Time(shown, gathered, {"optimizer": optimizer_seconds(stage, layout, gpu)})
    return Time(shown, 0.0, {"optimizer": optimizer_seconds(stage, layout, gpu), "weights and gradients": gathered})


def _layer(config: K3Config, i: int, tokens: int, again: int, layout: Layout, work: Work, gpu: Gpu) -> dict[str, float]:
    flops: dict[str, float] = {}
    for name, number in layer_parts(config, i, work.context):
        flops[name] = flops.get(name, 0.0) + number
    plain = sum(number for name, number in flops.items() if name not in BESIDE)
    parts: dict[str, Any] = {
        "products": tokens * plain * (3 + again) / (PRODUCTS * gpu.peak),
        "element by element": tokens * layer_traffic(config, i) * (1 + BACKWARD + again) / (STREAM * gpu.bandwidth),
    }
    if config.attention(i) == "kda":
        linear = config.linear_attn_config
        parts["KDA"] = kda_seconds(tokens, linear.num_heads, linear.head_dim, gpu, again)
    else:
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        uneven = 2 - 1 / layout.context  # contiguous parts of a sequence: the last one sees most
        padded = uneven * flops["MLA attention"] * (2 * key / (key + value) if value < key else 1)
        parts["attention"] = tokens * padded * (1 + ATTENTION_BACKWARD + again) / (ATTENTION * gpu.peak)
    if config.is_moe(i):
        computed = tokens * flops["routed experts"] * (3 + again) / (EXPERTS * gpu.peak)
        parts["routed experts"] = max(computed, expert_reads(config, layout, again) / (STREAM * gpu.bandwidth))
    return parts


def kda_seconds(tokens: int, heads: int, width: int, gpu: Gpu, again: int = 0) -> float:
    """Forward and backward of a layer's KDA kernels; other GPUs and widths by the bytes they move."""
    each = KDA_BOTH + again * KDA_FORWARD
    return max(tokens * heads * each * max(width, 64) / 128 * H200_BANDWIDTH / gpu.bandwidth, KDA_QUEUED)


def mixers_seconds(config: K3Config, stage: Stage, tokens: int, gpu: Gpu, again: int = 0) -> float:
    """Attention residuals: N sources in and the mixture out; back, sources, its gradient, N sums read and written."""
    tensors = sum((1 + again) * (n + 1) / MIX + (3 * n + 1) / UNMIX for n in stage.mixers)
    return tokens * HALF * config.hidden_size * tensors / (STREAM * gpu.bandwidth)


def expert_reads(config: K3Config, layout: Layout, again: int) -> float:
    """Bytes of a layer's experts on a GPU: weights for every product, their gradients once."""
    width = config.routed_expert_hidden_size or config.hidden_size
    return (3.0 + again) * HALF * 3 * config.num_experts * config.moe_intermediate_size * width / layout.expert


def optimizer_seconds(stage: Stage, layout: Layout, gpu: Gpu) -> float:
    """Newton-Schulz in float32, as PerHeadMuon does it unless told otherwise; the states' bytes; matrices to owners."""
    share, n = stage.share, layout.shards
    iterated = (share.orthogonalizing + share.orthogonalizing_experts) / n / gpu.float32
    moved = (STATE["muon"] * (share.muon + share.experts) + STATE["adamw"] * share.adamw) / n
    exchanged = 2 * GRADIENT * share.muon / n * (n > 1)  # experts' blocks lie whole on a GPU
    return iterated + moved / (STREAM * gpu.bandwidth) + exchanged / point_to_point(n, gpu)


def gather_rate(members: int, apart: int, gpu: Gpu) -> float:
    """Bytes/s at which a GPU gets what all members of a group hold.

    apart: GPUs from one member to the next.  Members of one server share what its network cards bring.
    """
    together = max(1, min(members, SERVER // apart))
    return gpu.link if together == members else min(gpu.link, together * gpu.network)


def point_to_point(members: int, gpu: Gpu) -> float:
    """Bytes/s at which a GPU sends each member of a group of neighbours something else."""
    if members <= SERVER:
        return gpu.link
    return gpu.network / (1 - SERVER / members)  # the rest stays in the server, and is quicker


def _sharding_seconds(stage: Stage, layout: Layout, gpu: Gpu) -> float:
    """Weights gathered for the forward and the backward pass, gradients summed in float32; once a step in ZeRO-1."""
    gathers = 2 if layout.sharding == "weights" else 1
    seconds = 0.0
    for numbers, members, apart in (
        (stage.share.dense, layout.shards, 1),
        (stage.share.experts / layout.expert, layout.shards // layout.expert, layout.expert),
    ):
        if members > 1:
            bytes_ = (gathers * HALF + GRADIENT) * numbers * (1 - 1 / members)
            seconds += bytes_ / gather_rate(members, apart, gpu)
    return seconds


def _experts_travel(config: K3Config, stage: Stage, tokens: int, again: int, layout: Layout, gpu: Gpu) -> float:
    """Rows to the experts' GPUs and back, in the forward pass and in the backward."""
    if layout.expert == 1:
        return 0.0
    moes = sum(count * config.is_moe(i) for i, count in stage.sorts)
    row = HALF * (config.routed_expert_hidden_size or config.hidden_size)
    leaving = tokens * config.num_experts_per_token * row * (1 - 1 / layout.expert)
    return moes * leaving * (4 + 2 * again) / point_to_point(layout.expert, gpu)


def _context_seconds(config: K3Config, stage: Stage, layout: Layout, work: Work, gpu: Gpu) -> float:
    """KDA's maps and states, float32, gathered forward and backward; MLA's latents gathered, their gradients summed."""
    if layout.context == 1:
        return 0.0
    linear, away = config.linear_attn_config, 1 - 1 / layout.context
    kdas = sum(count * (config.attention(i) == "kda") for i, count in stage.sorts)
    fragments = 2 * 2 * 4 * linear.num_heads * linear.head_dim**2 * layout.context * layout.rows
    latents = 2 * HALF * (config.kv_lora_rank + config.qk_rope_head_dim) * work.context * layout.rows
    bytes_ = away * (kdas * fragments + (len(stage.layers) - kdas) * latents)
    return bytes_ / gather_rate(layout.context, 1, gpu)


def _hand_over(config: K3Config, stage: Stage, tokens: int, layout: Layout, gpu: Gpu) -> float:
    """The live sum and every finished block to the next stage, their gradients back (stages cache none)."""
    if layout.pipeline == 1:
        return 0.0
    rate = gpu.link if layout.gpus <= SERVER else gpu.network
    return 2.0 * HALF * tokens * config.hidden_size * stage.handed / rate

"""Bytes on one GPU, part by part: what stays, what a forward and backward pass need, what the optimizer's step needs.

Masters, gradients and the optimizer's states are float32 (PerHeadMuon's have the dtype of its parameters), what layers
multiply is bfloat16.  On several GPUs as under FSDP2's mixed precision, the depth stream bfloat16 too; on one as
`perilune train` works, under `torch.autocast`: the stream float32, weights cast where they are used.
"""

from dataclasses import dataclass

from perilune.models.k3 import K3Config
from perilune.models.k3.config import Recompute
from perilune.plan.activations import (
    backward_workspace,
    head_workspace,
    kept_by_head,
    kept_by_stream,
    kept_layers,
    keys_and_values,
    largest_stretch,
)
from perilune.plan.layout import Layout, Stage, Work
from perilune.plan.sizes import Share

MASTER, GRADIENT, MOMENTUM, MOMENTS, HALF, WIDE = 4, 4, 4, 8, 2, 4  # bytes a parameter, or a number
CHOICE = 8  # bytes: the index of an expert, which a second run is told


@dataclass(frozen=True)
class Memory:
    """Bytes by part."""

    states: dict[str, float]
    """From step to step."""
    passes: dict[str, float]
    """While a micro-batch goes forward and backward."""
    step: dict[str, float]
    """While the optimizer works, when nothing of `passes` is left."""

    @property
    def peak(self) -> float:
        return sum(self.states.values()) + max(sum(self.passes.values()), sum(self.step.values()))


def memory(config: K3Config, stage: Stage, layout: Layout, work: Work) -> Memory:
    """Of a GPU that has that stage."""
    return Memory(_states(stage.share, layout), _passes(config, stage, layout, work), _step(stage.share, layout))


def _states(share: Share, layout: Layout) -> dict[str, float]:
    n = layout.shards
    held = {
        "master weights": MASTER * share.total / n,
        "Muon's momentum": MOMENTUM * (share.muon + share.experts) / n,
        "AdamW's moments": MOMENTS * share.adamw / n,
    }
    if layout.sharding == "weights":
        return {**held, "gradients": GRADIENT * share.total / n}
    whole = share.dense + share.experts / layout.expert
    return {**held, "gradients": GRADIENT * whole, "bfloat16 weights": HALF * whole}


def _passes(config: K3Config, stage: Stage, layout: Layout, work: Work) -> dict[str, float]:
    D, b, s, tokens = config.hidden_size, HALF, _stream_bytes(layout), layout.micro_tokens(work)
    in_flight = min(layout.micro_batches(work), stage.ahead)
    parts = {
        "activations": in_flight * tokens * kept_layers(config, stage.sorts, b, s, recompute=layout.recompute),
        "attention residuals' bank": in_flight * tokens * _stream(config, stage, s, layout.recompute),
    }
    if layout.context > 1 and (latent := sum(n for i, n in stage.sorts if config.attention(i) == "mla")):
        # Of the rest of the sequence, kept by every layer or by the one that is recomputed, and their gradients once
        others = layout.rows * work.context - tokens
        kept = 1 if layout.recompute != "none" else in_flight * latent
        parts["keys and values of whole sequences"] = (kept + 1) * others * keys_and_values(config, b)
    if layout.recompute != "none":
        one = {"sublayers": "one sublayer", "layers": "one layer", "blocks": "one block's live sums, one sublayer"}
        largest = largest_stretch(config, stage.sorts, stage.mixers, b, s, layout.recompute)
        parts[f"{one[layout.recompute]}, recomputed"] = tokens * largest
        slots = sum(count * config.num_experts_per_token for i, count in stage.sorts if config.is_moe(i))
        parts["choices of experts"] = in_flight * tokens * CHOICE * slots
    parts["workspace of a sublayer's backward"] = backward_workspace(config, stage.sorts, tokens, b)
    if stage.last:
        parts["head: loss and gradients"] = (
            tokens * kept_by_head(config, b, s) + b * config.vocab_size * D + head_workspace(config, tokens)
        )
    if layout.gpus == 1:
        # Linear layers' are cast for a whole step, experts' with their layer
        cast = stage.share.total if layout.recompute == "none" else stage.share.dense + stage.largest.experts
        parts["weights in bfloat16"] = HALF * cast
    elif layout.sharding == "weights":
        layer = stage.largest.dense + stage.largest.experts / layout.expert
        ends = config.vocab_size * D * (stage.last or stage.layers.start == 0)
        # Two layers' weights, the next one on its way; one layer's gradients, and in float32 to be summed
        parts["gathered weights and gradients"] = max(2 * HALF * layer, HALF * ends) + (HALF + GRADIENT) * layer
    if layout.expert > 1:
        latent = config.routed_expert_hidden_size or D
        experts = stage.largest.experts / layout.expert
        parts["tokens to and from experts"] = 2.0 * b * tokens * config.num_experts_per_token * latent
        parts["redundant experts, at most"] = (HALF + GRADIENT) * experts  # as many again, and their gradients
    return {name: size for name, size in parts.items() if size}


def _stream_bytes(layout: Layout) -> int:
    """Of a number of the depth stream: it has the embedding's precision."""
    return WIDE if layout.gpus == 1 else HALF


def _stream(config: K3Config, stage: Stage, s: int, recompute: Recompute) -> float:
    """Bytes a token: what the mixers of these layers read, and a gradient's sum for every finished block."""
    blocks = max(stage.mixers, default=1) - 1
    return kept_by_stream(config, stage.mixers, stage.layers, s, recompute) + s * config.hidden_size * blocks


def _step(share: Share, layout: Layout) -> dict[str, float]:
    """As `PerHeadMuon` works: directions of all, then the blocks of one shape stacked, iterated and put back."""
    stacked = max(share.shapes.items(), key=lambda item: item[1], default=((1, 1), 0))
    (n, m), numbers = stacked
    # The stack, X before and after a product; A and b A + c A A, each n / m of it
    held = 4.0 * numbers / layout.shards * (3 + 2 * n / m)
    return {
        "Muon's directions": 4.0 * (share.muon + share.experts) / layout.shards,
        "Newton-Schulz on the blocks of one shape": held,
    }


def floor(share: Share) -> float:
    """Bytes of all GPUs together that no layout goes below: what stays, and the optimizer's step."""
    alone = Layout(1, 1, 1, 1, "weights", "sublayers", 1)
    return sum(_states(share, alone).values()) + sum(_step(share, alone).values())

"""What a model does inside, as figures for `snapshots.jsonl`: read by hooks during one pass over held-out text.

The model computes what it always computes and is left as it was: modes, gradients, balancers, random state.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from perilune.data.packing import Batch, evaluation_batches
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.models.k3.layer import DecoderLayer
from perilune.nn import BlockAttnRes, KimiDeltaAttention
from perilune.ops import Stored
from perilune.ops.attn_res import reference
from perilune.train.evaluate import bits_per_byte, judging, sample_texts

SCORED_BYTES = 100_000  # of the held-out text: about 30,000 tokens
WATCHED_TOKENS = 4096  # that pass under the hooks, or one context if that is more


@dataclass
class Readings:
    """What the hooks saw, in the form of a snapshot."""

    depth_attention: list[dict[str, Any]] = field(default_factory=list)
    """`{"sublayer", "weights"}`: the mean weight of every source of its mixer, embedding first, live sum last."""
    half_life: dict[str, list[list[float]]] = field(default_factory=dict)
    """By KDA layer, for each head the 10th, 50th and 90th percentile, in tokens."""
    activation_rms: list[dict[str, Any]] = field(default_factory=list)
    """`{"sublayer", "input", "output"}`: of what it reads, before its norm, and of what it adds."""
    state_rms: dict[str, list[float]] = field(default_factory=dict)
    """By KDA layer, for each head, of the recurrent state at the ends of the texts."""


def inspect(
    model: K3Model,
    tokenizer: ByteBPE,
    texts: Sequence[str],
    *,
    context: int,
    loads: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """A snapshot of `model` on the held-out `texts`, as `snapshots.jsonl` keeps it beside step, stage and tokens.

    `bits_per_byte` is over the same `SCORED_BYTES` every time, in pieces of `context` tokens; the rest is what
    `observe` reads on the first row of them.  `loads`: tokens for each expert `[E]` by the name of the balancer, as
    `K3Model.balancers()` names it.
    """
    sample = sample_texts(texts, SCORED_BYTES)
    bits = bits_per_byte(model, tokenizer, sample, context=context)
    documents = tokenizer.encode_documents(sample)
    readings = observe(model, evaluation_batches(documents, context, max(context, WATCHED_TOKENS))[0])
    return {"bits_per_byte": bits, "expert_load": expert_load(model, loads or {}), **vars(readings)}


def bits_by_source(
    model: K3Model, tokenizer: ByteBPE, held_out: Mapping[str, Sequence[str]], *, context: int
) -> dict[str, float]:
    """Bits per byte of every source's own held-out texts, which share `SCORED_BYTES` evenly; those without any are left
    out."""
    share = SCORED_BYTES // max(len(held_out), 1)
    return {
        name: bits_per_byte(model, tokenizer, sample_texts(texts, share), context=context)
        for name, texts in held_out.items()
        if any(texts)
    }


def observe(model: K3Model, batch: Batch) -> Readings:
    """Runs `batch` through the model and reads what goes on in it.

    Decay half-lives are ln 2 / -g over all tokens and channels of a head, g the log-decay that the layer's own gate
    gives; percentiles are values that occur.  A model without mixers, or without KDA, has none of their figures.
    """
    with judging(model), _hooked(model) as readings:
        model.model(batch.input_ids.to(model.lm_head.weight.device), None, batch.cu_seqlens.tolist())
    return readings


def expert_load(model: K3Model, loads: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The load of every expert over its layer's mean, by MoE layer; 0 where the layer saw no token."""
    names = {module: name for name, module in model.balancers().items()}
    shares = {}
    for layer_name, layer in decoder_layers(model).items():
        moe = layer.block_sparse_moe
        if moe is not None and names[moe.balancer] in loads:
            load = loads[names[moe.balancer]].double()
            shares[layer_name] = (load / load.mean().clamp(min=torch.finfo(load.dtype).tiny)).tolist()
    return shares


def decoder_layers(model: K3Model) -> dict[str, DecoderLayer]:
    """By short name: `0`, `1`, ... for the layers of the stack, `mtp.0` for what predicts further tokens."""
    return {
        name.removeprefix("model.").removeprefix("layers.").removesuffix(".layer"): module
        for name, module in model.named_modules()
        if isinstance(module, DecoderLayer)
    }


class Sublayer(NamedTuple):
    name: str
    mixer: BlockAttnRes | None
    norm: nn.Module
    body: nn.Module


def _sublayers(name: str, layer: DecoderLayer) -> tuple[Sublayer, Sublayer]:
    feed_forward = layer.mlp if layer.block_sparse_moe is None else layer.block_sparse_moe
    assert feed_forward is not None
    return (
        Sublayer(f"{name}.attention", layer.self_attention_res, layer.input_layernorm, layer.self_attn),
        Sublayer(f"{name}.feed_forward", layer.mlp_res, layer.post_attention_layernorm, feed_forward),
    )


@contextmanager
def _hooked(model: K3Model) -> Iterator[Readings]:
    """Hooks on all that is read, for as long as the block lasts."""
    readings = Readings()
    handles: list[Any] = []

    def hook(register: Callable[..., Any], action: Callable[..., Any], **options: Any) -> None:
        handles.append(register(action, **options))

    try:
        for name, layer in decoder_layers(model).items():
            for sublayer in _sublayers(name, layer):
                figures: dict[str, Any] = {"sublayer": sublayer.name}
                if sublayer.mixer is not None:
                    hook(sublayer.mixer.register_forward_pre_hook, _reads_weights(sublayer.name, readings))
                hook(sublayer.norm.register_forward_pre_hook, _reads_input(figures, readings))
                hook(sublayer.body.register_forward_hook, _reads_output(figures))
            if isinstance(layer.self_attn, KimiDeltaAttention):
                kda = layer.self_attn
                hook(kda.f_b_proj.register_forward_hook, _reads_decay(name, kda, readings))
                hook(kda.register_forward_pre_hook, _lends_cache, with_kwargs=True)
                hook(kda.register_forward_hook, _reads_state(name, readings), with_kwargs=True)
        if model.model.output_attn_res is not None:
            hook(model.model.output_attn_res.register_forward_pre_hook, _reads_weights("output", readings))
        yield readings
    finally:
        for handle in handles:
            handle.remove()


def _reads_weights(name: str, readings: Readings) -> Callable[..., None]:
    def read(mixer: BlockAttnRes, args: tuple[Any, ...]) -> None:
        sources = [source.read() if isinstance(source, Stored) else source for source in args[0]]
        v = reference.stacked(sources)  # [N, B, T, D]
        weights = reference.weights(mixer.query, v, mixer.norm.weight, mixer.norm.eps)
        readings.depth_attention.append({"sublayer": name, "weights": weights.flatten(1).mean(1).tolist()})

    return read


def _reads_input(figures: dict[str, Any], readings: Readings) -> Callable[..., None]:
    def read(norm: nn.Module, args: tuple[Any, ...]) -> None:
        figures["input"] = rms(args[0])
        readings.activation_rms.append(figures)

    return read


def _reads_output(figures: dict[str, Any]) -> Callable[..., None]:
    def read(body: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        figures["output"] = rms(output)

    return read


def _reads_decay(name: str, layer: KimiDeltaAttention, readings: Readings) -> Callable[..., None]:
    def read(projection: nn.Module, args: tuple[Any, ...], logits: Tensor) -> None:
        g = layer.gate(logits.unflatten(-1, (layer.num_heads, layer.head_dim)))  # [B, T, H, K]
        by_head = half_lives(g).movedim(-2, 0).flatten(1)
        readings.half_life[name] = percentiles(by_head, (0.1, 0.5, 0.9)).tolist()

    return read


def _lends_cache(
    layer: KimiDeltaAttention, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A cache for this call alone: the layer leaves the states at the ends of the texts in it."""
    cu = options["cu_seqlens"]
    return args, {**options, "cache": layer.new_cache(len(args[0]) if cu is None else len(cu) - 1)}


def _reads_state(name: str, readings: Readings) -> Callable[..., None]:
    def read(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        state = options["cache"].state  # [N, H, K, V]
        readings.state_rms[name] = [rms(head) for head in state.unbind(1)]

    return read


def half_lives(g: Tensor) -> Tensor:
    """Tokens after which half is forgotten, ln 2 / -g, of natural-log decays g <= 0; finite where nothing decays."""
    return math.log(2) / (-g).clamp(min=torch.finfo(g.dtype).tiny)


def percentiles(x: Tensor, shares: Sequence[float]) -> Tensor:
    """Of each row, the values with a share of the others below them: `[H, M]` to `[H, len(shares)]`."""
    rank = torch.tensor([round(share * (x.shape[1] - 1)) for share in shares], device=x.device)
    return x.sort(dim=1).values[:, rank]  # torch.quantile stops at 16M values


def rms(x: Tensor) -> float:
    """The root of the mean square of all elements."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) / math.sqrt(x.numel())

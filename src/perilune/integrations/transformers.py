"""Kimi Delta Attention in the place of self-attention, in a decoder of `transformers`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from perilune.core.errors import ConfigError, ShapeError
from perilune.integrations.padding import pack_of
from perilune.nn import KimiDeltaAttention, initialize_
from perilune.nn.cache import RecurrentCache


def replace_attention(
    model: PreTrainedModel,
    layers: Sequence[int] | None = None,
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    **options: Any,
) -> list[int]:
    """Puts a fresh `KimiDeltaAttention` where layers of `model` have self-attention, in place; returns which layers.

    Args:
        model: a causal decoder whose layers, `model.get_decoder().layers`, call `self_attn` as Llama's do: Llama,
            Mistral, Qwen and their kin.
        layers: their indices, counted from the end if negative; three in four, the last of four kept, if None.
        num_heads, head_dim: of KDA; the attention's if None.
        options: of `KimiDeltaAttention` (g_min, conv_size, full_rank_gate, norm_eps).

    Matrices are drawn from N(0, config.initializer_range), the rest as `reset_parameters` says; nothing is taken over
    from the attention.  Device and dtype are the model's, but for the parameters that KDA keeps in float32.

    Raises ConfigError for a model or layers that do not fit.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not all(hasattr(block, "self_attn") for block in blocks):
        raise ConfigError(
            f"model: expected a decoder with layers[i].self_attn, got {type(decoder).__name__}; "
            "put perilune.nn.KimiDeltaAttention into its layers by hand"
        )
    config, count = decoder.config, len(blocks)
    chosen = _valid([i for i in range(count) if i % 4 != 3] if layers is None else layers, count)
    heads = num_heads or config.num_attention_heads
    width = head_dim or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for i in chosen:
        old = blocks[i].self_attn
        assert isinstance(old, nn.Module)
        with next(old.parameters()).device:
            kda = KimiDeltaAttention(config.hidden_size, heads, width, **options)
            initialize_(kda, getattr(config, "initializer_range", 0.02))
        blocks[i].self_attn = KdaSelfAttention(kda, i).to(model.dtype).train(old.training)
    return chosen


def _valid(layers: Sequence[int], count: int) -> list[int]:
    chosen = [i % count for i in layers if -count <= i < count]
    if len(set(chosen)) < len(layers):
        raise ConfigError(f"layers: expected different ones from 0 to {count - 1}, got {list(layers)}; name each once")
    return chosen


class KdaSelfAttention(nn.Module):
    """A decoder layer's `self_attn`: hidden states [B, T, D] to ([B, T, D], None); there are no attention weights.

    Position embeddings are not used: KDA knows the order.  Padding on either side is taken out before the layer and is
    zero behind it; packed documents do not see each other (`pack_of` says how both are told).  With a `DynamicCache`
    the state lies in its `layers[layer_idx]`, as a `KdaCacheLayer`.

    Raises ShapeError for a mask that it cannot follow, a cache of another kind, and packed documents on a cache.
    """

    def __init__(self, kda: KimiDeltaAttention, layer_idx: int) -> None:
        super().__init__()
        self.kda = kda
        self.layer_idx = layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,  # what `cache` was called before transformers 5.24
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        B, T, D = hidden_states.shape
        pack = pack_of(hidden_states, attention_mask, position_ids, kwargs.get("cu_seq_lens_q"))
        cache = past_key_values if cache is None else cache
        if cache is not None and pack is not None and not pack.one_a_row:
            raise ShapeError(
                f"cache: expected one document a row, got {len(pack.cu) - 1} in {B}; pass use_cache=False to pack them"
            )
        past = None if cache is None else self._layer_of(cache, B).grown(T)
        if pack is None:
            return self.kda(hidden_states, cache=past), None
        tokens = hidden_states.flatten(0, 1)[pack.places]
        y = self.kda(tokens[None], cache=past, cu_seqlens=pack.cu)[0]
        return y.new_zeros(B * T, D).index_copy(0, pack.places, y).view(B, T, D), None

    def _layer_of(self, cache: Cache, batch: int) -> "KdaCacheLayer":
        while len(cache.layers) <= self.layer_idx:  # a DynamicCache made without a config grows as it is used
            cache.layers.append(DynamicLayer())
        layer = cache.layers[self.layer_idx]
        if isinstance(layer, KdaCacheLayer):
            return layer
        if not isinstance(layer, DynamicLayer):
            raise ShapeError(
                f"cache: expected a DynamicCache, got layers of {type(layer).__name__}; pass DynamicCache() or none"
            )
        fresh = KdaCacheLayer(self.kda.new_cache(batch))
        cache.layers[self.layer_idx] = fresh
        return fresh


class KdaCacheLayer(CacheLayerMixin):
    """A KDA layer's past inside a `DynamicCache`: of one size, however much it has seen.

    It follows beam search, selections and repeats of sequences.  It cannot go back: `crop` raises, so that there is no
    assisted decoding.
    """

    supports_early_init = False

    def __init__(self, past: RecurrentCache) -> None:
        super().__init__()
        self.past = past
        self.seen = 0
        """Tokens a row, padding included."""

    def grown(self, tokens: int) -> RecurrentCache:
        """The past, of which so many tokens will be part when the layer has run."""
        self.seen += tokens
        return self.past

    def reset(self) -> None:
        self.past.reset()
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.past = self.past.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.past = self.past.select(torch.arange(len(self.past.lengths), device=indices.device)[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.past = self.past.select(torch.arange(len(self.past.lengths)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ShapeError(
                f"cache: expected to go on, got a cut of {tokens_to_remove}; a state cannot forget its last tokens, "
                "generate without an assistant or with use_cache=False"
            )

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1  # no end

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a KDA layer has no keys")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("a KDA layer has no keys")

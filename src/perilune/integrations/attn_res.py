"""Block attention residuals in the place of the running sum, in a decoder of `transformers`."""

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from perilune.core.errors import ConfigError
from perilune.integrations.retyping import check_forward
from perilune.nn import BlockAttnRes, DepthStream
from perilune.nn.attn_res import Start
from perilune.nn.attn_res_stack import check_block_size
from perilune.ops import Stored
from perilune.ops.attn_res.stored import Form, check_form

Model = TypeVar("Model", bound=PreTrainedModel)


def add_attn_res(
    model: PreTrainedModel, block_size: int | Literal["full"], *, start: Start = "residual", bank: Form | None = None
) -> list[BlockAttnRes]:
    """Lets every sublayer of `model` read a learned mixture over depth, in place; returns the mixers that it adds.

    Args:
        model: a Llama, Mistral, Mixtral, Qwen2, Qwen3, either's MoE, DeepSeek-V3 or GPT-2, with any head, before it is
            sharded, compiled or wrapped.
        block_size: decoder layers (attention and feed-forward) that make a block; "full" makes each sublayer's output
            a source of its own.  From the number of layers on, the sources are the embedding and the live sum.
        start: "residual" begins with the outputs that the model has now, up to rounding; "mean" reads the mean of the
            sources instead of their sum, as the papers do (`BlockAttnRes`).
        bank: in what finished blocks are kept, "bfloat16" or "float8" (`DepthStream`); None: as they are.

    Two mixers a layer, `self_attention_res` and `mlp_res` (Mixtral: `experts_res`), and the last layer's
    `output_attn_res` before the final norm; on their layer's device, in the model's dtype, all to be trained.  Other
    parameters keep names and values.  What was chosen is written to `model.config.attn_res`, from which `load_attn_res`
    builds the model again.

    Raises ConfigError for a model, block size, start or bank that does not fit; then the model is as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}; "
            "add attention residuals first, then wrap, compile or shard"
        )
    decoder = model.get_decoder()
    layers = _layers_of(decoder)
    if block_size != "full":
        check_block_size(block_size, " or 'full'")
    if bank is not None:
        check_form(bank)
    period = 1 if block_size == "full" else 2 * block_size
    width = decoder.config.hidden_size
    places = [next(layer.parameters()).device for layer in layers for _ in range(2)]
    mixers = [BlockAttnRes(width, start=start).to(place, model.dtype) for place in [*places, places[-1]]]
    for i, layer in enumerate(layers):
        layer.__class__ = ADAPTED[type(layer)]
        assert isinstance(layer, AttnResLayer)
        layer.period, layer.reads, layer.bank = period, 2 * i, bank
        for name, mixer in zip(layer.mixers, mixers[2 * i : 2 * i + 2]):
            layer.add_module(name, mixer)
        layer.output_attn_res = mixers[-1] if i == len(layers) - 1 else None
    for part in {model, decoder}:  # a layer stays on one device
        part._no_split_modules = {*(part._no_split_modules or ()), *(type(layer).__name__ for layer in layers)}
    model.config.attn_res = {"block_size": block_size, "start": start} | ({} if bank is None else {"bank": bank})
    return mixers


def load_attn_res(model_class: type[Model], folder: str | Path, **options: Any) -> Model:
    """`model_class.from_pretrained(folder, **options)` for a model that was saved with attention residuals.

    Raises ConfigError for a class that is no model's own (`AutoModelForCausalLM`), and if it was saved without, or with
    `KimiDeltaAttention` too, which the class does not know.
    """
    if not issubclass(model_class, PreTrainedModel):
        raise ConfigError(
            f"model_class: expected a model's own class, got {model_class.__name__}; give the one that was saved, "
            "such as LlamaForCausalLM"
        )
    told = options.pop("output_loading_info", False)

    class WithAttnRes(model_class):  # type: ignore[valid-type,misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if not (chosen := getattr(config, "attn_res", None)):
                raise ConfigError(
                    f"config: expected attn_res from a model with attention residuals, got none in {folder}; "
                    f"use {model_class.__name__}.from_pretrained, then add_attn_res"
                )
            add_attn_res(self, **chosen)

    # What its report on loading says, and by what transformers knows how weights are laid out on disk.
    WithAttnRes.__name__, WithAttnRes.__module__ = model_class.__name__, model_class.__module__
    model, info = WithAttnRes.from_pretrained(folder, output_loading_info=True, **options)
    if kda := sorted(name for name in info["unexpected_keys"] if ".kda." in name):
        raise ConfigError(
            f"folder: expected the attention of {model_class.__name__}, got {kda[0]} in {folder}; build the model, "
            "call replace_attention and add_attn_res as before, then load its state"
        )
    if missing := sorted(name for name in info["missing_keys"] if name.endswith("res.query")):
        raise ConfigError(f"folder: expected mixers among the weights in {folder}, got no {missing[0]}; save them too")
    model.__class__ = model_class
    return (model, info) if told else model  # type: ignore[return-value]


def _layers_of(decoder: nn.Module) -> nn.ModuleList:
    """The layers of a decoder that can be adapted."""
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ConfigError(f"model: expected a stack of decoder layers, got {type(decoder).__name__}; {_BY_HAND}")
    for layer in layers:
        if isinstance(layer, AttnResLayer):
            raise ConfigError("model: expected one without attention residuals, got one that has them; add them once")
        if type(layer) not in ADAPTED:
            known = ", ".join(sorted(cls.__name__ for cls in ADAPTED))
            raise ConfigError(f"model: expected layers among {known}, got {type(layer).__name__}; {_BY_HAND}")
        if hasattr(layer, "crossattention"):
            raise ConfigError(f"model: expected a decoder without cross-attention, got one with it; {_BY_HAND}")
    check_forward(layers, "attention residuals")
    return layers


_BY_HAND = "put perilune.nn.AttnResStack around them, or a DepthStream into them, by hand"


class AttnResLayer(nn.Module):
    """What a decoder layer becomes: instead of hidden states it takes and returns the sources of a depth stream.

    The first layer takes hidden states [B, T, D]; the last one returns them, mixed for the final norm.  In between go
    tuples of tensors, the live sum first, then the finished blocks: no object and no state beside the arguments, so
    that hooks of sharding, recomputation and pipelines see every tensor.  With a `bank`, several of them stand for a
    finished block.
    """

    sublayers: ClassVar[tuple[tuple[str, str], tuple[str, str]]]
    """(norm, attention), (norm, feed-forward): names of children."""
    arguments: ClassVar[tuple[str, ...]]
    """Those of the adapted layer's forward, which is the last base, after the hidden states: it may get them by
    position."""
    mixers: ClassVar[tuple[str, str]] = ("self_attention_res", "mlp_res")
    """Names of the children that mix what the two read."""
    period: int
    reads: int
    bank: Form | None
    output_attn_res: BlockAttnRes | None
    gradient_checkpointing: bool  # these two are set by `gradient_checkpointing_enable`
    _gradient_checkpointing_func: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not that of transformers' layers, which would put its recomputation around this forward: of the reentrant
        kind that one loses the gradients of tensors inside a tuple."""
        cls.arguments = tuple(inspect.signature(cls.__bases__[-1].forward).parameters)[2:]  # type: ignore[attr-defined]

    def forward(
        self, hidden_states: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        kwargs.update(zip(self.arguments, args))
        given = (hidden_states,) if isinstance(hidden_states, Tensor) else hidden_states
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            kwargs.update({name: None for name in ("cache", "past_key_values") if name in kwargs}, use_cache=False)
            new = self._gradient_checkpointing_func(partial(self._run, kwargs), *given)
        else:
            new = self._run(kwargs, *given)
        if self.output_attn_res is not None:
            return new[0]
        before, behind = self._live(self.reads, given[0].dtype), self._live(self.reads + 2, given[0].dtype)
        return *new[:behind], *given[before:], *new[behind:]

    def _run(self, options: dict[str, Any], *given: Tensor) -> tuple[Tensor, ...]:
        """The new live sum and the blocks finished here; the last mixture after the last layer."""
        (mixer, norm, attention), (second_mixer, second_norm, feed_forward) = self._children()
        live, each = self._live(self.reads, given[0].dtype), self._each(given[0].dtype)
        bank = [_source(given[i : i + each]) for i in range(live, len(given), each)]
        stream = DepthStream.resume([*bank, _source(given[:live])], self.period, self.reads, self.bank)
        stream.add(attention(norm(stream.read(mixer)), **options)[0])
        stream.add(feed_forward(second_norm(stream.read(second_mixer))))
        if self.output_attn_res is not None:
            return (stream.mixed(self.output_attn_res),)
        *finished, live_sum = stream.handed_over()
        return tuple(x for source in (live_sum, *finished[len(bank) :]) for x in _tensors(source))

    def _each(self, dtype: torch.dtype) -> int:
        """How many tensors stand for a finished block."""
        return 1 if self.bank is None or (self.bank == "bfloat16" and dtype.itemsize <= 2) else TENSORS[self.bank]

    def _live(self, reads: int, dtype: torch.dtype) -> int:
        """How many stand for the live sum before this read: handed over where a block is complete, it is finished."""
        return self._each(dtype) if reads and reads % self.period == 0 else 1

    def _children(self) -> list[tuple[Any, Any, Any]]:
        """(mixer, norm, attention), (mixer, norm, feed-forward)."""
        names = ((mixer, *sublayer) for mixer, sublayer in zip(self.mixers, self.sublayers))
        return [(getattr(self, a), getattr(self, b), getattr(self, c)) for a, b, c in names]


TENSORS = {"bfloat16": 2, "float8": 3}
"""How many fields of a `Stored` source are not None, the first ones."""


def _source(tensors: Sequence[Tensor]) -> Tensor | Stored:
    return tensors[0] if len(tensors) == 1 else Stored(*tensors)


def _tensors(source: Tensor | Stored) -> tuple[Tensor, ...]:
    return (source,) if isinstance(source, Tensor) else tuple(x for x in source.tensors if x is not None)


class _LlamaLike(AttnResLayer):
    sublayers = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))


class AttnResLlamaLayer(_LlamaLike, LlamaDecoderLayer):
    pass


class AttnResMistralLayer(_LlamaLike, MistralDecoderLayer):
    pass


class AttnResMixtralLayer(_LlamaLike, MixtralDecoderLayer):
    # On disk Mixtral's `mlp` has another name, and transformers renames whatever begins with those letters.
    mixers = ("self_attention_res", "experts_res")


class AttnResQwen2Layer(_LlamaLike, Qwen2DecoderLayer):
    pass


class AttnResQwen2MoeLayer(_LlamaLike, Qwen2MoeDecoderLayer):
    pass


class AttnResQwen3Layer(_LlamaLike, Qwen3DecoderLayer):
    pass


class AttnResQwen3MoeLayer(_LlamaLike, Qwen3MoeDecoderLayer):
    pass


class AttnResDeepseekV3Layer(_LlamaLike, DeepseekV3DecoderLayer):
    pass


class AttnResGPT2Block(AttnResLayer, GPT2Block):
    sublayers = (("ln_1", "attn"), ("ln_2", "mlp"))

    def forward(
        self, hidden_states: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        kwargs.update(zip(self.arguments, args))
        if kwargs.pop("encoder_hidden_states", None) is not None:
            raise ConfigError("encoder_hidden_states: expected None, got a tensor; this model has no cross-attention")
        kwargs.pop("encoder_attention_mask", None)
        return super().forward(hidden_states, **kwargs)


ADAPTED: dict[type[nn.Module], type[AttnResLayer]] = {
    LlamaDecoderLayer: AttnResLlamaLayer,
    MistralDecoderLayer: AttnResMistralLayer,
    MixtralDecoderLayer: AttnResMixtralLayer,
    Qwen2DecoderLayer: AttnResQwen2Layer,
    Qwen2MoeDecoderLayer: AttnResQwen2MoeLayer,
    Qwen3DecoderLayer: AttnResQwen3Layer,
    Qwen3MoeDecoderLayer: AttnResQwen3MoeLayer,
    DeepseekV3DecoderLayer: AttnResDeepseekV3Layer,
    GPT2Block: AttnResGPT2Block,
}
"""Which layers can be adapted.  By class and not by the names of their parts: others have the same names and put their
norms elsewhere."""

"""A model's layers cut into the stages of a pipeline, and one of them kept."""

from functools import cache
from itertools import accumulate, pairwise

from torch import nn

from perilune.core.errors import ConfigError
from perilune.models.k3.config import K3Config
from perilune.models.k3.flops import end_parts, layer_parts, mixer_sources
from perilune.models.k3.model import K3Model


def costs(config: K3Config, context: int) -> list[float]:
    """Operations of every layer for a token of a document so long, its mixers' counted.  The last layer's are with
    those of what has to lie beside it: the last mixer, the head, the layers that predict further."""
    sources = mixer_sources(config) or [0] * (2 * config.num_hidden_layers + 1)
    mixers = [6.0 * config.hidden_size * number for number in sources]
    each = [
        sum(flops for _, flops in layer_parts(config, i, context)) + mixers[2 * i] + mixers[2 * i + 1]
        for i in range(config.num_hidden_layers)
    ]
    each[-1] += mixers[-1] + sum(flops for _, flops in end_parts(config, context))
    return each


def stages_of(config: K3Config, number: int, context: int) -> list[range]:
    """The layers in so many runs, each of one or more, of which the dearest costs as little as it can."""
    before = [0.0, *accumulate(costs(config, context))]

    @cache
    def cut(end: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Layers before `end` in so many runs: what the dearest costs, and where runs begin."""
        if stages == 1:
            return before[end], (0,)
        ways = ((start, *cut(start, stages - 1)) for start in range(stages - 1, end))
        return min((max(dearest, before[end] - before[start]), (*starts, start)) for start, dearest, starts in ways)

    starts = cut(config.num_hidden_layers, number)[1]
    return [range(first, last) for first, last in pairwise([*starts, config.num_hidden_layers])]


def keep_stage_(model: K3Model, layers: range) -> K3Model:
    """Leaves `model` these of its layers, and of the rest what the stage needs; returns it.

    The first stage has the embedding, the last one everything behind the layers, and the embedding too if the head is
    tied to it or further tokens are predicted: then both have a copy, whose gradients are to be summed.  Whatever stays
    keeps its name.  A stage's `forward` takes a `stream`, the first one's `input_ids` alone, and gives one, the last
    one's a loss.

    Raises ConfigError for a model that keeps finished blocks in another form: stages hand them on whole.
    """
    if model.config.attn_res_bank is not None:
        raise ConfigError(
            f"attn_res_bank: expected none in a pipeline, whose stages hand on whole blocks, got "
            f"{model.config.attn_res_bank!r}; leave it out, or train without pipeline"
        )
    backbone = model.model
    backbone.stage = layers
    for i in range(len(backbone.layers)):
        if i not in layers:
            backbone.layers.register_module(str(i), None)
    if layers.start > 0 and not (backbone.ends and reads_embedding(model.config)):
        backbone.register_module("embed_tokens", None)
    if not backbone.ends:
        backbone.mtp = nn.ModuleList()
        for part, name in ((backbone, "output_attn_res"), (backbone, "norm"), (model, "lm_head")):
            setattr(part, name, None)
    return model


def reads_embedding(config: K3Config) -> bool:
    """Whether what comes behind the layers reads the embedding, which comes before them."""
    return config.tie_word_embeddings or config.num_nextn_predict_layers > 0

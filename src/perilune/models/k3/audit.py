"""The parameter audit: how many parameters a configuration has, by part, and how many one token uses.

The model itself is counted, built on the meta device, so the numbers cannot drift from the code.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from perilune.core.errors import ConfigError
from perilune.models.k3.config import K3Config
from perilune.models.k3.convert import released_views, stored_shape
from perilune.models.k3.model import K3Model

PARTS = {  # part: what its released names contain, first fit
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
    "multi-token prediction": (".mtp.",),
    "routed experts": (".experts.",),
    "shared experts, router, latent projections": ("block_sparse_moe",),
    "dense feed-forward": (".mlp.",),
    "norms and attention residuals": (
        "_res_norm",
        "_res_proj",
        "input_layernorm",
        "post_attention_layernorm",
        "model.norm",
    ),
    "KDA": (),  # what is left of a layer, by its attention
    "MLA": (),
}


@dataclass(frozen=True)
class Line:
    part: str
    count: int
    """How many there are: layers, experts, tensors' owners."""
    total: int
    active: int
    """Parameters that one token uses."""


@dataclass(frozen=True)
class Audit:
    lines: tuple[Line, ...]
    tensors: int
    """Tensors in a released checkpoint of this model, experts unpacked."""

    @property
    def total(self) -> int:
        return sum(line.total for line in self.lines)

    @property
    def active(self) -> int:
        """Per token: the head counted, the embedding table not (one row is looked up), as the reports count."""
        return sum(line.active for line in self.lines)


def audit(config: K3Config) -> Audit:
    """Counts as released files do: `A_log` with its padding, packed weights by their logical size."""
    with torch.device("meta"):
        model = K3Model(config)
    totals = dict.fromkeys(PARTS, 0)
    views = released_views(model)
    for name, view in views.items():
        totals[_part(name, config)] += math.prod(stored_shape(name, view, config))
    moes = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
    kinds = [config.attention(i) for i in range(config.num_hidden_layers)]
    counts = {
        "embedding": 1,
        "head": 1,
        "multi-token prediction": config.num_nextn_predict_layers,
        "routed experts": moes * config.num_experts,
        "shared experts, router, latent projections": moes,
        "dense feed-forward": len(kinds) - moes,
        "norms and attention residuals": len(kinds),
        "KDA": kinds.count("kda"),
        "MLA": len(kinds) - kinds.count("kda"),
    }
    lines = [Line(part, counts[part], total, _active(part, total, config)) for part, total in totals.items() if total]
    try:
        lines += _vision_lines(config)
    except (KeyError, IndexError, TypeError):
        raise ConfigError(
            "vision_config: expected the sizes of a K3 vision tower, found some missing or not numbers; "
            "compare it with the released config"
        ) from None
    return Audit(tuple(lines), tensors=len(views))


def _part(name: str, config: K3Config) -> str:
    for part, marks in PARTS.items():
        if any(mark in name for mark in marks):
            return part
    layer = int(name.split(".")[2])
    return "KDA" if config.attention(layer) == "kda" else "MLA"


def _active(part: str, total: int, config: K3Config) -> int:
    if part == "routed experts":
        return total // config.num_experts * config.num_experts_per_token
    return 0 if part in ("embedding", "multi-token prediction") else total


def _vision_lines(config: K3Config) -> Iterator[Line]:
    """The vision tower and projector that a released config describes (the K3 report's shapes; no biases)."""
    v = config.vision
    if v is None:
        return
    d, inner, qkv = v["vt_hidden_size"], v["vt_intermediate_size"], v["qkv_hidden_size"]
    patches = 3 * v["patch_size"] ** 2 * d + v["init_pos_emb_height"] * v["init_pos_emb_width"] * d
    block = 2 * d + 3 * qkv * d + qkv * d + 2 * inner * d
    yield Line("vision tower", v["vt_num_hidden_layers"], patches + v["vt_num_hidden_layers"] * block + d, 0)
    merged = d * v["merge_kernel_size"][0] * v["merge_kernel_size"][1]
    text = v["text_hidden_size"]
    yield Line("vision projector", 1, merged * merged + merged * text + text, 0)

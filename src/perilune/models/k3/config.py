"""The configuration of a K3-class model; keys are those of the released configs.  Imports without torch."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from perilune.core.config import Config, require
from perilune.core.errors import ConfigError, nearest

# Keys of released configs that describe something else than the network, or nothing at all.  They are kept as they
# came and written back.
CARRIED = {
    "architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "head_dim", "ignore_index", "image_placeholder", "max_position_embeddings", "media_placeholder_token_id",
    "model_max_length", "model_type", "output_router_logits", "pad_token_id", "pretraining_tp", "qk_head_dim",
    "quantization_config", "rope_scaling", "rope_theta", "topk_method", "torch_dtype", "transformers_version",
    "use_cache", "vision_config",
}  # fmt: skip
RESPELLED = {  # keys of linear_attn_config as `transformers` writes them
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


# What releases have no key for; kept under `perilune` in a file.
OWN = ("layer_types", "attn_res_bank", "balance", "mtp_loss_weight", "balance_loss_weight", "answer_loss_weight")


Recompute = Literal["none", "sublayers", "layers", "blocks"]
"""What is computed again in the backward pass, which keeps the inputs of every sublayer alone, of every layer, or of
every block of attention residuals: their bank.  See `K3Model.recompute_activations`."""


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(Config):
    """`linear_attn_config`: the KDA layers, and which layers they are (counted from 1, as the releases do)."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    use_full_rank_gate: bool = False
    gate_lower_bound: float | None = None  # None is Kimi Linear's softplus gate

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_heads", "head_dim", "short_conv_kernel_size")


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(Config):
    """How the experts' selection bias is found (`perilune.nn.balancer`); no released config says."""

    kind: Literal["quantile", "sign", "aux", "band", "none"] = "quantile"
    options: dict[str, Any] = field(default_factory=dict)  # of that balancer, e.g. {"bins": 1000, "ema": 0.9}


@dataclass(frozen=True, kw_only=True)
class K3Config(Config):
    """A K3-class model.  Fields are named as in the released `config.json` (its `text_config`): one maps to one.

    Architectural keys have no default: a config that lacks one is refused.  The switches that releases leave out have
    the meaning of their absence: no query low rank, no output gate, experts at full width, plain residual.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    rms_norm_eps: float
    # attention
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: LinearAttentionConfig
    q_lora_rank: int | None = None
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    # depth: layers in a block, "full" for every sublayer a source, None for the plain residual
    attn_res_block_size: int | Literal["full"] | None = None
    # feed-forward
    hidden_act: Literal["situ", "silu"]
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    moe_router_activation_func: Literal["sigmoid"]
    moe_renormalize: bool
    routed_scaling_factor: float
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    # the rest
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    carried: dict[str, Any] = field(default_factory=dict)  # keys that do not shape the network
    # this library's own
    layer_types: tuple[str, ...] | None = None  # a registered attention for every layer, instead of the two lists
    attn_res_bank: Literal["bfloat16", "float8"] | None = None  # in what finished blocks are kept, None: as they are
    balance: BalanceConfig = BalanceConfig()
    mtp_loss_weight: float = 0.1
    balance_loss_weight: float = 1.0
    answer_loss_weight: float = 0.45

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_layers()
        self._check_experts()
        if not self.mla_use_nope:
            raise ConfigError("mla_use_nope: expected true, got false; rotary positions are not part of this family")
        if self.hidden_act == "situ" and None in (self.activation_situ_beta, self.activation_situ_linear_beta):
            raise ConfigError(
                "hidden_act: 'situ' needs activation_situ_beta and activation_situ_linear_beta; K3 has 4.0 and 25.0"
            )
        size = self.attn_res_block_size
        if isinstance(size, int) and size < 1:
            raise ConfigError(f"attn_res_block_size: expected at least 1, got {size}; null is the plain residual")
        if size is None and self.attn_res_bank is not None:
            raise ConfigError(
                f"attn_res_bank: expected null with the plain residual, got {self.attn_res_bank!r}; "
                "give attn_res_block_size too"
            )

    def _check_sizes(self) -> None:
        _at_least(
            self, 1, "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads",
            "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "moe_layer_freq",
        )  # fmt: skip
        _at_least(
            self, 0, "qk_rope_head_dim", "first_k_dense_replace", "num_experts", "num_shared_experts",
            "num_nextn_predict_layers", "initializer_range", "mtp_loss_weight", "balance_loss_weight",
            "answer_loss_weight",
        )  # fmt: skip
        for name in (
            "rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor",
        ):  # fmt: skip
            value = getattr(self, name)
            fits = value is None or 0 < value < math.inf
            require(fits, name, "a finite number above 0", value, "see a released config")

    def _check_layers(self) -> None:
        linear = self.linear_attn_config
        if self.layer_types is not None:
            if len(self.layer_types) != self.num_hidden_layers:
                raise ConfigError(
                    f"layer_types: expected {self.num_hidden_layers} entries (num_hidden_layers), "
                    f"got {len(self.layer_types)}; name one attention a layer"
                )
            return
        both = sorted((*linear.kda_layers, *linear.full_attn_layers))
        if len(both) != self.num_hidden_layers or both != list(range(1, self.num_hidden_layers + 1)):
            raise ConfigError(
                "linear_attn_config: expected kda_layers and full_attn_layers to hold every number from 1 to "
                f"{self.num_hidden_layers} once, got {both}; layers are counted from 1"
            )

    def _check_experts(self) -> None:
        if not any(self.is_moe(i) for i in range(self.num_hidden_layers)):
            return
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token: expected from 1 to num_experts ({self.num_experts}), "
                f"got {self.num_experts_per_token}; choose one in range"
            )
        _at_least(self, 1, "moe_intermediate_size", "routed_expert_hidden_size", "num_expert_group", "topk_group")
        if self.num_experts % self.num_expert_group:
            raise ConfigError(
                f"num_expert_group: expected a divisor of num_experts ({self.num_experts}), "
                f"got {self.num_expert_group}; choose a divisor"
            )
        seen = self.topk_group * (self.num_experts // self.num_expert_group)
        if self.topk_group > self.num_expert_group or seen < self.num_experts_per_token:
            raise ConfigError(
                f"topk_group: expected from 1 to num_expert_group ({self.num_expert_group}), with room for "
                f"{self.num_experts_per_token} choices, got {self.topk_group}; keep more groups"
            )

    # what layer i (counted from 0) is

    def attention(self, i: int) -> str:
        """The registered name of layer i's attention: `kda`, `mla`, or what `layer_types` says."""
        if self.layer_types is not None:
            return self.layer_types[i]
        return "kda" if i + 1 in self.linear_attn_config.kda_layers else "mla"

    def is_moe(self, i: int) -> bool:
        return self.num_experts > 0 and i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0

    @property
    def residual_period(self) -> int | None:
        """Sublayers between two finished blocks of the depth stream; None for the plain residual."""
        size = self.attn_res_block_size
        return 1 if size == "full" else None if size is None else 2 * size

    # exchange with the released files

    @classmethod
    def from_hf(cls, values: dict[str, Any]) -> Self:
        """From a released `config.json`: K3's, with its `text_config` inside, or Kimi Linear's flat one.

        Behaviour is chosen by keys, not by the model's name.  Raises ConfigError on an unknown or missing key.
        """
        if "text_config" in values:
            outer = {k: v for k, v in values.items() if k != "text_config"}
            flat = _object(values, "text_config")
            unknown = set(outer) - CARRIED - {"tie_word_embeddings"}
            carried = {"outer": outer, **_take_carried(flat)}
            flat.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings"))
        else:
            flat, unknown = dict(values), set()
            carried = _take_carried(flat)
        own = _object(flat, "perilune")
        flat.pop("perilune", None)
        flat = _without_absent(flat)  # null is what a missing key is
        if "linear_num_heads" in flat:
            _respell(flat)
        _refuse_variants(flat)
        known = set(cls.__dataclass_fields__) - {"carried"}
        unknown |= set(flat) - known
        if unknown:
            key = min(unknown)
            raise ConfigError(f"config: unknown key {key!r}; {nearest(key, known | CARRIED)}")
        return cls.from_dict({**flat, **own, "carried": carried})

    def to_hf(self) -> dict[str, Any]:
        """The inverse of `from_hf`; what only this library knows goes under the key `perilune`."""
        values = self.to_dict()
        carried = values.pop("carried")
        own = {key: values.pop(key) for key in OWN}
        if own["attn_res_bank"] is None:
            del own["attn_res_bank"]
        outer = carried.pop("outer", None)
        values["num_key_value_heads"] = self.num_attention_heads
        inner = {**_without_absent(values), **carried, "perilune": own}
        return inner if outer is None else {**outer, "text_config": inner}

    @property
    def vision(self) -> dict[str, Any] | None:
        """The released `vision_config`, as it came."""
        return self.carried.get("outer", {}).get("vision_config")


def _at_least(config: Config, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        fits = value is None or least <= value < math.inf
        require(fits, name, f"at least {least}", value, "give a finite number in range")


def _object(values: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy of the object under `key`; an empty one if there is none."""
    value = values.get(key, {})
    require(isinstance(value, dict), key, "an object", repr(value), "write key: value pairs")
    return dict(value)


def _names(values: dict[str, Any], key: str) -> list[str]:
    """Takes the list of names under `key` out of `values`."""
    names = values.pop(key, [])
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
    require(fits, key, "a list of names", repr(names), "name one for each layer")
    return names


def _take_carried(flat: dict[str, Any]) -> dict[str, Any]:
    return {key: flat.pop(key) for key in CARRIED & set(flat)}


def _respell(flat: dict[str, Any]) -> None:
    """Replaces the keys that `transformers` writes for Kimi Linear instead of, or beside, the released ones."""
    layers = list(enumerate(_names(flat, "layer_types"), 1))
    flat["linear_attn_config"] = {
        **_object(flat, "linear_attn_config"),
        **{ours: flat.pop(theirs) for theirs, ours in RESPELLED.items() if theirs in flat},
        "kda_layers": [i for i, kind in layers if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in layers if kind == "full_attention"],
    }
    feeds = _names(flat, "mlp_layer_types")
    if feeds != sorted(feeds):
        raise ConfigError(
            f"mlp_layer_types: expected all 'dense' before all 'sparse', got {feeds}; no release mixes them"
        )
    flat["first_k_dense_replace"] = feeds.count("dense")
    flat.setdefault("moe_layer_freq", 1)
    flat.setdefault("moe_router_activation_func", "sigmoid")


def _refuse_variants(flat: dict[str, Any]) -> None:
    """Takes out the keys with which a relative of the family could differ, once sure that it does not."""
    if flat.pop("attention_bias", False):
        raise ConfigError("attention_bias: expected false, got true; projections of this family have no bias")
    heads = flat.get("num_attention_heads")
    if (kv_heads := flat.pop("num_key_value_heads", heads)) != heads:
        raise ConfigError(
            f"num_key_value_heads: expected num_attention_heads ({heads}), got {kv_heads}; heads share no keys here"
        )


def _without_absent(values: dict[str, Any]) -> dict[str, Any]:
    """Without the switches that are off: releases leave those keys out."""
    return {k: _without_absent(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None}


def hybrid_layers(num_layers: int, period: int = 4) -> dict[str, tuple[int, ...]]:
    """The releases' schedule, counted from 1: every `period`-th layer and the last are MLA, the others KDA."""
    full = tuple(i for i in range(1, num_layers + 1) if i % period == 0 or i == num_layers)
    return {"full_attn_layers": full, "kda_layers": tuple(i for i in range(1, num_layers + 1) if i not in full)}

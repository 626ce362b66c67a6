"""What is trained: scales, their models, the forms of the residual.  None of it needs torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from perilune.core.errors import ConfigError, nearest
from perilune.models.k3 import K3Config, presets

TUNING_SEED = 1000
"""The seed on which learning rates are chosen; no other figure of it is reported."""
SMALL_EPS = 1e-8
"""A mean of many sources is small at first: with an eps like the square of its size, a norm leaves it small."""
MAIN = ("plain", "full", "block", "bypass")


@dataclass(frozen=True)
class Variant:
    """A form of the residual."""

    name: str
    block: int | Literal["full"] | None
    """As `attn_res_block_size`: layers in a block."""
    bypass: bool = False
    tuned_as: str = ""
    """The variant whose learning rate it takes."""
    eps: float | None = None
    """Of all norms of the stream and of mixers' keys, instead of the model's own."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A model, and how it is trained under each form of the residual."""

    name: str
    config: Callable[[], K3Config]
    """With the plain residual; others get a narrower dense feed-forward, so that a token costs all of them the same."""
    grain: int = 1
    """What the narrower width is a multiple of."""
    block: int
    """Layers in a block of the variant `block`."""
    sizes: tuple[int, ...] = ()
    """Other sizes of a block, in layers."""
    small_eps: tuple[str, ...] = ()
    """Main variants that are trained once more with norms of SMALL_EPS."""
    every: int
    """The bypass leads from every so many-th layer of the lower half to the layer half the depth above it."""
    rank: int
    """Of the bypass' projection."""
    context: int
    rows: int
    """Rows of `context` tokens in a step."""
    steps: int
    tuning_steps: int
    rates: tuple[float, ...]
    """Learning rates that every main variant is tried at."""

    @property
    def batch_tokens(self) -> int:
        return self.context * self.rows

    @property
    def variants(self) -> dict[str, Variant]:
        """By name, those of MAIN first."""
        main = (
            Variant("plain", None, tuned_as="plain"),
            Variant("full", "full", tuned_as="full"),
            Variant("block", self.block, tuned_as="block"),
            Variant("bypass", None, bypass=True, tuned_as="bypass"),
        )
        sizes = (Variant(f"block {size}", size, tuned_as="block") for size in self.sizes)
        small = (
            replace(variant, name=f"{variant.name} eps", eps=SMALL_EPS)
            for variant in main
            if variant.name in self.small_eps
        )
        return {variant.name: variant for variant in (*main, *sizes, *small)}

    def bypasses(self) -> tuple[tuple[int, int], ...]:
        """(layer whose attention is tapped, layer whose input it is added to), counted from 0."""
        half = self.config().num_hidden_layers // 2
        return tuple((i, i + half) for i in range(0, half, self.every))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A size of the comparison."""

    name: str
    stacks: tuple[Stack, ...]
    vocab_size: int
    text_bytes: int
    """To train on, at most."""
    judged_tokens: int
    """Held-out tokens that a model is judged on, at most."""
    looked_at: int
    """Rows of held-out text that figures by depth are taken on."""
    seeds: int = 3
    timed_steps: int = 8
    bf16: bool = False
    """Products in bfloat16."""
    jobs: int = 2
    """Runs at a time."""

    def limited(self, seeds: int | None) -> "Scale":
        """With fewer seeds."""
        return replace(self, seeds=min(seeds or self.seeds, self.seeds))

    def stack(self, name: str) -> Stack:
        return next(stack for stack in self.stacks if stack.name == name)


def chosen_variants(scale: Scale, names: str | None) -> tuple[str, ...] | None:
    """Those named, by commas; None for all.  Raises ConfigError for one that no stack of the scale has."""
    if names is None:
        return None
    known = {name for stack in scale.stacks for name in stack.variants}
    for name in names.split(","):
        if name not in known:
            raise ConfigError(f"--variants: {scale.name} has none called {name!r}; {nearest(name, known)}")
    return tuple(names.split(","))


def deep(layers: int, width: int, heads: int, inner: int, vocab: int) -> K3Config:
    """Narrow and deep: latent attention and a dense feed-forward in every layer, and nothing else."""
    nano = presets.nano()
    head = width // heads
    return nano.replace(
        hidden_size=width, num_hidden_layers=layers, vocab_size=vocab, intermediate_size=inner,
        num_attention_heads=heads, q_lora_rank=None, kv_lora_rank=width // 2, qk_nope_head_dim=head,
        qk_rope_head_dim=0, v_head_dim=head, layer_types=("mla",) * layers, first_k_dense_replace=layers,
        attn_res_block_size=None,
        linear_attn_config=nano.linear_attn_config.replace(kda_layers=(), full_attn_layers=()),
    )  # fmt: skip


def preset(config: K3Config, vocab: int) -> K3Config:
    """A preset with the plain residual, and with the vocabulary that all models of a scale share."""
    return config.replace(attn_res_block_size=None, vocab_size=vocab)


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            name="tiny", vocab_size=300, text_bytes=30_000, judged_tokens=256, looked_at=2, seeds=2, timed_steps=2,
            stacks=(
                Stack(
                    name="deep", config=lambda: deep(4, 16, 2, 48, 300), block=2, sizes=(1,),
                    small_eps=("full",), every=1, rank=2, context=16, rows=4, steps=6, tuning_steps=3,
                    rates=(4e-3, 1.6e-2),
                ),
            ),
        ),
        Scale(
            name="small", vocab_size=1024, text_bytes=2_000_000, judged_tokens=8192, looked_at=8,
            stacks=(
                Stack(
                    name="deep", config=lambda: deep(16, 48, 2, 144, 1024), block=2, sizes=(1, 4, 8),
                    small_eps=("full",), every=2, rank=6, context=64, rows=8, steps=40, tuning_steps=20,
                    rates=(1e-2, 2e-2, 4e-2),
                ),
                Stack(
                    name="preset", config=lambda: preset(presets.nano(), 1024), block=2, every=1, rank=8,
                    context=64, rows=8, steps=32, tuning_steps=16, rates=(5e-3, 1e-2, 2e-2),
                ),
            ),
        ),
        Scale(
            name="full", vocab_size=4096, text_bytes=16_000_000, judged_tokens=131_072, looked_at=16, bf16=True, jobs=4,
            stacks=(
                Stack(
                    name="deep", config=lambda: deep(50, 128, 4, 384, 4096), grain=8, block=6, sizes=(1, 12, 25),
                    small_eps=("full",), every=5, rank=16, context=256, rows=16,
                    steps=144, tuning_steps=72, rates=(6e-3, 1.2e-2, 2.4e-2),
                ),
                Stack(
                    name="preset", config=lambda: preset(presets.small(), 4096), grain=8, block=4, every=2, rank=32,
                    context=256, rows=32, steps=96, tuning_steps=48, rates=(3e-3, 6e-3, 1.2e-2),
                ),
            ),
        ),
    )
}  # fmt: skip
"""`tiny` for tests, `small` for two cores, `full` for a GPU: there `preset` is the preset `small`, else `nano`."""

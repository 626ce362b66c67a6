"""What is trained and what is asked: scales, and the ways up.  None of it needs torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from perilune.core.errors import ConfigError, nearest
from perilune.models.k3 import K3Config, presets
from perilune.recipes import ladder
from perilune.train.config import DataConfig, OptimizerConfig, Run, Stage

TASKS = ("retrieval", "chains")
OF_THE_PAGE = {"retrieval": 1 / 4, "chains": 1 / 2}
"""How often who names any value of the page is right: one of four pairs, of two chains."""
FORMS = ("taught", "held out")
"""Phrasings, keys and names as in training, and others that no sample has."""
PROBE_SEED = 7_000_001
"""Of all that is asked; probes draw from random numbers that no sample of training has anyway."""
TEXT = "text"
AT_ONCE = 1e-6
"""Share of a stage that a warm-up in one step takes: with 0 the last step before the stage would have its peak too, for
a step's rate is the one at its end."""

Stages = tuple[Stage, ...]


def climb(stages: Stages) -> Stages:
    """As the recipe has it: every stage warms up again, to a lower peak."""
    return stages


def steady(stages: Stages) -> Stages:
    """The same stages, but rates only fall: from where the first stage ended to where the last one ends."""
    later = stages[1:]
    total, done, made = sum(stage.tokens for stage in later), 0, list(stages[:1])
    for stage in later:
        done += stage.tokens
        end = stages[0].lr_end + (stages[-1].lr_end - stages[0].lr_end) * done / total
        made.append(stage.replace(lr=made[-1].lr_end, lr_end=end, warmup=0.0))  # nothing to warm up to
    return tuple(made)


def sudden(stages: Stages) -> Stages:
    """The same stages and peaks, each reached in one step."""
    return (stages[0], *(stage.replace(warmup=AT_ONCE) for stage in stages[1:]))


def jump(stages: Stages) -> Stages:
    """From the first stage straight to the longest: as many tokens, re-warmed once, to the second stage's peak."""
    tokens = sum(stage.tokens for stage in stages[1:])
    return stages[0], stages[-1].replace(tokens=tokens, lr=stages[1].lr)


@dataclass(frozen=True)
class Variant:
    """A way up.  All that have the same gate share their first stage, weight for weight."""

    name: str
    stages: Callable[[Stages], Stages] = climb
    bounded: bool = True
    """Whether the decay is bounded, or Kimi Linear's softplus, which is not."""

    @property
    def trunk(self) -> str:
        """The first stage that it shares."""
        return "bounded" if self.bounded else "unbounded"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("climb"),
        Variant("no re-warming", steady),
        Variant("jump", jump),
        Variant("unbounded gate", bounded=False),
        Variant("no warm-up", sudden),
    )
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Models, stages and what is asked after each of them."""

    name: str
    model: Callable[[], K3Config]
    stages: Stages
    optimizer: OptimizerConfig
    variants: tuple[str, ...]
    seeds: int
    jobs: int = 1
    """Seeds at a time."""
    text_bytes: int
    """Of the library, that are learned from, about."""
    judged_bytes: int = 2_000_000
    """Of its held-out files, that are judged on at most."""
    vocab_size: int
    words: int = 64
    """How many keys or names there are, in training and as many held out, and how many values."""
    lengths: tuple[int, ...]
    """In tokens, at which questions are asked."""
    probe_tokens: int
    """Spent on a task in one form at one length; at least one sample."""
    most_samples: int = 64
    position_context: int
    """Tokens of held-out text read in one go for the loss by position."""
    position_rows: int
    look_context: int
    look_tokens: int
    """Of held-out text, in pieces of `look_context`, whose loss is looked at on the way."""
    look_every: int
    """Steps between two looks; a stage's first four steps are all looked at."""
    bf16: bool = False

    def run(self, variant: Variant, seed: int) -> Run:
        """The whole of it as the trainer knows it."""
        model = self.model()
        if not variant.bounded:
            model = model.replace(linear_attn_config=model.linear_attn_config.replace(gate_lower_bound=None))
        return Run(
            model=model,
            stages=variant.stages(self.stages),
            data=DataConfig(vocab_size=self.vocab_size, tasks={name: {"words": self.words} for name in TASKS}),
            optimizer=self.optimizer,
            precision="bfloat16" if self.bf16 else "float32",
            seed=seed,
        )

    def samples(self, length: int) -> int:
        return min(max(1, self.probe_tokens // length), self.most_samples)

    def limited(self, seeds: int | None) -> "Scale":
        return self if seeds is None else replace(self, seeds=min(seeds, self.seeds))


def short(stages: Stages, changes: Iterable[dict[str, Any]]) -> Stages:
    """A recipe's stages with other sizes; all text is of one source."""
    return tuple(stage.replace(mix=one_text(stage.mix), **change) for stage, change in zip(stages, changes))


def one_text(mix: dict[str, float]) -> dict[str, float]:
    return {TEXT: sum(share for name, share in mix.items() if name not in TASKS), **{name: mix[name] for name in TASKS}}


def chosen_variants(scale: Scale, words: str | None) -> tuple[str, ...]:
    """Those named, by commas, or all of the scale.  Raises ConfigError for what there is none of."""
    names = scale.variants if words is None else tuple(word.strip() for word in words.split(","))
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"variants: there is none called {name!r}; {nearest(name, VARIANTS)}")
    return names


def narrow(width: int, experts: int) -> K3Config:
    """The preset `nano`, narrower: 0.5M parameters where a width of 64 has 8 experts."""
    nano = presets.nano()
    return nano.replace(
        hidden_size=width, num_attention_heads=2, q_lora_rank=width // 2, kv_lora_rank=width // 2,
        intermediate_size=2 * width, num_experts=experts, num_experts_per_token=2,
        routed_expert_hidden_size=width // 2, linear_attn_config=nano.linear_attn_config.replace(num_heads=2),
    )  # fmt: skip


MINI, FULL = ladder.stepladder(), ladder.ladder()


def tiny() -> K3Config:
    made = narrow(16, 4)
    linear = made.linear_attn_config.replace(head_dim=8, kda_layers=(1,), full_attn_layers=(2,))
    return made.replace(num_hidden_layers=2, linear_attn_config=linear)


TINY = Scale(
    name="tiny",
    model=tiny,
    stages=short(MINI.stages, (
        {"context": 192, "batch_tokens": 384, "tokens": 1536},
        {"context": 256, "batch_tokens": 512, "tokens": 1024},
        {"context": 384, "batch_tokens": 512, "tokens": 1024, "min_document": 64},
        {"context": 512, "batch_tokens": 512, "tokens": 1024, "min_document": 128},
    )),
    optimizer=MINI.optimizer,
    variants=tuple(VARIANTS),
    seeds=2, text_bytes=60_000, judged_bytes=40_000, vocab_size=400, lengths=(192, 512, 1024), probe_tokens=512,
    position_context=512, position_rows=2, look_context=128, look_tokens=512, look_every=2,
)  # fmt: skip
"""Shows that the harness works, and nothing else."""

SMALL = Scale(
    name="small",
    model=lambda: narrow(64, 8),
    stages=short(MINI.stages, (
        {"context": 128, "batch_tokens": 512, "tokens": 200_000},
        {"context": 512, "batch_tokens": 512, "tokens": 20_000},
        {"context": 1024, "batch_tokens": 1024, "tokens": 20_000},
        {"context": 2048, "batch_tokens": 2048, "tokens": 24_000, "min_document": 512},
    )),
    optimizer=MINI.optimizer,
    variants=("climb", "no re-warming", "jump", "unbounded gate"),
    seeds=3, text_bytes=3_000_000, vocab_size=2048, words=16, lengths=(128, 512, 2048, 4096), probe_tokens=4096,
    most_samples=24, position_context=4096, position_rows=2, look_context=512, look_tokens=2048, look_every=10,
)  # fmt: skip
"""Four rungs of the recipe `stepladder`, shorter: what two cores do in some minutes."""

LARGE = Scale(
    name="full",
    model=lambda: presets.small().replace(vocab_size=8192),
    stages=short(FULL.stages, (
        {"context": 512, "batch_tokens": 65_536, "tokens": 24_000_000},
        {"context": 4096, "batch_tokens": 65_536, "tokens": 6_000_000},
        {"context": 16_384, "batch_tokens": 65_536, "tokens": 3_000_000, "min_document": 1024},
        {"context": 65_536, "batch_tokens": 65_536, "tokens": 2_000_000, "min_document": 2048},
    )),
    optimizer=FULL.optimizer,
    variants=tuple(VARIANTS),
    seeds=3, text_bytes=12_000_000, vocab_size=8192, lengths=(512, 4096, 16_384, 65_536, 262_144),
    probe_tokens=262_144, position_context=131_072, position_rows=1, look_context=4096, look_tokens=32_768,
    look_every=20, bf16=True,
)  # fmt: skip
"""The recipe `ladder` at a sixteenth of its lengths, so that rows fit on one GPU as the trainer is."""

SCALES = {scale.name: scale for scale in (TINY, SMALL, LARGE)}

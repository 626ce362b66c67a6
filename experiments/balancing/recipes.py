"""What is trained: scales, rules, situations.  Functions that return whole runs; none needs torch.

run(SCALES["small"], "shift", RULES["sign"].changes(0.01), seed=0, home=Path("runs/balancing/small"))
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from perilune.core.errors import ConfigError, nearest
from perilune.data.source import TextSource
from perilune.models.k3 import K3Config, presets
from perilune.train.config import DataConfig, OptimizerConfig, Run, Stage

TUNING_SEED = 1000
"""The seed on which a rule's step or coefficient is chosen; no figure of it is reported."""
LOSS_MARGIN = 0.005
"""A candidate may cost this share of the best candidate's bits per byte; among those that do not cost more, the most
even one is taken."""
SKEWED_GINI = 0.865
"""Of the first step's loads where the router is skewed, in every layer: about that of the synthetic router with 896
experts of which 176 are dead (`synthetic`, a = 0.7)."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A balancer with its options, of which one may have to be chosen among candidates."""

    kind: str
    options: dict[str, float | None]
    tuned: str | None = None
    candidates: tuple[float, ...] = ()

    def changes(self, chosen: float | None = None) -> tuple[str, ...]:
        """What it changes in a run, as typed on a command line."""
        options = self.options if self.tuned is None else {**self.options, self.tuned: chosen}
        return f"model.balance.kind={self.kind}", f"model.balance.options={json.dumps(options)}"


RULES = {
    "quantile": Rule(kind="quantile", options={}),
    "quantile plain": Rule(kind="quantile", options={"decay": None}),
    "quantile ema": Rule(kind="quantile", options={"decay": None, "ema": 0.9}),
    "sign": Rule(kind="sign", options={}, tuned="step", candidates=(3e-3, 1e-2, 3e-2)),
    "sign 1e-3": Rule(kind="sign", options={"step": 1e-3}),
    "band": Rule(kind="band", options={}),
    "aux": Rule(kind="aux", options={}, tuned="coefficient", candidates=(1e-3, 1e-2, 1e-1)),
    "none": Rule(kind="none", options={}),
}
"""`quantile` is as shipped: histograms of steps pooled.  `sign 1e-3` is the step of the literature."""

SITUATIONS = {
    "normal": ({"prose": 0.5, "code": 0.5}, {"prose": 0.5, "code": 0.5}),
    "skewed": ({"prose": 0.5, "code": 0.5}, {"prose": 0.5, "code": 0.5}),
    "shift": ({"prose": 1.0}, {"code": 1.0}),
}
"""What the two halves of a run read.  `skewed` begins with a router that sends nearly all tokens to few experts."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A size of the comparison."""

    name: str
    model: Callable[[], K3Config]
    context: int
    batch_tokens: int
    steps: int
    """Of a run; the second half begins a stage of its own."""
    lr: float
    momentum: float = 0.95
    vocab_size: int
    text_bytes: int
    """Of prose and of code, each, at most."""
    rules: tuple[str, ...] = ("quantile", "quantile plain", "quantile ema", "sign", "band", "aux", "none")
    situations: tuple[str, ...] = ("normal", "skewed", "shift")
    seeds: int = 3
    tuned_in: tuple[str, ...] = ("normal",)
    """Situations in which candidates are tried; the others take what was chosen in the first of these."""
    load_window: int
    """Steps over which loads are summed where chance in single steps would show."""
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int | None = 25
    """None: no checkpoints, for models that take longer to write than to train; a run that ends early starts over."""
    gigabytes: float
    """What a run takes of a GPU's memory, generously: decides how many share one."""
    timed_steps: int = 20

    def limited(self, seeds: int | None, rules: str | None, situations: str | None) -> "Scale":
        """With fewer seeds, or only these rules and situations, by commas.  Raises ConfigError for one not there.

        What a rule leaves open is chosen in these situations alone, or, if it is in none of them, where it always is.
        """
        chosen = {"rules": (rules, self.rules), "situations": (situations, self.situations)}
        named = {key: tuple(text.split(",")) for key, (text, _) in chosen.items() if text is not None}
        for key, names in named.items():
            for name in names:
                if name not in chosen[key][1]:
                    raise ConfigError(f"--{key}: {self.name} has none called {name!r}; {nearest(name, chosen[key][1])}")
        fewer = replace(self, seeds=min(seeds or self.seeds, self.seeds), **named)
        tuned_in = tuple(name for name in self.tuned_in if name in fewer.situations) or self.tuned_in
        return replace(fewer, tuned_in=tuned_in)


def tiny() -> K3Config:
    """16 experts, top-2: a run in a second."""
    small = presets.nano()
    return small.replace(
        hidden_size=32, num_hidden_layers=3, vocab_size=512, intermediate_size=64, num_attention_heads=2,
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        linear_attn_config=small.linear_attn_config.replace(
            num_heads=2, head_dim=8, kda_layers=(1, 2), full_attn_layers=(3,)
        ),
        num_experts=16, num_experts_per_token=2, moe_intermediate_size=16, routed_expert_hidden_size=16,
    )  # fmt: skip


def full() -> K3Config:
    """K3's 896 experts, 16 a token, at twice the nano preset's width."""
    return presets.nano().replace(
        hidden_size=256, vocab_size=4096, intermediate_size=512, num_experts=896, num_experts_per_token=16,
        moe_intermediate_size=32, routed_expert_hidden_size=128,
    )  # fmt: skip


def wide() -> K3Config:
    """512 experts, 8 a token, at the `1b` preset's width and depth."""
    return presets.one_b().replace(vocab_size=8192, num_experts=512, num_experts_per_token=8)


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            name="tiny", model=tiny, context=32, batch_tokens=256, steps=8, lr=8e-3, momentum=0.85, vocab_size=512,
            text_bytes=40_000, load_window=4, gigabytes=1, timed_steps=3,
            rules=("quantile", "sign", "none"), seeds=1,
        ),
        Scale(
            name="small", model=presets.nano, context=128, batch_tokens=1024, steps=40, lr=8e-3, momentum=0.85,
            vocab_size=2048, text_bytes=600_000, load_window=20, gigabytes=3,
        ),
        Scale(
            name="full", model=full, context=512, batch_tokens=16_384, steps=200, lr=5e-3, momentum=0.9,
            vocab_size=4096, text_bytes=12_000_000, load_window=20, gigabytes=16,
            tuned_in=("normal", "skewed", "shift"),
        ),
        Scale(
            name="wide", model=wide, context=1024, batch_tokens=32_768, steps=96, lr=2e-3, vocab_size=8192,
            text_bytes=12_000_000, load_window=20, gigabytes=60, precision="bfloat16", checkpoint_every=None,
            rules=("quantile", "quantile plain", "sign", "sign 1e-3", "none"), situations=("skewed",), seeds=1,
            tuned_in=("skewed",),
        ),
    )
}  # fmt: skip
"""`tiny` for tests, `small` for two cores, `full` and `wide` for a GPU."""


def run(scale: Scale, situation: str, changes: tuple[str, ...], seed: int, home: Path) -> Run:
    """One run, whose texts, tokenizer and, in a skewed situation, first weights lie below `home`."""
    home = home.resolve()
    first, second = SITUATIONS[situation]
    half = scale.batch_tokens * (scale.steps // 2)
    middle = (scale.lr + scale.lr / 10) / 2
    stage = {"context": scale.context, "batch_tokens": scale.batch_tokens, "tokens": half}
    skewed = situation == "skewed"
    return Run(
        model=scale.model(),
        data=DataConfig(
            sources={name: TextSource(path=str(home / "texts" / name)) for name in ("prose", "code")},
            vocab_size=scale.vocab_size,
            tokenizer=None if skewed else str(home / "texts" / "tokenizer"),
        ),
        stages=(
            Stage(name="first half", lr=scale.lr, lr_end=middle, warmup=0.1, mix=first, **stage),
            Stage(name="second half", lr=middle, lr_end=scale.lr / 10, warmup=0, mix=second, **stage),
        ),
        optimizer=OptimizerConfig(momentum=scale.momentum, adamw_lr=1.5 * scale.lr),
        seed=seed,
        load_window=scale.load_window,
        checkpoint_every=scale.checkpoint_every or scale.steps,
        precision=scale.precision,
        init=str(home / "skewed" / f"seed{seed}") if skewed else None,
    ).override(changes)

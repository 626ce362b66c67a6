"""A whole training run as data.  Imports without torch: recipes return these."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from perilune.core.config import Config, require
from perilune.data.source import TextSource
from perilune.models.k3.config import K3Config, Recompute
from perilune.optim.schedule import LearningRateStage, Schedule

LARGEST_RATE = 1e38
"""Weights and what is added to them are float32, where anything above is infinite."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """What a run learns from."""

    sources: dict[str, TextSource] = field(default_factory=lambda: {"text": TextSource()})
    """Texts by the names that stages mix them under; the first is also what tasks hide their statements in."""
    vocab_size: int = 2048
    """Of the byte-level BPE trained on the training text; where little text gives fewer tokens, that many."""
    tokenizer: str | None = None
    """A folder with a `tokenizer.json` to use instead of training one."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of tasks by their names, such as `{"needle": {"pairs": 4}}`."""

    def __post_init__(self) -> None:
        require(bool(self.sources), "sources", "at least one", "none", 'add {"text": {}}')
        _at_least(self, 257, "vocab_size", advice="256 bytes and the end of a text")


@dataclass(frozen=True, kw_only=True)
class Stage(Config):
    """A stretch of training with one context length."""

    name: str
    context: int
    """Tokens a document may span; longer ones are cut."""
    batch_tokens: int
    """Tokens in a step: documents packed end to end."""
    micro_tokens: int | None = None
    """Tokens that go through the model at once, at most, on each rank: a step in micro-batches is the step in one pass,
    in less memory.  None for all of them."""
    recompute: Recompute = "none"
    """Of what the backward pass keeps the input alone and computes the rest again: `sublayers`, `layers`, or `blocks`,
    which keeps least and takes longest (`K3Model.recompute_activations`)."""
    tokens: int
    """Length of the stage."""
    lr: float
    """Peak learning rate."""
    lr_end: float
    """Learning rate at the stage's end."""
    warmup: float = 0.01
    """Share of the stage's tokens spent warming up."""
    mix: dict[str, float] = field(default_factory=lambda: {"text": 1.0})
    """What a stage reads: shares of its tokens (any scale) by name of a source or a task (`perilune.data.tasks`)."""
    min_document: int = 0
    """Tokens a document of text must have to be read in this stage."""
    long_times: int = 1
    """How often an epoch reads a document that fills the context; one of n tokens is read
    1 + floor((long_times - 1) min(1, n / context)) times, a short one once."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "context", "batch_tokens", "tokens", advice="give a length in tokens")
        require(
            self.context <= self.batch_tokens,
            "context",
            f"at most batch_tokens ({self.batch_tokens})",
            self.context,
            "a step holds at least one whole context",
        )
        require(
            self.micro_tokens is None or self.micro_tokens >= self.context,
            "micro_tokens", f"at least the context ({self.context}), or null", self.micro_tokens,
            "a document is in one micro-batch",
        )  # fmt: skip
        require(0 < self.lr < LARGEST_RATE, "lr", "a finite rate above 0", self.lr, "1e-2 suits Muon")
        require(
            0 <= self.lr_end < LARGEST_RATE,
            "lr_end", "a finite rate of at least 0", self.lr_end, "a tenth of lr is usual",
        )  # fmt: skip
        shares = self.mix.values()
        require(
            all(share >= 0 for share in shares) and 0 < sum(shares) < math.inf,
            "mix", "finite shares of at least 0, one of them above", self.mix, 'write {"text": 1}',
        )  # fmt: skip
        _at_least(self, 0, "min_document", advice="0 takes every document")
        _at_least(self, 1, "long_times", advice="1 reads every document once an epoch")
        require(0 <= self.warmup < 1, "warmup", "a share of the stage in [0, 1)", self.warmup, "write 0.01 for 1 %")

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / self.batch_tokens))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """Per-head Muon for matrices, AdamW for the rest (`perilune.optim`)."""

    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_lr: float | None = None
    """Peak rate of AdamW's parameters; Muon's if None."""
    qk_clip: float | None = 100.0
    """Largest attention logit a head may keep; None leaves weights alone."""
    qk_clip_every: int = 25
    """Steps between two looks at the logits."""

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, "momentum", "a decay in [0, 1)", self.momentum, "0 turns it off")
        for name in ("weight_decay", "adamw_lr"):
            value = getattr(self, name) or 0.0
            require(0 <= value < math.inf, name, "a finite number of at least 0", value, "0 turns it off")
        clip = self.qk_clip
        require(clip is None or clip > 0, "qk_clip", "a logit above 0, or null", clip, "the K2 report uses 100")
        _at_least(self, 1, "qk_clip_every", advice="1 looks at every step")


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Config):
    """Which steps are left out because their loss or gradient is far from usual (`perilune.train.guard`)."""

    width: float | None = None
    """How far above the median of the last steps is too far, in spreads of theirs; 10 is wide.  None takes every
    step, and ends the run at the first without a number."""
    window: int = 100
    """Steps that say what is usual: the last ones taken in the same stage."""
    patience: int = 5
    """Steps left out in a row that end the run."""

    def __post_init__(self) -> None:
        require(
            self.width is None or 0 < self.width < math.inf,
            "width",
            "a number above 0, or null",
            self.width,
            "10 is wide",
        )
        _at_least(self, 20, "window", advice="100 steps serve well")
        _at_least(self, 1, "patience", advice="5 steps serve well")


@dataclass(frozen=True, kw_only=True)
class Run(Config):
    """Everything that decides a run's result on one machine."""

    model: K3Config
    stages: tuple[Stage, ...]
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    precision: Literal["float32", "bfloat16"] = "float32"
    """What matrix products compute in.  Weights, their gradients and the optimizer's state are float32 either way, and
    so is what a bfloat16 model computes wide (`torch.autocast`)."""
    compile_norms: bool = False
    """Compile the norms (`K3Model.compile_norms`): fewer passes over memory on a GPU, minutes more at the start."""
    seed: int = 0
    load_window: int = 50
    """Steps over which expert loads are summed before their Gini is taken."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; each stage's end makes one too."""
    init: str | None = None
    """A run's folder, or a model's, to start from: weights, tokenizer and, where it has one, the optimizer's state."""

    def __post_init__(self) -> None:
        require(bool(self.stages), "stages", "at least one", "none", "add a Stage")
        names = [stage.name for stage in self.stages]
        require(
            len(set(names)) == len(names),
            "stages", "a name of its own for each", ", ".join(names), "what a run writes is told apart by them",
        )  # fmt: skip
        require(
            self.model.residual_period is not None or all(stage.recompute != "blocks" for stage in self.stages),
            "recompute", "none, sublayers or layers without attention residuals", "blocks", "say layers",
        )  # fmt: skip
        require(0 <= self.seed < 2**63, "seed", "a number from 0 to below 2^63", self.seed, "any will do")
        _at_least(self, 1, "load_window", advice="50 steps serve well")
        _at_least(self, 1, "checkpoint_every", advice="100 steps serve well")
        require(
            self.data.vocab_size <= self.model.vocab_size,
            "data.vocab_size",
            f"at most the model's {self.model.vocab_size}",
            self.data.vocab_size,
            "raise model.vocab_size",
        )

    @property
    def schedule(self) -> Schedule:
        """Learning rate over tokens, whole steps counted."""
        return Schedule(
            tuple(
                LearningRateStage(tokens=s.steps * s.batch_tokens, peak=s.lr, end=s.lr_end, warmup=s.warmup)
                for s in self.stages
            )
        )


def _at_least(config: Config, least: int, *names: str, advice: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value >= least, name, f"at least {least}", value, advice)

"""A whole training run as data.  Imports without torch: recipes return these."""

from dataclasses import dataclass, field

from perilune.core.config import Config
from perilune.core.errors import ConfigError
from perilune.models.k3.config import K3Config
from perilune.optim.schedule import LearningRateStage, Schedule


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """What a run learns from."""

    source: str = "standard_library"
    """`standard_library`, or the path of a folder of text files."""
    pattern: str = "*.txt"
    """Which files of a folder."""
    vocab_size: int = 2048
    """Of the byte-level BPE trained on the training text."""


@dataclass(frozen=True, kw_only=True)
class Stage(Config):
    """A stretch of training with one context length."""

    name: str
    context: int
    """Tokens a document may span; longer ones are cut."""
    batch_tokens: int
    """Tokens in a step: documents packed end to end."""
    tokens: int
    """Length of the stage."""
    lr: float
    """Peak learning rate."""
    lr_end: float
    """Learning rate at the stage's end."""
    warmup: float = 0.01
    """Share of the stage's tokens spent warming up."""

    def __post_init__(self) -> None:
        for name in ("context", "batch_tokens", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{self.name}.{name}: expected at least 1, got {getattr(self, name)}; give a length in tokens"
                )
        if self.context > self.batch_tokens:
            raise ConfigError(
                f"{self.name}.context: expected at most batch_tokens ({self.batch_tokens}), got {self.context}; "
                "a step holds at least one whole context"
            )

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


@dataclass(frozen=True, kw_only=True)
class Run(Config):
    """Everything that decides a run's result on one machine."""

    model: K3Config
    stages: tuple[Stage, ...]
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    load_window: int = 50
    """Steps over which expert loads are summed before their Gini is taken."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stages: expected at least one, got none; add a Stage")
        if self.data.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"data.vocab_size: expected at most the model's {self.model.vocab_size}, got {self.data.vocab_size}; "
                "raise model.vocab_size"
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

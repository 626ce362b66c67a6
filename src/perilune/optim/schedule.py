"""Learning rate as a function of tokens done.  No torch here: recipes import it.

One cosine over the whole run is one stage; a run that warms up again for every context length is one stage each.
"""

import math
from dataclasses import dataclass

from perilune.core.config import Config
from perilune.core.errors import ConfigError


@dataclass(frozen=True)
class LearningRateStage(Config):
    """Linear warm-up to `peak`, then a cosine to `end`.

    With u the part of the stage's tokens done, w the warm-up and lr_in the rate at which the stage before it ended:

        u < w:  lr_in + (peak - lr_in) u / w
        else:   end + (peak - end) (1 + cos(pi (u - w) / (1 - w))) / 2
    """

    tokens: int
    """Length of the stage in tokens."""
    peak: float
    """Rate at the end of the warm-up."""
    end: float
    """Rate at the end of the stage."""
    warmup: float = 0.01
    """Part of the stage's tokens spent warming up, 0 <= warmup < 1; 0 starts at `peak`."""

    def __post_init__(self) -> None:
        if self.tokens <= 0:
            raise ConfigError(f"tokens: expected a positive number of tokens, got {self.tokens}; drop the stage")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup: expected a part of the stage in [0, 1), got {self.warmup}; write 0.01 for 1 %")
        for name, rate in (("peak", self.peak), ("end", self.end)):
            if not (rate >= 0 and math.isfinite(rate)):
                raise ConfigError(f"{name}: expected a finite rate >= 0, got {rate}; give the learning rate itself")

    def lr(self, done: float, lr_in: float = 0.0) -> float:
        """Rate after the part `done` (0 to 1) of the stage, entered at `lr_in`."""
        if done < self.warmup:
            return lr_in + (self.peak - lr_in) * done / self.warmup
        angle = math.pi * (done - self.warmup) / (1 - self.warmup)
        return self.end + (self.peak - self.end) * (1 + math.cos(angle)) / 2


@dataclass(frozen=True)
class Schedule(Config):
    """Stages one after the other; each warms up from where the one before it ended, the first from 0.

    >>> Schedule((LearningRateStage(tokens=1000, peak=1.0, end=0.1),)).lr(5)
    0.5
    """

    stages: tuple[LearningRateStage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stages: expected at least one, got none; give a LearningRateStage")

    @property
    def tokens(self) -> int:
        """Length of all stages in tokens."""
        return sum(stage.tokens for stage in self.stages)

    def lr(self, tokens_done: float) -> float:
        """Rate after `tokens_done` tokens; past the last stage, the rate at which it ended.

        It depends on nothing else, so a resumed run takes up the same sequence.
        """
        if tokens_done < 0:
            raise ConfigError(f"tokens_done: expected >= 0, got {tokens_done}; count from the start of the run")
        lr_in = 0.0
        for stage in self.stages:
            if tokens_done < stage.tokens:
                return stage.lr(tokens_done / stage.tokens, lr_in)
            tokens_done -= stage.tokens
            lr_in = stage.end
        return lr_in

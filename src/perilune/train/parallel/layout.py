"""How ranks share a run's work.  Imports without torch."""

from dataclasses import dataclass

from perilune.core.config import Config, require
from perilune.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout(Config):
    """No part of a run: what a run learns does not depend on it, and a run may go on in another."""

    context: int = 1
    """Ranks over which every row of tokens is cut; the others each have documents of their own."""
    pipeline: int = 1
    """Stages, each of some of the layers, through which a step's micro-batches go one after the other; the ranks of a
    stage share it as `context` and `expert` say."""
    expert: int = 1
    """Ranks over which every layer's experts are spread, tokens travelling to them."""

    balanced: bool = False
    """Whether those copy crowded experts to each other in every step, so that each computes equally many tokens."""

    def __post_init__(self) -> None:
        for name in ("context", "pipeline", "expert"):
            value = getattr(self, name)
            require(value >= 1, name, "at least 1", value, "1 leaves it off")

    def check(self, ranks: int, experts: int, layers: int) -> None:
        """Raises ConfigError unless so many ranks can be laid out so for a model of so many experts and layers."""
        if self.pipeline > layers:
            raise ConfigError(
                f"layout.pipeline: expected at most {layers} stages, one for each layer, got {self.pipeline}; lower it"
            )
        if ranks % self.pipeline:
            raise ConfigError(f"layout.pipeline: expected a divisor of {ranks} ranks, got {self.pipeline}; start more")
        stage = ranks // self.pipeline
        for name in ("context", "expert"):
            if stage % getattr(self, name):
                whose = f"{stage} ranks" if self.pipeline == 1 else f"a stage's {stage} of {ranks} ranks"
                raise ConfigError(
                    f"layout.{name}: expected a divisor of {whose}, got {getattr(self, name)}; start more"
                )
        if experts % self.expert:
            raise ConfigError(
                f"layout.expert: expected a divisor of {experts} experts, got {self.expert}; every rank has as many"
            )

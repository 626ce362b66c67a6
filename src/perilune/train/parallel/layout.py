"""How ranks share a run's work.  Imports without torch."""

from dataclasses import dataclass

from perilune.core.config import Config, require
from perilune.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout(Config):
    """No part of a run: what a run learns does not depend on it, and a run may go on in another."""

    context: int = 1
    """Ranks over which every row of tokens is cut; the others each have documents of their own."""
    expert: int = 1
    """Ranks over which every layer's experts are spread, tokens travelling to them."""

    balanced: bool = False
    """Whether those copy crowded experts to each other in every step, so that each computes equally many tokens."""

    def __post_init__(self) -> None:
        for name in ("context", "expert"):
            value = getattr(self, name)
            require(value >= 1, name, "at least 1", value, "1 leaves it off")

    def check(self, ranks: int, experts: int) -> None:
        """Raises ConfigError unless so many ranks can be laid out so for a model of so many experts."""
        for name in ("context", "expert"):
            if ranks % getattr(self, name):
                raise ConfigError(
                    f"layout.{name}: expected a divisor of {ranks} ranks, got {getattr(self, name)}; start more"
                )
        if experts % self.expert:
            raise ConfigError(
                f"layout.expert: expected a divisor of {experts} experts, got {self.expert}; every rank has as many"
            )

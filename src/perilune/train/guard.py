"""Steps that are left out: those whose loss or gradient lies far above that of the steps before.

A batch that is no text, or a row that a network or disk spoiled, gives a gradient many times as long as others.  Muon's
step has the same length all the same, but for 1 / (1 - momentum) steps its direction would be that gradient's.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from perilune.train.config import GuardConfig

LEAST = 20  # steps, before which nothing is known of what is usual
STEADY = 0.01  # of the middle: what any loss may move by, however steady it was
NORMAL = 1.4826  # the standard deviation of a normal distribution, in median distances from its median


class Guard:
    """Judges the figures of one step after the other against the last `window` steps that were taken.

        x is too far  <=>  x > m + width max(s, 0.01 |m|)      m: median, s = 1.4826 median |x - m|, of the last steps

    or x is no number.  Medians, so that a step far out moves neither; a step left out is not among them.  All that
    decides are figures that every rank has alike (`Ranks.figures`), so all ranks decide alike.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped = 0
        """Steps left out so far."""
        self.in_a_row = 0
        self._recent: dict[str, deque[float]] = {}

    @property
    def on(self) -> bool:
        return self.config.width is not None

    @property
    def spent(self) -> bool:
        """Whether so many steps were left out in a row that it is no accident any more."""
        return self.in_a_row >= self.config.patience

    def begin(self) -> None:
        """Another stage: what it reads has losses of its own, and nothing is known of them yet."""
        self._recent.clear()

    def judge(self, figures: Mapping[str, float]) -> str | None:
        """Takes note of a step's figures; says in a few words why it is to be left out, None where it is not."""
        if not self.on:
            return None
        reason = next((why for name, value in figures.items() if (why := self._too_far(name, value))), None)
        if reason is not None:
            self.skipped += 1
            self.in_a_row += 1
            return reason
        self.in_a_row = 0
        for name, value in figures.items():
            self._recent.setdefault(name, deque(maxlen=self.config.window)).append(value)
        return None

    def limit(self, name: str) -> float:
        """What that figure of the next step may be at most."""
        recent = self._recent.get(name, ())
        if self.config.width is None or len(recent) < LEAST:
            return math.inf
        middle = median(recent)
        spread = NORMAL * median(abs(x - middle) for x in recent)
        return middle + self.config.width * max(spread, STEADY * abs(middle))

    def _too_far(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name}: expected a number, got {value}"
        if value > (limit := self.limit(name)):
            return f"{name}: expected at most {limit:.4g} by the last {len(self._recent[name])} steps, got {value:.4g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """What was seen, in JSON's types."""
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "recent": recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; of a checkpoint that knows no guard, from the beginning."""
        self.skipped, self.in_a_row = int(state.get("skipped", 0)), int(state.get("in_a_row", 0))
        window = self.config.window  # may be another by now
        self._recent = {name: deque(values, maxlen=window) for name, values in state.get("recent", {}).items()}

"""A task as a stream to train on."""

from random import Random
from typing import Any

import numpy as np

from perilune.core.errors import DataError
from perilune.data.stream import Segment
from perilune.data.tasks.task import Task

HALVINGS = 2
"""How often a sample may be shorter than the context by half."""


class TaskStream:
    """Samples of a task, one after the other; see `perilune.data.stream.Stream`.

    A sample has the context's length, a half or a quarter of it, whichever its number draws: distances of all kinds in
    every stage, and room in a batch for other things beside it.  The stream's place is one integer, the index of the
    next sample, whatever the length of those before.
    """

    def __init__(self, task: Task, seed: int = 0) -> None:
        self.task, self.seed = task, seed
        self.index = 0
        self._context = task.least

    def size(self, ahead: int = 0) -> int:
        """See `Stream`."""
        draw = Random(f"size {self.task.name} {self.seed} {self.index + ahead}")
        length = self._context >> draw.randint(0, HALVINGS)
        return length if length >= self.task.least else self._context

    def resize(self, context: int, min_document: int = 0, long_times: int = 1) -> None:
        """See `Stream`; no text here.  Raises DataError if the task does not fit into `context` tokens."""
        self.task.check(context)
        self._context = context

    def read(self, tokens: int) -> Segment:
        """See `Stream`.  Raises DataError if the next samples do not end there."""
        sizes = self._sizes(tokens)
        samples = [self.task.sample(size, self.seed, self.index + i) for i, size in enumerate(sizes)]
        self.index += len(sizes)
        return Segment(
            np.concatenate([sample.ids for sample in samples]).astype(np.int64),
            np.concatenate([sample.labels() for sample in samples]),
            np.cumsum([0, *sizes[:-1]]),
            np.concatenate([sample.answers() for sample in samples]),
        )

    def skip(self, tokens: int) -> None:
        """See `Stream`."""
        self.index += len(self._sizes(tokens))

    def _sizes(self, tokens: int) -> list[int]:
        sizes: list[int] = []
        while sum(sizes) < tokens:
            sizes.append(self.size(len(sizes)))
        if not sizes or sum(sizes) != tokens:
            end = sum(sizes) or self.size()
            raise DataError(f"tokens: expected the end of a sample ({end}), got {tokens}; ask for `size` first")
        return sizes

    def state_dict(self) -> dict[str, Any]:
        """See `Stream`."""
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stream`."""
        if state.keys() != {"index"}:
            raise DataError(
                f"{self.task.name}: expected the state of a task, got {', '.join(state)}; resume the same mix"
            )
        self.index = int(state["index"])

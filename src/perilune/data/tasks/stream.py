"""A task as a stream to train on."""

from typing import Any

import numpy as np

from perilune.core.errors import DataError
from perilune.data.stream import Segment
from perilune.data.tasks.task import Task


class TaskStream:
    """Samples of a task, one after the other; see `perilune.data.stream.Stream`.

    Its place is one integer, the index of the next sample, whatever the length of those before.
    """

    whole = True

    def __init__(self, task: Task, seed: int = 0) -> None:
        self.task, self.seed = task, seed
        self.index = 0
        self._length = task.least

    def resize(self, context: int, min_document: int = 0) -> None:
        """From now on samples of `context` tokens.  Raises DataError if the task does not fit into so few."""
        self.task.check(context)
        self._length = context

    def read(self, tokens: int) -> Segment:
        """The next `tokens / context` samples.  Raises DataError if that is not a whole number."""
        first, number = self.index, self._samples(tokens)
        samples = [self.task.sample(self._length, self.seed, first + i) for i in range(number)]
        self.index += number
        return Segment(
            np.concatenate([sample.ids for sample in samples]).astype(np.int64),
            np.concatenate([sample.labels() for sample in samples]),
            np.arange(number) * self._length,
        )

    def skip(self, tokens: int) -> None:
        """See `Stream`."""
        self.index += self._samples(tokens)

    def _samples(self, tokens: int) -> int:
        number, rest = divmod(tokens, self._length)
        if number < 1 or rest:
            raise DataError(
                f"tokens: expected a multiple of {self._length} (the length of a sample), got {tokens}; change either"
            )
        return number

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

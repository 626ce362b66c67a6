"""Scattered: several tasks at once, their parts lying between shuffled documents."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from perilune.data.tasks.aggregation import Aggregation
from perilune.data.tasks.files import Files
from perilune.data.tasks.page import Page, Query, Sample
from perilune.data.tasks.task import Task
from perilune.data.tasks.variables import Variables
from perilune.data.tokenizer import ByteBPE


class Scattered(Task):
    """Small `variables`, `aggregation` and `files` among each other, where documents meet.

    The documents are shuffled, the long ones cut.  Statements lie anywhere, half of them in the first three eighths:
    questions at the end are more than half the text away from most of what they need.  Every second training sample
    asks at the end, once; the others ask again and again, anywhere after the statements in question.
    """

    name = "scattered"
    bend = 0.5

    def __init__(
        self, tokenizer: ByteBPE, filler: Sequence[np.ndarray], *, stated: float = 1.0, **options: Any
    ) -> None:
        """stated, options: see `Task`."""
        super().__init__(tokenizer, filler, stated=stated, **options)
        self.tasks: tuple[Task, ...] = (
            Variables(tokenizer, filler, chains=2, hops=3),
            Aggregation(tokenizer, filler, things=2),
            Files(tokenizer, filler, files=2, keys=2),
        )
        self.lines = "|".join(task.lines for task in self.tasks)
        self.least = 1 + sum(task.least - 1 for task in self.tasks)
        self.chance = sum(task.chance for task in self.tasks) / len(self.tasks)

    def sample(self, length: int, seed: int, index: int) -> Sample:
        page = self._page("sample", length, seed, index, self.stated)
        ask = self._ask_once if index % 2 else self._ask_often
        ask(page, self.state(page))
        return self._finish(page)

    def state(self, page: Page) -> list[list[Query]]:
        return [group for task in self.tasks for group in task.state(page)]

    def answers(self, text: str) -> Iterator[tuple[int, str]]:
        for task in self.tasks:
            yield from task.answers(text)

    def _text(self, page: Page) -> tuple[np.ndarray, np.ndarray | None]:
        return self._filler.read_shuffled(page.free, page.random, max(1, page.free // 12))

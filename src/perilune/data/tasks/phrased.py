"""Retrieval and chains: one thing to do, said in several ways, some of which are kept from training.

A model that was taught one form of a line may have learned the form.  Samples of these tasks take a phrasing each, and
with `held_out` phrasings, keys and names that no sample without it has: what is asked so was not practised.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from perilune.data.tasks import needle, variables
from perilune.data.tasks.needle import Needle
from perilune.data.tasks.page import Page, Query
from perilune.data.tasks.task import Task
from perilune.data.tasks.variables import Variables
from perilune.data.tokenizer import ByteBPE

Phrasing = tuple[str, str]
"""Templates of a statement and of a question."""


class Phrased(Task):
    """A task in several phrasings, of which every sample and every probe draws one."""

    taught: ClassVar[tuple[Phrasing, ...]]
    kept: ClassVar[tuple[Phrasing, ...]]
    """What `held_out` takes instead."""
    kind: ClassVar[type[Needle] | type[Variables]]
    """The task in one phrasing."""
    sizes: ClassVar[dict[str, int]]
    """What it speaks of at most, unless told otherwise."""

    def __init__(
        self,
        tokenizer: ByteBPE,
        filler: Sequence[np.ndarray],
        *,
        held_out: bool = False,
        words: int = 64,
        **options: Any,
    ) -> None:
        """held_out: phrasings and keys or names that training has none of; values are the same.  words: as in `kind`.
        options: sizes of `kind`, and see `Task`."""
        fixed: dict[str, Any] = {name: options.pop(name, size) for name, size in self.sizes.items()}
        fixed |= {"held_out": held_out, "words": words}
        super().__init__(tokenizer, filler, **options)
        self.tasks: tuple[Task, ...] = tuple(
            self.kind(tokenizer, filler, statement=statement, question=question, **fixed)
            for statement, question in (self.kept if held_out else self.taught)
        )
        self.lines = "|".join(task.lines for task in self.tasks)
        self.least = max(task.least for task in self.tasks)
        self.chance = 1 / words

    @classmethod
    def options(cls) -> dict[str, type]:
        return super().options() | dict.fromkeys(cls.sizes, int)

    def state(self, page: Page) -> list[list[Query]]:
        return page.random.choice(self.tasks).state(page)

    def answers(self, text: str) -> Iterator[tuple[int, str]]:
        for task in self.tasks:
            yield from task.answers(text)


class Retrieval(Phrased):
    """`Needle` in three phrasings, and two more held out: several keys in the text, each asked for by name."""

    name = "retrieval"
    kind = Needle
    sizes: ClassVar[dict[str, int]] = {"pairs": 4}
    taught = (
        (needle.STATEMENT, needle.QUESTION),
        ("\nNote: {key} means {value}!\n", "\nSo {key} means {value}\n"),
        ("\n- {key} -> {value}!\n", "\n- {key} was {value}\n"),
    )
    kept = (
        ("\n* {key}: {value}!\n", "\n* {key} stood for {value}\n"),
        ("\nThe code of {key} is {value}!\n", "\nBack to {key} with code {value}\n"),
    )


class Chains(Phrased):
    """`Variables` in three phrasings, and two more held out: a value handed on from name to name, several hops deep."""

    name = "chains"
    kind = Variables
    sizes: ClassVar[dict[str, int]] = {"chains": 2, "hops": 3}
    taught = (
        (variables.STATEMENT, variables.QUESTION),
        ("\nNote: {name} copies {held}!\n", "\nSo {name} holds {value}\n"),
        ("\n- {name} <- {held}!\n", "\n- {name} had {value}\n"),
    )
    kept = (
        ("\n* {name} takes {held}!\n", "\n* {name} gives {value}\n"),
        ("\nSet {name} to {held}!\n", "\nBy now {name} equals {value}\n"),
    )

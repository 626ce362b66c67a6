"""What every task is: samples out of a seed, and an independent reader that solves them."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from random import Random
from typing import ClassVar

import numpy as np

from perilune.core.errors import ConfigError, DataError
from perilune.data.tasks.page import Filler, Page, Query, Sample
from perilune.data.tokenizer import ByteBPE


class Task(ABC):
    """Text with questions in it whose answers stand far before them.

    A task says in `state` what stands on a page and what can be asked about it, and in `answers` how a reader finds
    that out.  A sample depends on its arguments and the task's, and on nothing else; lengths are in tokens.
    """

    name: ClassVar[str]
    chance: float
    """How often the best guess without reading is right."""
    least: int
    """The shortest length that every sample and every probe fits in."""
    bend: ClassVar[float] = 0.0
    """How strongly statements are drawn to the start: 0 not at all, 1 so that half of them are in the first quarter."""
    lines: str
    """The expression for each line of the task, without line breaks; nothing in the filler matches it."""

    def __init__(
        self,
        tokenizer: ByteBPE,
        filler: Sequence[np.ndarray],
        *,
        asked: float = 0.8,
        stated: float = 0.25,
        learn: str = "text",
    ) -> None:
        """filler: encoded training documents, each int [tokens]; what samples are filled up with.
        asked: share of a training sample's tokens that are questions (if they fit; one at least); of a longer one also
        a half, a quarter and so on, so that the last time a thing was asked lies at all distances too.
        stated: the share of a sample's text before which all statements stand.
        learn: which tokens are to be predicted beside the answers: "text", what lies between the lines, for the lines
        themselves were drawn at random; none ("answers"); or "all" but the first.
        """
        if learn not in ("text", "answers", "all"):
            raise ConfigError(f"learn: expected 'text', 'answers' or 'all', got {learn!r}; take one of them")
        for share, value in (("asked", asked), ("stated", stated)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{share}: expected a share from 0 to 1, got {value}; 0.8 is four fifths")
        if not any(map(len, filler)):
            raise DataError("filler: expected documents with tokens in them, got none; give some training text")
        self.tokenizer = tokenizer
        self.asked, self.stated, self.learn = asked, stated, learn
        self._documents = filler

    @classmethod
    def options(cls) -> dict[str, type]:
        """What can be said of a task beside its texts, by name, and the type of each."""
        inits = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
        every = [p for init in inits for p in inspect.signature(init).parameters.values()]
        return {p.name: p.annotation for p in every if p.kind is p.KEYWORD_ONLY}

    def sample(self, length: int, seed: int, index: int) -> Sample:
        """Sample `index` of `seed`, to train on: exactly `length` tokens, the same everywhere and always.

        It speaks of one thing or several, and asks again and again: both decide whether a small model learns the task
        at all.  Raises DataError if `length` is below `least`.
        """
        page = self._page("sample", length, seed, index, self.stated)
        self._ask_often(page, self.state(page))
        return self._finish(page)

    def probe(self, length: int, seed: int, index: int) -> Sample:
        """As `sample`, to judge by: as many statements as there can be, spread over all of the text and asked about at
        the end, once each.

        No training sample shares the random numbers of a probe, whatever their seeds.
        """
        page = self._page("probe", length, seed, index, 1.0)
        self._ask_once(page, self.state(page))
        return self._finish(page)

    def check(self, length: int) -> None:
        """Raises DataError if `length` is below `least`."""
        if length < self.least:
            raise DataError(
                f"{self.name}: expected a length of at least {self.least} tokens, got {length}; take longer samples"
            )

    def solve(self, text: str) -> list[str]:
        """The answers to all questions in `text`, in order, from statements alone; "" where those do not tell."""
        return [answer for _, answer in sorted(self.answers(text))]

    @abstractmethod
    def state(self, page: Page) -> list[list[Query]]:
        """Puts statements on the page; returns what can be asked about them, in groups of which probes ask one each."""

    @abstractmethod
    def answers(self, text: str) -> Iterator[tuple[int, str]]:
        """Where each question stands in `text`, and its answer."""

    def _page(self, kind: str, length: int, seed: int, index: int, until: float) -> Page:
        self.check(length)
        random = Random(f"{self.name} {kind} {length} {seed} {index}")  # by SHA-512 of the text: the same everywhere
        return Page(length, random, until, self.bend, vary=kind == "sample")

    def _ask_often(self, page: Page, groups: list[list[Query]]) -> None:
        halvings = page.random.randint(0, (page.length // self.least).bit_length() - 1)
        most, asked = self.asked * page.length / 2**halvings, 0
        while True:
            query = page.random.choice(page.random.choice(groups))
            if asked and (asked + len(query.ids) > most or len(query.ids) > page.free):
                return
            page.ask(query, last=False)
            asked += len(query.ids)

    def _ask_once(self, page: Page, groups: list[list[Query]]) -> None:
        for group in page.random.sample(groups, len(groups)):
            page.ask(page.random.choice(group), last=True)

    def _text(self, page: Page) -> tuple[np.ndarray, np.ndarray | None]:
        """What to fill the page with, and where that may be cut (None: anywhere)."""
        return self._filler.read(page.free, page.random), None

    def _finish(self, page: Page) -> Sample:
        sample = page.lay_out(self.tokenizer.eos_id, *self._text(page))
        if self.learn == "answers":
            sample.learn[:] = False
        if self.learn == "all":
            sample.learn[1:] = True
            for question in sample.questions:
                sample.learn[question.start : question.stop] = False
        return sample

    @cached_property
    def _filler(self) -> Filler:
        return Filler(self.tokenizer, self._documents, self.lines)

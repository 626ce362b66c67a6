"""What every task is: samples out of a seed, and an independent reader that solves them."""

from collections.abc import Callable, Sequence
from random import Random
from typing import ClassVar

import numpy as np

from perilune.core.errors import ConfigError, DataError
from perilune.data.tasks.page import Filler, Page, Sample
from perilune.data.tokenizer import ByteBPE


class Task:
    """Text with questions in it that can be answered from what stands far before them.

    A task says in `_write` what stands on a page and in `solve` how to read it.  Lengths are in tokens, so that every
    answer's place is known to the token.
    """

    name: ClassVar[str]
    chance: float
    """How often a guess without reading is right."""
    least: int
    """The shortest length that every sample and every probe fits in."""

    def __init__(self, tokenizer: ByteBPE, filler: Sequence[np.ndarray], *, forbidden: str, learn: str = "all") -> None:
        """filler: encoded training documents, each int [tokens]; what samples are filled up with.  forbidden: the
        expression for all lines of the task, kept out of the filler.  learn: which tokens are to be predicted, "all" or
        "answers"."""
        if learn not in ("all", "answers"):
            raise ConfigError(f"learn: expected 'all' or 'answers', got {learn!r}; take one of them")
        self.tokenizer, self.learn = tokenizer, learn
        self._filler = Filler(tokenizer, filler, forbidden)

    def sample(self, length: int, seed: int, index: int) -> Sample:
        """Sample `index` of `seed`, to train on: exactly `length` tokens, the same ones everywhere and always.

        Raises DataError if `length` is below `least`.
        """
        return self._make(length, f"sample {seed} {index}", self._write)

    def probe(self, length: int, seed: int, index: int) -> Sample:
        """As `sample`, to judge by: every question stands at the end and is asked once.  No training sample is drawn
        with the seed of a probe, whatever the numbers."""
        return self._make(length, f"probe {seed} {index}", self._write_probe)

    def check(self, length: int) -> None:
        """Raises DataError if `length` is below `least`."""
        if length < self.least:
            raise DataError(
                f"{self.name}: expected a length of at least {self.least} tokens, got {length}; take longer samples"
            )

    def _make(self, length: int, seed: str, write: Callable[[Page, Random], None]) -> Sample:
        random = Random(f"{self.name} {length} {seed}")  # seeded by the SHA-512 of the text, so the same everywhere
        self.check(length)
        page = Page(length)
        write(page, random)
        return page.lay_out(self.tokenizer.eos_id, self._filler, random, self.learn)

    def solve(self, text: str) -> list[str]:
        """The answers to the questions in `text`, in order, from what it says before each; "" where it does not say."""
        raise NotImplementedError

    def _write(self, page: Page, random: Random) -> None:
        """Puts statements and questions on the page of a training sample."""
        raise NotImplementedError

    def _write_probe(self, page: Page, random: Random) -> None:
        """As `_write`, all questions at depth 1."""
        raise NotImplementedError

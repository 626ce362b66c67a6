"""Needle: pairs of a key and a value somewhere in text, then keys whose values are asked for."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from perilune.core.errors import ConfigError
from perilune.data.tasks.page import Page, Query
from perilune.data.tasks.task import Task
from perilune.data.tasks.words import Template, choose_others, choose_words
from perilune.data.tokenizer import ByteBPE

STATEMENT = "\n# {key} = {value}!\n"
QUESTION = "\n# {key} is {value}\n"


class Needle(Task):
    """Copy the value that was said for a key: `# river = stone!`, and later `# river is stone`.

    From its second time on a question in a training sample can also be answered from the last one.
    """

    name = "needle"

    def __init__(
        self,
        tokenizer: ByteBPE,
        filler: Sequence[np.ndarray],
        *,
        pairs: int = 8,
        words: int = 64,
        held_out: bool = False,
        statement: str = STATEMENT,
        question: str = QUESTION,
        **options: Any,
    ) -> None:
        """pairs: how many are stated at most.  words: how many keys there are, and how many values.  held_out: takes
        keys that are nobody's otherwise.  statement, question: templates of a line; they may be the same, then a key's
        first line states.  options: see `Task`."""
        super().__init__(tokenizer, filler, **options)
        if not 1 <= pairs <= words:
            raise ConfigError(f"pairs: expected 1 to {words} (the number of words), got {pairs}; take more words")
        if not question.endswith(" {value}\n"):
            raise ConfigError(f"question: expected the value last, got {question!r}; put what it ends with before")
        self.pairs = pairs
        chosen = choose_words(tokenizer, 2 * words)
        self.values, self.keys = chosen[:words], chosen[words:]
        if held_out:
            self.keys = choose_others(tokenizer, chosen, words)
        self._statement = Template(tokenizer, statement, key=self.keys, value=self.values)
        self._question = Template(tokenizer, question, key=self.keys, value=self.values)
        self.lines = f"{self._statement.pattern}|{self._question.pattern}"
        self.chance = 1 / words
        self.least = 1 + pairs * (self._statement.longest + self._question.longest)

    def state(self, page: Page) -> list[list[Query]]:
        pairs = page.number(self.pairs)
        keys, values = page.random.sample(self.keys, pairs), page.random.sample(self.values, pairs)
        lines = page.state([self._statement(key, value) for key, value in zip(keys, values)])
        return [[Query(self._question(key, value), value, [line])] for key, value, line in zip(keys, values, lines)]

    def answers(self, text: str) -> Iterator[tuple[int, str]]:
        said: dict[str, str] = {}
        for line in re.finditer(self.lines, text):
            key, value = (word for word in line.groups() if word)
            if line[1] and key not in said:
                said[key] = value
            else:
                yield line.start(), said.get(key, "")

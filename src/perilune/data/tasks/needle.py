"""Needle: pairs of a key and a value somewhere in text, then keys whose values are asked for."""

import re
from collections.abc import Sequence
from random import Random

import numpy as np

from perilune.core.errors import ConfigError
from perilune.data.tasks.page import Line, Page
from perilune.data.tasks.task import Task
from perilune.data.tasks.words import Template, Word, choose_words
from perilune.data.tokenizer import ByteBPE

STATEMENT = "\n# {key} = {value}\n"
QUESTION = "\n# {key} ? {value}\n"


class Needle(Task):
    """Copy the value that was said for a key: `# river = stone`, and later `# river ? stone`.

    Training samples state their pairs in the first quarter of the text and ask for them again and again: how often
    decides whether a small model learns it at all.  From its second time on a question can also be answered from the
    last one; probes ask for every pair once.
    """

    name = "needle"

    def __init__(
        self,
        tokenizer: ByteBPE,
        filler: Sequence[np.ndarray],
        *,
        pairs: int = 8,
        words: int = 64,
        asked: float = 0.5,
        statement: str = STATEMENT,
        question: str = QUESTION,
        learn: str = "all",
    ) -> None:
        """pairs: how many are stated.  words: how many keys there are, and how many values.  asked: share of a training
        sample's tokens that are questions (as many as fit; one at least).  statement, question: templates of a line
        with places {key} and {value}, which may be the same one.
        """
        if not 1 <= pairs <= words:
            raise ConfigError(f"pairs: expected 1 to {words} (the number of words), got {pairs}; take more words")
        chosen = choose_words(tokenizer, 2 * words)
        self.values, self.keys = chosen[:words], chosen[words:]
        self.pairs, self.asked = pairs, asked
        self._statement = Template(tokenizer, statement, key=self.keys, value=self.values)
        self._question = Template(tokenizer, question, key=self.keys, value=self.values)
        # A question may have the statement's form: then a key's first line states.
        self._line = re.compile(f"{self._statement.pattern}|{self._question.pattern}")
        super().__init__(tokenizer, filler, forbidden=self._line.pattern, learn=learn)
        self.chance = 1 / words
        self.least = 1 + pairs * (self._statement.longest + self._question.longest)

    def solve(self, text: str) -> list[str]:
        known: dict[str, str] = {}
        answers = []
        for line in self._line.finditer(text):
            key, value = (word for word in line.groups() if word)
            if line[1] and key not in known:
                known[key] = value
            else:
                answers.append(known.get(key, ""))
        return answers

    def _write(self, page: Page, random: Random) -> None:
        asks = max(1, int(self.asked * page.length / self._question.longest))
        pairs = self._state(page, random, [random.uniform(0, 0.25) for _ in range(self.pairs)])
        for _ in range(min(asks, page.free // self._question.longest)):
            pair = random.choice(pairs)
            self._ask(page, random.uniform(pair[0].depth, 1), *pair)

    def _write_probe(self, page: Page, random: Random) -> None:
        pairs = self._state(page, random, [(i + random.random()) / self.pairs for i in range(self.pairs)])
        random.shuffle(pairs)
        for pair in pairs:
            self._ask(page, 1, *pair)

    def _state(self, page: Page, random: Random, depths: Sequence[float]) -> list[tuple[Line, Word, Word]]:
        words = zip(random.sample(self.keys, self.pairs), random.sample(self.values, self.pairs))
        return [
            (page.state(self._statement(key, value), depth), key, value) for depth, (key, value) in zip(depths, words)
        ]

    def _ask(self, page: Page, depth: float, statement: Line, key: Word, value: Word) -> None:
        page.ask(self._question(key, value), depth, value.text, len(value.ids), [statement])

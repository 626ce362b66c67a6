"""Variables: chains of assignments, and what a variable holds in the end."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from perilune.core.errors import ConfigError
from perilune.data.tasks.page import Line, Page, Query
from perilune.data.tasks.task import Task
from perilune.data.tasks.words import Template, choose_others, choose_words
from perilune.data.tokenizer import ByteBPE

STATEMENT = "\n# let {name} = {held}!\n"
QUESTION = "\n# let {name} is {value}\n"


class Variables(Task):
    """Follow assignments back to a value: `# let river = stone!`, `# let cloud = river!`, later `# let cloud is stone`.

    Several chains lie among each other, all of them of the same number of hops; a question is about any variable, so it
    takes from one hop to all.
    """

    name = "variables"

    def __init__(
        self,
        tokenizer: ByteBPE,
        filler: Sequence[np.ndarray],
        *,
        chains: int = 4,
        hops: int = 4,
        words: int = 64,
        held_out: bool = False,
        statement: str = STATEMENT,
        question: str = QUESTION,
        **options: Any,
    ) -> None:
        """chains: how many at most, of up to `hops` variables each.  words: how many names and how many values there
        are.  held_out: takes names that are nobody's otherwise.  statement, question: templates of a line, as in
        `Needle`.  options: see `Task`."""
        super().__init__(tokenizer, filler, **options)
        if not (chains >= 1 and hops >= 1 and chains * hops <= words):
            raise ConfigError(f"chains x hops: expected 1 to {words} variables, got {chains} x {hops}; take more words")
        self.chains, self.hops = chains, hops
        if not question.endswith(" {value}\n"):
            raise ConfigError(f"question: expected the value last, got {question!r}; put what it ends with before")
        chosen = choose_words(tokenizer, 2 * words)
        self.values, self.names = chosen[:words], chosen[words:]
        if held_out:
            self.names = choose_others(tokenizer, chosen, words)
        self._statement = Template(tokenizer, statement, name=self.names, held=[*self.values, *self.names])
        self._question = Template(tokenizer, question, name=self.names, value=self.values)
        self.lines = f"{self._statement.pattern}|{self._question.pattern}"
        self.chance = 1 / words
        self.least = 1 + chains * (hops * self._statement.longest + self._question.longest)

    def state(self, page: Page) -> list[list[Query]]:
        chains, hops = page.number(self.chains), page.number(self.hops)
        names = page.random.sample(self.names, chains * hops)
        values = page.random.sample(self.values, chains)
        order = list(range(chains)) * hops  # whose next variable each line sets
        page.random.shuffle(order)
        held, lines = list(values), []
        for chain, name in zip(order, names):
            lines.append(self._statement(name, held[chain]))
            held[chain] = name
        groups: list[list[Query]] = [[] for _ in values]
        read: list[tuple[Line, ...]] = [()] * chains
        for chain, name, line in zip(order, names, page.state(lines)):
            read[chain] += (line,)
            groups[chain].append(Query(self._question(name, values[chain]), values[chain], read[chain]))
        return groups

    def answers(self, text: str) -> Iterator[tuple[int, str]]:
        values = {value.text for value in self.values}
        holds: dict[str, str] = {}
        for line in re.finditer(self.lines, text):
            if line[1]:
                holds[line[1]] = holds.get(line[2], line[2])
            else:
                held = holds.get(line[3], "")
                yield line.start(), held if held in values else ""

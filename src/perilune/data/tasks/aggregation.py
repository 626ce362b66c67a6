"""Aggregation: records of who has how much of what, and questions about all records of one thing."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from perilune.core.errors import ConfigError
from perilune.data.tasks.page import Page, Query
from perilune.data.tasks.task import Task
from perilune.data.tasks.words import Template, as_word, choose_words
from perilune.data.tokenizer import ByteBPE

RECORDS = range(1, 5)
"""How many records of a thing there can be."""
TOTALS = range(5, 10)
"""What their numbers can add up to."""


class Aggregation(Task):
    """Read all records of a thing, `# anna has salt 3!`, to say how many they are, `# count salt is 2`, what they add
    up to, `# total salt is 7`, or whose is largest, `# most salt is anna`.

    Counts and totals are small and equally frequent; the largest record is larger than the others.
    """

    name = "aggregation"

    def __init__(
        self,
        tokenizer: ByteBPE,
        filler: Sequence[np.ndarray],
        *,
        things: int = 4,
        words: int = 64,
        **options: Any,
    ) -> None:
        """things: how many there are records of at most.  words: how many things there can be, and how many holders.
        options: see `Task`."""
        super().__init__(tokenizer, filler, **options)
        if not 1 <= things <= words // len(RECORDS):
            raise ConfigError(
                f"things: expected 1 to {words // len(RECORDS)} (words for their holders), got {things}; take more"
            )
        self.things = things
        chosen = choose_words(tokenizer, 2 * words)
        self._thing, self._holder = chosen[:words], chosen[words:]
        self._number = [as_word(tokenizer, str(n)) for n in range(TOTALS.stop)]
        self._record = Template(
            tokenizer,
            "\n# {holder} has {thing} {number}!\n",
            holder=self._holder,
            thing=self._thing,
            number=self._number,
        )
        self._count, self._total, self._most = (
            Template(tokenizer, f"\n# {what} {{thing}} is {{answer}}\n", thing=self._thing, answer=answers)
            for what, answers in (("count", self._number), ("total", self._number), ("most", self._holder))
        )
        asks = (self._count, self._total, self._most)
        self.lines = "|".join(template.pattern for template in (self._record, *asks))
        self.chance = (1 / len(RECORDS) + 1 / len(TOTALS) + 1 / words) / 3
        self.least = 1 + things * (len(RECORDS) * self._record.longest + max(ask.longest for ask in asks))

    def state(self, page: Page) -> list[list[Query]]:
        random = page.random
        things = random.sample(self._thing, page.number(self.things))
        numbers = [_numbers(random) for _ in things]
        holders = iter(random.sample(self._holder, sum(map(len, numbers))))
        records = [(next(holders), thing, number) for thing, of in zip(things, numbers) for number in of]
        random.shuffle(records)
        lines = page.state([self._record(holder, thing, self._number[n]) for holder, thing, n in records])
        groups = []
        for thing, of in zip(things, numbers):
            evidence = [line for line, record in zip(lines, records) if record[1] is thing]
            count, total = self._number[len(of)], self._number[sum(of)]
            most = next(holder for holder, what, number in records if what is thing and number == max(of))
            kinds = ((self._count, count), (self._total, total), (self._most, most))
            groups.append([Query(template(thing, answer), answer, evidence) for template, answer in kinds])
        return groups

    def answers(self, text: str) -> Iterator[tuple[int, str]]:
        records: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for line in re.finditer(self.lines, text):
            holder, thing, number, counted, _, totalled, _, compared, _ = line.groups()
            if holder:
                records[thing].append((int(number), holder))
                continue
            found = records[counted or totalled or compared]
            if not found:
                yield line.start(), ""
            elif counted:
                yield line.start(), str(len(found))
            elif totalled:
                yield line.start(), str(sum(n for n, _ in found))
            else:
                yield line.start(), max(found)[1]


def _numbers(random: Random) -> list[int]:
    """The numbers of a thing's records: a count from RECORDS, a total from TOTALS, one number above all others."""
    count, total = random.choice(RECORDS), random.choice(TOTALS)
    while True:
        cuts = [0, *sorted(random.sample(range(1, total), count - 1)), total]
        numbers = [stop - start for start, stop in pairwise(cuts)]
        if numbers.count(max(numbers)) == 1:
            return numbers

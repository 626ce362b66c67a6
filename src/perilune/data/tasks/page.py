"""A page: lines of a task, each at its depth, and text in the gaps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

import numpy as np

from perilune.data.packing import IGNORE
from perilune.data.tasks.words import Word
from perilune.data.tokenizer import ByteBPE


@dataclass(frozen=True)
class Question:
    ask: int
    """Position of the question's first token."""
    start: int
    """The answer is `ids[start:stop]`."""
    stop: int
    answer: str
    """Without the space before it."""
    evidence: tuple[tuple[int, int], ...]
    """Spans of tokens, [start, stop), that have to be read to answer, in order; all of them before `ask`."""


@dataclass(frozen=True)
class Sample:
    ids: np.ndarray
    """[length] int32, the tokenizer's end-of-text first"""
    questions: tuple[Question, ...]
    """In the order in which they are asked."""
    learn: np.ndarray
    """[length] bool: the tokens that are to be predicted as any text is; answers, which have a loss of their own, are
    not among them"""

    def labels(self) -> np.ndarray:
        """[length] int64: the next token where `learn` wants it, IGNORE elsewhere."""
        return self._next(self.learn)

    def answers(self) -> np.ndarray:
        """[length] int64: the next token where that is part of an answer, IGNORE elsewhere."""
        wanted = np.zeros(len(self.ids), dtype=bool)
        for question in self.questions:
            wanted[question.start : question.stop] = True
        return self._next(wanted)

    def _next(self, wanted: np.ndarray) -> np.ndarray:
        labels = np.full(len(self.ids), IGNORE, dtype=np.int64)
        np.copyto(labels[:-1], self.ids[1:], where=wanted[1:])
        return labels

    def depth(self, question: Question) -> float:
        """How deep a question's first evidence lies in what comes before all questions: 0 the start, below 1 the end.

        For samples that ask at the end, as probes do; elsewhere it can be 1 and more.
        """
        return question.evidence[0][0] / self.questions[0].ask


@dataclass(eq=False, slots=True)
class Line:
    """A statement put on a page."""

    ids: list[int]
    depth: float
    start: int = -1
    """Its position, once the page is laid out."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question that may be put on a page, its answer the last thing in it but for the line break."""

    ids: list[int]
    answer: Word
    evidence: Sequence[Line]


class Page:
    """Collects a sample's lines, then lays them out.

    A line's depth is the share of the text that comes before it; lines of one depth stand in the order they came in.
    """

    def __init__(self, length: int, random: Random, until: float, bend: float, vary: bool) -> None:
        """until: the depth before which statements stand.  bend, 0 to 1: how strongly they are drawn to the start.
        vary: whether `number` does."""
        self.length, self.random = length, random
        self._vary = vary
        self._until, self._bend = until, bend
        self._statements: list[Line] = []
        self._asked: list[tuple[float, Query]] = []
        self.free = length - 1
        """Tokens not yet taken by lines."""

    def number(self, most: int) -> int:
        """How many things of a kind the page speaks of: `most`, or, where it is to vary, any number up to that."""
        return self.random.randint(1, most) if self._vary else most

    def state(self, lines: Sequence[list[int]]) -> list[Line]:
        """Puts statements there in this order, one at random in each of as many parts of the depths (equal ones, but
        for `bend`)."""
        even = [(i + self.random.random()) / len(lines) for i in range(len(lines))]
        put = [Line(ids, self._until * x * (1 - self._bend + self._bend * x)) for ids, x in zip(lines, even)]
        self._statements += put
        self.free -= sum(len(line.ids) for line in put)
        return put

    def ask(self, query: Query, *, last: bool) -> None:
        """Puts a question at the end or, if not `last`, at random somewhere after its evidence."""
        depth = 1.0 if last else self.random.uniform(max(line.depth for line in query.evidence), 1.0)
        self._asked.append((depth, query))
        self.free -= len(query.ids)

    def lay_out(self, eos: int, text: np.ndarray, joints: np.ndarray | None = None) -> Sample:
        """The sample: end-of-text, then lines and the `free` tokens of `text` [free].

        joints: places in the text, ascending, 0 and its end among them; where given, a line stands at the nearest.
        """
        assert len(text) == self.free >= 0, "text does not fill the page"
        ids = np.empty(self.length, dtype=np.int32)
        ids[0] = eos
        position, used = 1, 0
        questions = []
        learn = np.ones(self.length, dtype=bool)
        learn[0] = False  # nothing comes before it
        everything: list[tuple[float, Line | Query]] = [(line.depth, line) for line in self._statements]
        everything += self._asked
        everything.sort(key=lambda item: item[0])
        for depth, line in everything:
            before = ceil(depth * self.free)
            if joints is not None:
                before = int(joints[np.abs(joints - before).argmin()])
            start = position + before - used
            ids[position:start] = text[used:before]
            position, used = start + len(line.ids), before
            ids[start:position] = line.ids
            learn[start:position] = False  # drawn at random
            if isinstance(line, Line):
                line.start = start
            else:
                spans = tuple(sorted((part.start, part.start + len(part.ids)) for part in line.evidence))
                first, end = position - 1 - len(line.answer.ids), position - 1
                questions.append(Question(start, first, end, line.answer.text, spans))
        ids[position:] = text[used:]
        return Sample(ids, tuple(questions), learn)


class Filler:
    """Training documents end to end, to be read from anywhere; nothing in them looks like a line of the task.

    What matches `forbidden`, an expression that spans no line break, becomes line breaks; one also stands between
    documents.  So neither a cut nor a join makes such a line.
    """

    def __init__(self, tokenizer: ByteBPE, documents: Sequence[np.ndarray], forbidden: str) -> None:
        """documents: each int [tokens], not all empty; special tokens in them are left out."""
        specials = list(tokenizer.special_ids.values())
        (line_break,) = tokenizer.encode("\n")
        kept = [np.append(text[~np.isin(text, specials)], line_break) for text in documents if len(text)]
        self.ids = np.concatenate(kept).astype(np.int32)
        self.ends = np.cumsum([len(text) for text in kept])
        """[documents] where each ends in `ids`"""
        text, pattern = tokenizer.decode_bytes(self.ids.tolist()), re.compile(forbidden.encode())
        ends = np.cumsum(tokenizer.byte_lengths()[self.ids])
        for found in pattern.finditer(text):
            first, last = np.searchsorted(ends, [found.start(), found.end() - 1], side="right")
            self.ids[first : last + 1] = line_break

    def read(self, tokens: int, random: Random) -> np.ndarray:
        """[tokens] int32, from a random place on; after the end it goes on at the start."""
        size = len(self.ids)
        if tokens <= size:
            start = random.randrange(size - tokens + 1)
            return self.ids[start : start + tokens]
        return self.ids.take(np.arange(tokens) + random.randrange(size), mode="wrap")

    def read_shuffled(self, tokens: int, random: Random, longest: int) -> tuple[np.ndarray, np.ndarray]:
        """[tokens] int32, pieces of random documents, each of at most `longest` tokens; and where the pieces end."""
        text = np.empty(tokens, dtype=np.int32)
        ends = [0]
        while ends[-1] < tokens:
            i = random.randrange(len(self.ends))
            first, last = int(self.ends[i - 1]) if i else 0, int(self.ends[i])
            first = random.randrange(first, max(first, last - longest) + 1)
            start, stop = ends[-1], min(ends[-1] + min(longest, last - first), tokens)
            text[start:stop] = self.ids[first : first + stop - start]
            text[stop - 1] = self.ids[-1]  # a line break, for a piece can be cut within a line
            ends.append(stop)
        return text, np.array(ends)

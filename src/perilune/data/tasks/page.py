"""A page: lines of a task, each at its depth, and text in the gaps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from random import Random

import numpy as np

from perilune.core.errors import DataError
from perilune.data.packing import IGNORE
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
    """Spans of tokens, [start, stop), that have to be read to answer; all of them before `ask`."""


@dataclass(frozen=True)
class Sample:
    ids: np.ndarray
    """[length] int32, the tokenizer's end-of-text first"""
    questions: tuple[Question, ...]
    """In the order in which they are asked."""
    learn: np.ndarray
    """[length] bool: the tokens that are to be predicted"""

    def labels(self) -> np.ndarray:
        """[length] int64: the next token where that is to be predicted, IGNORE elsewhere."""
        labels = np.full(len(self.ids), IGNORE, dtype=np.int64)
        labels[:-1][self.learn[1:]] = self.ids[1:][self.learn[1:]]
        return labels

    @cached_property
    def _first_ask(self) -> int:
        return min(question.ask for question in self.questions)

    def depth(self, question: Question) -> float:
        """How deep the first of a question's evidence lies in what comes before all questions: 0 the start, 1 the end.

        For probes, whose questions all stand at the end; else it may be above 1.
        """
        return question.evidence[0][0] / self._first_ask


class Filler:
    """Training documents end to end, to be read from anywhere; nothing in them looks like a line of the task.

    What matches `forbidden`, an expression that spans no line break, becomes line breaks; one also stands between
    documents.  So neither a cut nor a join makes such a line.
    """

    def __init__(self, tokenizer: ByteBPE, documents: Sequence[np.ndarray], forbidden: str) -> None:
        """`documents`: each int [tokens]; special tokens in them are left out.  Raises DataError without tokens."""
        specials = list(tokenizer.special_ids.values())
        documents = [text[~np.isin(text, specials)] for text in documents]
        if not any(map(len, documents)):
            raise DataError("filler: expected documents with tokens in them, got none; give some training text")
        (line_break,) = tokenizer.encode("\n")
        self._ids = np.concatenate([part for text in documents for part in (text, [line_break])]).astype(np.int32)
        ends = np.cumsum(tokenizer.byte_lengths()[self._ids])
        text, pattern = tokenizer.decode_bytes(self._ids.tolist()), re.compile(forbidden.encode())
        for found in pattern.finditer(text):
            first, last = np.searchsorted(ends, [found.start(), found.end() - 1], side="right")
            self._ids[first : last + 1] = line_break

    def read(self, tokens: int, random: Random) -> np.ndarray:
        """[tokens] int32, from a random place on; after the end it goes on at the start."""
        size = len(self._ids)
        if tokens <= size:
            start = random.randrange(size - tokens + 1)
            return self._ids[start : start + tokens]
        return self._ids.take(np.arange(tokens) + random.randrange(size), mode="wrap")


@dataclass(eq=False, slots=True)
class Line:
    """Tokens put on a page; a question if it has evidence."""

    ids: list[int]
    depth: float
    answer: str = ""
    width: int = 0
    """Tokens of the answer, with which a question ends but for its line break."""
    evidence: Sequence["Line"] = ()
    start: int = -1
    """Where it begins, once the page is laid out."""


class Page:
    """Collects a sample's lines, then lays them out.

    A line's depth is the share of the filler that comes before it; lines of one depth stand in the order they came in.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.free = length - 1
        """Tokens not yet taken by lines."""
        self._lines: list[Line] = []

    def put(self, line: Line) -> Line:
        self._lines.append(line)
        self.free -= len(line.ids)
        return line

    def state(self, ids: list[int], depth: float) -> Line:
        return self.put(Line(ids, depth))

    def ask(self, ids: list[int], depth: float, answer: str, width: int, evidence: Sequence[Line]) -> Line:
        """Puts a question there that takes having read `evidence`, lines before it."""
        return self.put(Line(ids, depth, answer, width, evidence))

    def lay_out(self, eos: int, filler: Filler, random: Random, learn: str) -> Sample:
        """The sample: end-of-text, then lines and filler."""
        assert self.free >= 0, "the task put more on the page than it has room for"
        text = filler.read(self.free, random)
        ids = np.empty(self.length, dtype=np.int32)
        ids[0] = eos
        position, used = 1, 0
        self._lines.sort(key=lambda line: line.depth)
        for line in self._lines:
            before = ceil(line.depth * self.free)
            ids[position : position + before - used] = text[used:before]
            position, used = position + before - used, before
            line.start = position
            position += len(line.ids)
            ids[line.start : position] = line.ids
        ids[position:] = text[used:]
        questions = tuple(_question(line) for line in self._lines if line.evidence)
        return Sample(ids, questions, _learned(self.length, questions, learn))


def _question(line: Line) -> Question:
    stop = line.start + len(line.ids) - 1
    evidence = tuple((part.start, part.start + len(part.ids)) for part in line.evidence)
    assert all(end <= line.start for _, end in evidence), "evidence after its question"
    return Question(line.start, stop - line.width, stop, line.answer, evidence)


def _learned(length: int, questions: tuple[Question, ...], learn: str) -> np.ndarray:
    """All tokens but the first, which nothing predicts; or only those of answers."""
    learned = np.full(length, learn == "all")
    learned[0] = False
    for question in questions:
        learned[question.start : question.stop] = True
    return learned

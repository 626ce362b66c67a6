"""What a benchmark is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from perilune.bench.progress import Tell, quiet

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where the cases put their inputs."""


@dataclass(frozen=True)
class Candidate:
    """One way to do the work of a case."""

    label: str
    run: Callable[[], object]
    """Does the work once, on inputs made beforehand."""
    skipped: str = ""
    """Why it cannot run here; it is then reported with this reason and not timed."""


@dataclass(frozen=True)
class Gate:
    """A promise: `faster` takes at most 1 / `ratio` of the time of `slower`."""

    faster: str
    slower: str
    ratio: float


@dataclass(frozen=True)
class Case:
    """Several ways to do the same work, proof that they agree, and how much faster the good one must be."""

    name: str
    title: str
    """What is done, with its sizes."""
    build: Callable[[], Sequence[Candidate]]
    """Makes the inputs and the candidates that share them; the first is the baseline."""
    check: Callable[[], None]
    """Raises AssertionError where a candidate is wrong; nothing is timed then."""
    gates: tuple[Gate, ...] = ()


class Sheet(ABC):
    """A benchmark that makes and shows figures of a kind of its own."""

    name: str
    title: str

    @abstractmethod
    def run(self, tell: Tell = quiet) -> dict[str, Any]:
        """The result as plain data: name, title, check ("passed" or "failed: why"), passed, and figures if it did."""

    @abstractmethod
    def parts(self, result: dict[str, Any]) -> Iterable[Table | str]:
        """Tables and lines that say what was found."""

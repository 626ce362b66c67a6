"""What batches are filled from: endless streams of tokens that can be taken up again anywhere."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Segment:
    """Some pieces of documents, end to end."""

    ids: np.ndarray
    """[n] integers"""
    labels: np.ndarray
    """[n] integers, already shifted: what each position is to predict; IGNORE where nothing is learned"""
    starts: np.ndarray
    """[pieces] where each piece begins; the first is 0"""
    answers: np.ndarray | None = None
    """[n] as `labels`, of the answers in samples of tasks, which are not among those; None where there are none"""


class Stream(Protocol):
    """Tokens without end, in an order that its seed decides.

    The same reads give the same tokens on every machine, and reading on from `state_dict` gives what reading on without
    a stop would have given, bit for bit.
    """

    def size(self, ahead: int = 0) -> int | None:
        """Tokens of the sample after the next `ahead` ones, where samples are never cut; None for a stream that gives
        any number of tokens at a time."""
        ...

    def resize(self, context: int, min_document: int = 0, long_times: int = 1) -> None:
        """From now on pieces or samples of up to `context` tokens, from documents of at least `min_document` tokens,
        one of n tokens 1 + floor((long_times - 1) min(1, n / context)) times an epoch."""

    def read(self, tokens: int) -> Segment:
        """Exactly the next `tokens`; where samples are never cut, those of the next few."""
        ...

    def skip(self, tokens: int) -> None:
        """As `read`, without the tokens: what other ranks read."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in JSON's types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; DataError if that was in another stream."""

"""Batches filled from several streams by weight."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from perilune.core.errors import ConfigError, DataError, nearest
from perilune.data.packing import IGNORE, Batch, packed
from perilune.data.stream import Segment, Stream


class Mixture:
    """Batches of `tokens` tokens from streams, each with its share of them; a row without padding.

    Nothing is drawn: a stream is owed its weight's part of all tokens since `begin`, less what it has given.  Whole
    samples are taken from whichever is owed most, as long as that is half a sample or more; streams that can be cut
    fill the rest in proportion to what they are owed.  So shares hold exactly in the long run, and to within a
    sample at any time, where whole samples have room.  Without a stream that can be cut a batch may end up to a sample
    short of `tokens`.

    Of `ranks` readers, reader `rank` gets every `ranks`-th batch of the same sequence: they share no token, and move in
    step.
    """

    def __init__(self, streams: Mapping[str, Stream], *, rank: int = 0, ranks: int = 1) -> None:
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank: expected 0 to {ranks - 1}, got {rank}; number the readers from 0")
        self.streams = dict(streams)
        self.rank, self.ranks = rank, ranks
        self._shares: dict[str, float] = {}
        self._given: dict[str, int] = {}

    def begin(
        self, weights: Mapping[str, float], *, tokens: int, context: int, min_document: int = 0, long_times: int = 1
    ) -> None:
        """From the next batch on these weights (any scale) and sizes; every stream goes on where it is.

        Raises ConfigError for a stream that is not there, DataError where `min_document` leaves no text.
        """
        check_mix(weights, self.streams)
        if tokens < context:
            raise ConfigError(
                f"tokens: expected at least {context} (context), got {tokens}; a batch holds whole pieces"
            )
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items() if weight > 0}
        self._given = dict.fromkeys(self._shares, 0)
        self.tokens, self.context = tokens, context
        for name in self._shares:
            self.streams[name].resize(context, min_document, long_times)

    def next(self) -> Batch:
        """This reader's next batch."""
        batch = None
        for rank in range(self.ranks):
            plan = self._plan()
            if rank == self.rank:
                batch = self._read(plan)
            else:
                for name, tokens in plan.items():
                    self.streams[name].skip(tokens)
            for name, tokens in plan.items():
                self._given[name] += tokens
        assert batch is not None
        return batch

    def _plan(self) -> dict[str, int]:
        """How many tokens each stream gives to the next batch."""
        due = sum(self._given.values()) + self.tokens
        owed = {name: share * due - self._given[name] for name, share in self._shares.items()}
        cut = [name for name in owed if self.streams[name].size() is None]
        plan, samples, room = dict.fromkeys(owed, 0), dict.fromkeys(owed, 0), self.tokens
        while True:
            sizes = {name: self.streams[name].size(samples[name]) for name in owed if name not in cut}
            fitting = {name: size for name, size in sizes.items() if size is not None and size <= room}
            name = max(fitting, key=owed.__getitem__, default="")
            if not fitting or (cut and owed[name] < fitting[name] / 2):
                break
            plan[name] += fitting[name]
            owed[name] -= fitting[name]
            room -= fitting[name]
            samples[name] += 1
        if cut:
            plan |= dict(zip(cut, _split(room, [max(owed[name], 0.0) for name in cut])))
        return plan

    def _read(self, plan: Mapping[str, int]) -> Batch:
        segments = [self.streams[name].read(tokens) for name, tokens in plan.items() if tokens]
        offsets = np.cumsum([0, *(len(segment.ids) for segment in segments[:-1])])
        return packed(
            np.concatenate([segment.ids for segment in segments]),
            np.concatenate([segment.labels for segment in segments]),
            np.concatenate([segment.starts + offset for segment, offset in zip(segments, offsets)]),
            _answers(segments),
        )

    def state_dict(self) -> dict[str, Any]:
        """What every stream has given since `begin`, and where it stands; in JSON's types."""
        return {
            "given": dict(self._given),
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, after a `begin` with the same weights and sizes.  DataError if the streams are others."""
        if state["given"].keys() != self._given.keys() or state["streams"].keys() != self.streams.keys():
            raise DataError(
                f"mix: expected {', '.join(state['given'])} as when saved, got {', '.join(self._given)}; "
                "resume with the same stages"
            )
        for name, stream in self.streams.items():
            try:
                stream.load_state_dict(state["streams"][name])
            except DataError as error:
                raise DataError(f"{name}: {error}") from None
        self._given = {name: int(tokens) for name, tokens in state["given"].items()}


def check_mix(names: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError for one of the `names` in a mix that is none of the `known` ones."""
    for name in names:
        if name not in known:
            raise ConfigError(f"mix: there is no source or task called {name!r}; {nearest(name, known)}")


def _answers(segments: list[Segment]) -> np.ndarray | None:
    """Of all segments; those that have none ignored throughout."""
    if all(segment.answers is None for segment in segments):
        return None
    return np.concatenate([
        np.full(len(segment.ids), IGNORE) if segment.answers is None else segment.answers for segment in segments
    ])  # fmt: skip


def _split(room: int, owed: list[float]) -> list[int]:
    """`room` in proportion to `owed` (evenly if nobody is owed anything), in whole tokens that sum to it."""
    total = sum(owed)
    ends = np.cumsum(owed) / total if total > 0 else np.arange(1, len(owed) + 1) / len(owed)
    return np.diff([0, *np.rint(ends * room).astype(np.int64)]).tolist()

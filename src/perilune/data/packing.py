"""Documents laid end to end into rows without padding, and the two ways through them: for ever, and once.

A row holds pieces of documents; `cu_seqlens` marks where pieces begin, so that nothing flows from one to the next.
Labels are already shifted: `labels[t]` is the document's token after `input_ids[t]`, also where the piece ends before
the document does; after a document's last token it is IGNORE.  What is masked follows from lengths, never from ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import ConfigError, DataError
from perilune.ops.cross_entropy import IGNORED as IGNORE


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor
    """[1, T] int64"""
    labels: Tensor
    """[1, T] int64; IGNORE where there is nothing to predict"""
    cu_seqlens: Tensor
    """[N+1] int64; the N pieces' boundaries, from 0 to T"""


class PackedBatches:
    """Batches of exactly `tokens` tokens, without end, from documents in an order shuffled anew every epoch.

    Documents, each an array of ids, are cut into pieces of `context` tokens, the last of each shorter.  An epoch is
    one long stream of all pieces in the order of `seed` and epoch, so that a step sees many documents, not a stretch
    of one.  A batch is the next `tokens` of the stream; what its end cuts off a piece opens the next batch.  Every
    token is an input exactly once an epoch.

    The whole state is one integer, the position in the stream, so it can be taken up at any step, also with another
    `tokens` or `ranks`; another `context` means other pieces, so the rest of that epoch is another selection.  Of
    `ranks` readers, reader `rank` gets every `ranks`-th batch of the same stream: they share no token, and move in
    step.

    Raises DataError without tokens, ConfigError if `tokens` has no room for a piece of length `context`.
    """

    def __init__(
        self,
        documents: Sequence[np.ndarray],
        tokens: int,
        context: int,
        seed: int = 0,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._ids, self._starts = _flatten(documents)
        self._labels = np.append(self._ids[1:], IGNORE)  # the next token of the same document
        self._labels[self._starts[1:] - 1] = IGNORE
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank: expected 0 to {ranks - 1}, got {rank}; number the readers from 0")
        self.seed, self.rank, self.ranks = seed, rank, ranks
        self.position = 0  # in tokens since the first epoch began, the same for all readers
        self.resize(tokens, context)

    def resize(self, tokens: int, context: int) -> None:
        """From the next batch on, other sizes; the place in the stream stays."""
        _check_sizes(tokens, context)
        self.tokens, self.context = tokens, context
        self._pieces = _cut(self._starts, context)
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        """How many times the documents have been read through."""
        return self.position // len(self._ids)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()

    def next(self) -> Batch:
        """This reader's next batch."""
        begin = self.position + self.rank * self.tokens
        self.position += self.ranks * self.tokens
        indices, starts, filled = [], [], 0
        while filled < self.tokens:  # once, and again for every end of an epoch inside the batch
            epoch, offset = divmod(begin + filled, len(self._ids))
            length = min(self.tokens - filled, len(self._ids) - offset)
            index, start = self._read(epoch, offset, length)
            indices.append(index)
            starts.append(start + filled)
            filled += length
        index = np.concatenate(indices)
        return _batch(self._ids[index], self._labels[index], np.concatenate(starts))

    def _read(self, epoch: int, offset: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Which ids make the `length` tokens of an epoch from `offset` on, and where pieces begin among them."""
        order, ends = self._order(epoch)
        first, last = np.searchsorted(ends, [offset, offset + length - 1], side="right")
        pieces = order[first : last + 1]
        stop = np.minimum(ends[first : last + 1], offset + length) - offset  # where each piece's part ends [N]
        start = np.concatenate([[0], stop[:-1]])
        skipped = np.zeros_like(start)
        skipped[0] = offset - (ends[first - 1] if first else 0)  # of the first piece, in earlier batches
        return np.arange(length) + np.repeat(self._pieces[pieces] + skipped - start, stop - start), start

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of an epoch in order, and where in its stream each one ends."""
        if self._epoch is None or self._epoch[0] != epoch:
            # Raw words of the generator are the same in every release of numpy; `permutation` need not be.
            keys = np.random.PCG64([self.seed, epoch]).random_raw(len(self._pieces) - 1)
            order = np.argsort(keys, kind="stable")
            self._epoch = epoch, order, np.cumsum(np.diff(self._pieces)[order])
        return self._epoch[1:]

    def state_dict(self) -> dict[str, int]:
        """The place in the stream, and what the stream is made of."""
        return {"position": self.position, **self._stream()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state` was taken.  Raises DataError if that was in another stream."""
        for name, here in self._stream().items():
            if state[name] != here:
                raise DataError(f"{name}: expected {state[name]} as when saved, got {here}; resume with the same data")
        self.position = int(state["position"])

    def _stream(self) -> dict[str, int]:
        return {"seed": self.seed, "documents": len(self._starts) - 1, "stream_tokens": len(self._ids)}


def evaluation_batches(documents: Sequence[np.ndarray], context: int, tokens: int) -> list[Batch]:
    """Every token but each document's first, exactly once as a label, in order: for bits per byte.

    Give documents that open with the end-of-text token (`ByteBPE.encode_documents`), and every byte is scored.  A
    document longer than `context` is judged in pieces, each from a fresh state: a piece's first label sees one token.
    A row holds whole pieces up to `tokens` in all, so the score does not depend on `tokens`; rows differ in length.
    Raises DataError without tokens, ConfigError if `tokens` has no room for a piece of length `context`.
    """
    _check_sizes(tokens, context)
    ids, starts = _flatten(documents)
    rows: list[list[slice]] = []
    room = 0
    for first, last in zip(starts[:-1].tolist(), (starts[1:] - 1).tolist()):
        for begin in range(first, last, context):
            piece = slice(begin, min(begin + context, last))
            length = piece.stop - piece.start
            if length > room:
                rows.append([])
                room = tokens
            rows[-1].append(piece)
            room -= length
    return [_evaluation_row(ids, row) for row in rows]


def _evaluation_row(ids: np.ndarray, row: list[slice]) -> Batch:
    inputs = np.concatenate([ids[piece] for piece in row]).astype(np.int64)
    labels = np.concatenate([ids[piece.start + 1 : piece.stop + 1] for piece in row]).astype(np.int64)
    starts = np.cumsum([0, *(piece.stop - piece.start for piece in row[:-1])])
    return _batch(inputs, labels, starts)


def _cut(starts: np.ndarray, context: int) -> np.ndarray:
    """Where the pieces of all documents begin, with the total behind `[pieces + 1]`."""
    counts = -(-np.diff(starts) // context)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(counts.sum()) - first
    return np.append(np.repeat(starts[:-1], counts) + within * context, starts[-1])


def _batch(ids: np.ndarray, labels: np.ndarray, starts: np.ndarray) -> Batch:
    ids, labels, cu_seqlens = (x.astype(np.int64) for x in (ids, labels, np.append(starts, len(ids))))
    return Batch(torch.from_numpy(ids)[None], torch.from_numpy(labels)[None], torch.from_numpy(cu_seqlens))


def _flatten(documents: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All ids in one array, and where each document begins, with the total behind `[N+1]`."""
    arrays = [np.asarray(document) for document in documents]
    arrays = [array for array in arrays if array.size]
    if not arrays:
        raise DataError("documents: expected at least one token, got none; give one array of ids a document")
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"documents: expected 1-D arrays of integers, got {array.dtype} {list(array.shape)}; tokenize the text"
            )
    return np.concatenate(arrays), np.cumsum([0, *map(len, arrays)])


def _check_sizes(tokens: int, context: int) -> None:
    if context < 1:
        raise ConfigError(f"context: expected at least 1, got {context}; give the longest piece in tokens")
    if tokens < context:
        raise ConfigError(f"tokens: expected at least {context} (context), got {tokens}; a batch holds whole pieces")

"""Documents laid end to end into rows without padding, and the two ways through them: for ever, and once.

A row holds pieces of documents; `cu_seqlens` marks where pieces begin, so that nothing flows from one to the next.
Labels are already shifted: `labels[t]` is the document's token after `input_ids[t]`, also where the piece ends before
the document does; after a document's last token it is IGNORE.  What is masked follows from lengths, never from ids.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import ConfigError, DataError
from perilune.data.stream import Segment
from perilune.ops.cross_entropy import IGNORED as IGNORE


@dataclass(frozen=True)
class Batch:
    input_ids: Tensor
    """[1, T] int64"""
    labels: Tensor
    """[1, T] int64; IGNORE where there is nothing to predict"""
    cu_seqlens: Tensor
    """[N+1] int64; the N pieces' boundaries, from 0 to T"""
    answers: Tensor | None = None
    """[1, T] int64, as `labels`, of the answers that tasks ask for, which are not among those; None without tasks"""

    @property
    def size(self) -> int:
        """Tokens in the step."""
        return self.input_ids.numel()

    @property
    def padding(self) -> int:
        """How many of the row's last tokens only fill it up."""
        return 0


class PackedText:
    """A stream over documents in memory, cut into pieces and shuffled anew every epoch.

    Documents, each an array of ids, are cut into pieces of `context` tokens, the last of each shorter.  An epoch is
    one long row of all pieces in the order of `seed` and epoch, so that a batch sees many documents, not a stretch of
    one.  What the end of a read cuts off a piece opens the next read.  Every token is an input exactly once an epoch;
    with `long_times`, as often as the rule of `Stream.resize` says of its document.

    Its place is two integers, epoch and offset, so it can be taken up anywhere, also with another `context`: that means
    other pieces, so the rest of the epoch is another selection.  Another `min_document` or `long_times` begins a new
    epoch, and so does another `context` where long documents are repeated.

    Raises DataError without tokens.
    """

    def __init__(self, documents: Sequence[np.ndarray], seed: int = 0) -> None:
        self._ids, self._starts = _flatten(documents)
        self._labels = np.append(self._ids[1:], IGNORE)  # the next token of the same document
        self._labels[self._starts[1:] - 1] = IGNORE
        self.seed = seed
        self.epoch, self._offset = 0, 0
        self._chosen = (0, 1, 0)
        self.resize(int(np.diff(self._starts).max()))

    def size(self, ahead: int = 0) -> None:
        """See `Stream`."""

    def resize(self, context: int, min_document: int = 0, long_times: int = 1) -> None:
        """See `Stream`.  Raises DataError if no document has `min_document` tokens."""
        if context < 1:
            raise ConfigError(f"context: expected at least 1, got {context}; give the longest piece in tokens")
        if long_times < 1:
            raise ConfigError(f"long_times: expected at least 1, got {long_times}; 1 reads every document once")
        lengths = np.diff(self._starts)
        kept = np.flatnonzero(lengths >= min_document)
        if not len(kept):
            raise DataError(
                f"min_document: expected at most {lengths.max()} tokens (the longest document), got {min_document}; "
                "lower it or add longer text"
            )
        chosen = (min_document, long_times, context if long_times > 1 else 0)  # what decides an epoch's documents
        if chosen != self._chosen and self._offset:
            self.epoch, self._offset = self.epoch + 1, 0
        self._chosen = chosen
        kept = np.repeat(kept, 1 + (long_times - 1) * np.minimum(lengths[kept], context) // context)
        self._begins, self._lengths = _cut(self._starts[kept], lengths[kept], context)
        self.tokens = int(self._lengths.sum())
        """In an epoch."""
        self._order: tuple[int, np.ndarray, np.ndarray] | None = None

    def read(self, tokens: int) -> Segment:
        """See `Stream`."""
        indices, starts, filled = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        while filled < tokens:  # once, and again for every end of an epoch inside
            length = min(tokens - filled, self.tokens - self._offset)
            index, start = self._row(length)
            indices.append(index)
            starts.append(start + filled)
            filled += length
            self.skip(length)
        index = np.concatenate(indices)
        return Segment(self._ids[index], self._labels[index], np.concatenate(starts))

    def skip(self, tokens: int) -> None:
        """See `Stream`."""
        epochs, self._offset = divmod(self._offset + tokens, self.tokens)
        self.epoch += epochs

    def _row(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Which ids are the next `length` of this epoch, and where pieces begin among them."""
        order, ends = self._shuffled()
        first, last = np.searchsorted(ends, [self._offset, self._offset + length - 1], side="right")
        pieces = order[first : last + 1]
        stop = np.minimum(ends[first : last + 1] - self._offset, length)  # where each piece's part ends [N]
        start = np.concatenate([[0], stop[:-1]])
        skipped = np.zeros_like(start)
        skipped[0] = self._offset - (ends[first - 1] if first else 0)  # of the first piece, in earlier reads
        return np.arange(length) + np.repeat(self._begins[pieces] + skipped - start, stop - start), start

    def _shuffled(self) -> tuple[np.ndarray, np.ndarray]:
        """This epoch's pieces in order, and where in its row each one ends."""
        if self._order is None or self._order[0] != self.epoch:
            # Raw words of the generator are the same in every release of numpy; `permutation` need not be.
            keys = np.random.PCG64([self.seed, self.epoch]).random_raw(len(self._begins))
            order = np.argsort(keys, kind="stable")
            self._order = self.epoch, order, np.cumsum(self._lengths[order])
        return self._order[1:]

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and what the stream is made of."""
        min_document, *long = self._chosen
        place = {"epoch": self.epoch, "offset": self._offset, "min_document": min_document, "long": long}
        return {**place, **self._stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stream`."""
        for name, here in self._stream.items():
            if state[name] != here:
                raise DataError(f"{name}: expected {state[name]} as when saved, got {here}; resume with the same data")
        self.epoch, self._offset = int(state["epoch"]), int(state["offset"])
        long_times, context = state.get("long", (1, 0))  # older checkpoints have none
        # A stream that rests now is resized before it is read.
        self._chosen = int(state["min_document"]), int(long_times), int(context)

    @cached_property
    def _stream(self) -> dict[str, int]:
        checksum = zlib.crc32(self._ids.astype("<i8").tobytes())
        return {"seed": self.seed, "documents": len(self._starts) - 1, "tokens": len(self._ids), "checksum": checksum}


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
    return packed(inputs, labels, starts)


def _cut(starts: np.ndarray, lengths: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each piece of the documents begins, and how long it is: `[pieces]` both."""
    counts = -(-lengths // context)
    document = np.repeat(np.arange(len(starts)), counts)
    done = context * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    return starts[document] + done, np.minimum(lengths[document] - done, context)


def packed(ids: np.ndarray, labels: np.ndarray, starts: np.ndarray, answers: np.ndarray | None = None) -> Batch:
    """Arrays, laid out as in a Segment, as one row of tensors."""
    return Batch(
        _tensor(ids)[None],
        _tensor(labels)[None],
        _tensor(np.append(starts, len(ids))),
        None if answers is None else _tensor(answers)[None],
    )


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.int64))


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

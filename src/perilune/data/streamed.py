"""Text read as it is trained on, block by block: datasets of the Hugging Face Hub, and shards too large for memory.

A document is held out when a hash of its text falls below the share asked for; no pass over the data is needed to know,
and a copy of a held-out document is held out too, wherever it turns up.
"""

import glob
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from perilune.core.errors import ConfigError, DataError
from perilune.data.corpus import Document, encode_some, is_held_out, local_files, reason_to_skip
from perilune.data.shards import checked_text, is_shard, needed, shard_format
from perilune.data.source import TextSource
from perilune.data.stream import Segment

if TYPE_CHECKING:
    from perilune.data.packing import PackedText
    from perilune.data.tokenizer import ByteBPE

HELD_OUT_BYTES = 500_000  # of held-out text collected from the start of the stream; scoring it takes about a minute
HELD_OUT_ROWS = 100_000  # that are searched for it at most
BLOCK_ROWS = 512  # documents that are shuffled together,
BLOCK_CHARACTERS = 16_000_000  # or as many as hold so much text
PATIENCE = 100_000  # rows without a token to learn from, after which it is a mistake

# Formats whose readers only read: others unpickle, or open whatever a row names.
_FORMATS = ("parquet", "json", "csv", "text", "arrow")


@dataclass(frozen=True)
class StreamedCorpus:
    """A dataset that is never read as a whole.  Build it with `open`."""

    source: TextSource
    held_out: tuple[Document, ...]
    """From the first part of the stream: about half a megabyte."""
    skipped: tuple[str, ...]
    """What was left out of that part, and why."""
    _builder: Any

    train_bytes = None
    """Unknown."""

    @classmethod
    def open(cls, source: TextSource) -> Self:
        """Reads the first part of `source` and collects what is held out of it.

        Raises DataError if the dataset cannot be found or read, has no text in `text_key`, or nothing is held out.
        """
        corpus = cls(source, (), (), _find(source))
        held_out, reasons, rows, size = {}, Counter[str](), 0, 0
        for text in islice(corpus.rows(), HELD_OUT_ROWS):
            rows += 1
            if reason := reason_to_skip(text, source.clean):
                reasons[reason] += 1
            elif is_held_out(text, source.held_out) and text not in held_out:
                held_out[text] = Document(f"{rows}", text)
                size += len(text.encode())
            if source.held_out == 0 or size >= HELD_OUT_BYTES:
                break
        if source.held_out and not held_out:
            raise DataError(
                f"{source.path}: expected a document to hold out, found none in the first {rows:,}; "
                f"raise held_out from {source.held_out:g}"
            )
        skipped = (f"{count:,} of the first {rows:,} documents: {reason}" for reason, count in reasons.items())
        return cls(source, tuple(held_out.values()), tuple(skipped), corpus._builder)

    @property
    def name(self) -> str:
        return self.source.path

    @property
    def revision(self) -> str | None:
        """The commit that a dataset of the Hub was opened at."""
        return self._builder.hash if self.source.from_hub else None

    def rows(self) -> "Rows":
        """All texts, held-out ones and all, from the start."""
        return Rows(self.source, _streaming(self._builder, self.source))

    def is_for_training(self, text: str) -> bool:
        return not reason_to_skip(text, self.source.clean) and not is_held_out(text, self.source.held_out)

    def texts(self, limit_bytes: int | None = None) -> Iterator[str]:
        """The training texts from the start of the stream, about `limit_bytes` of them or all."""
        size = 0
        for text in self.rows():
            if limit_bytes is not None and size >= limit_bytes:
                return
            if self.is_for_training(text):
                size += len(text.encode())
                yield text

    def filler(self, tokenizer: "ByteBPE", tokens: int) -> list[np.ndarray]:
        """Encoded training documents from the start of the stream, about `tokens` tokens in all."""
        return encode_some(self.texts(), tokenizer, tokens)

    def stream(self, tokenizer: "ByteBPE", seed: int) -> "StreamedText":
        """The training texts as tokens, for ever."""
        return StreamedText(self, tokenizer, seed)


class Rows:
    """The texts of a dataset, one after the other, from any place in it."""

    def __init__(self, source: TextSource, dataset: Any) -> None:
        self._path, self._key, self._dataset = source.path, source.text_key, dataset
        self._start: dict[str, Any] = dataset.state_dict()
        self._place: dict[str, Any] | None = None  # while nothing was read there
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._close = weakref.finalize(self, tuple)
        self.go_to(None)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            row = next(self._rows)
        except StopIteration:
            raise
        except Exception as error:  # of a file, a network, a format: each has its own
            raise _unreadable(self._path, error) from None
        self._place = None
        if self._key not in row:
            raise DataError(f"{self._path}: expected a field {self._key!r}, got {', '.join(row)}; set text_key")
        return checked_text(row[self._key], self._key, self._path)

    @property
    def place(self) -> dict[str, Any]:
        """Where the next text is, as `datasets` notes it: values of JSON."""
        return self._dataset.state_dict() if self._place is None else self._place

    def go_to(self, place: dict[str, Any] | None) -> None:
        """The next text is the one at `place`; None is the start."""
        self._place = self._start if place is None else place
        self._dataset.load_state_dict(self._place)
        self._close()
        self._rows = rows = iter(self._dataset)
        self._close = weakref.finalize(self, rows.close)  # also at exit, before what closes files is gone


class StreamedText:
    """A stream over a dataset, tokenised and shuffled block by block.

    A block is the next `BLOCK_ROWS` documents, or fewer if they are long.  What of it is for training is encoded, cut
    into pieces of `context` tokens and shuffled as `PackedText` shuffles an epoch, under a key made of seed, epoch and
    block; after the last block the next epoch begins.  Every token is an input exactly once an epoch; with
    `long_times`, as often as the rule of `Stream.resize` says of its document.

    Its place is a block's place in the dataset and an offset in the block's tokens, so going on reads one block anew.
    Another `context`, `min_document` or `long_times` begins with the next block, unless nothing of this one was read.
    """

    def __init__(self, corpus: StreamedCorpus, tokenizer: "ByteBPE", seed: int) -> None:
        self._corpus, self._tokenizer, self.seed = corpus, tokenizer, seed
        self._rows = corpus.rows()
        self.epoch, self._block, self._offset = 0, 0, 0
        self._start = self._rows.place  # of the block
        self._documents: list[np.ndarray] | None = None  # of the block; None before it is read
        self._packed: PackedText | None = None  # those of them that are long enough, if any are
        self._tokens = 0  # in `_packed`
        self._sizes: tuple[int, ...] = (1 << 62, 0, 1)  # context, min_document and long_times, as asked for
        self._cut: tuple[int, ...] = self._sizes  # as the block is cut
        self._fruitless = _Fruitless()

    def size(self, ahead: int = 0) -> None:
        """See `Stream`."""

    def resize(self, context: int, min_document: int = 0, long_times: int = 1) -> None:
        """See `Stream`."""
        if context < 1:
            raise ConfigError(f"context: expected at least 1, got {context}; give the longest piece in tokens")
        self._sizes = context, min_document, long_times
        self._fruitless = _Fruitless()

    def read(self, tokens: int) -> Segment:
        """See `Stream`.  Raises DataError if the dataset cannot be read, or no document is long enough."""
        empty = np.zeros(0, np.int64)
        ids, labels, starts, filled = [empty], [empty], [empty], 0
        while filled < tokens:  # once, and again for every end of a block inside
            packed, length = self._take(tokens - filled)
            segment = packed.read(length)
            ids.append(segment.ids)
            labels.append(segment.labels)
            starts.append(segment.starts + filled)
            filled += length
        return Segment(np.concatenate(ids), np.concatenate(labels), np.concatenate(starts))

    def skip(self, tokens: int) -> None:
        """See `Stream`.  The text is encoded all the same: how many tokens it has is not known before."""
        while tokens > 0:
            packed, length = self._take(tokens)
            packed.skip(length)
            tokens -= length

    def _take(self, tokens: int) -> "tuple[PackedText, int]":
        """What to read next, and how many of the `tokens` it still has; they count as read."""
        if self._offset and self._cut != self._sizes:
            self._end_block()
        while (packed := self._pack()) is None or self._offset == self._tokens:
            self._end_block()
        length = min(tokens, self._tokens - self._offset)
        self._offset += length
        return packed, length

    def _end_block(self) -> None:
        self._block, self._offset = self._block + 1, 0
        self._start, self._documents, self._packed = self._rows.place, None, None

    def _pack(self) -> "PackedText | None":
        """The block in pieces, taken up at the offset; None if no document in it is long enough."""
        from perilune.data.packing import PackedText

        if self._packed is None or self._cut != self._sizes:
            documents = self._read_block() if self._documents is None else self._documents
            self._cut = context, min_document, long_times = self._sizes
            kept = [document for document in documents if len(document) >= min_document]
            self._packed = PackedText(kept, self._key) if kept else None
            if self._packed:
                self._packed.resize(context, long_times=long_times)
                self._tokens = self._packed.tokens
                self._packed.skip(self._offset)
                self._fruitless = _Fruitless()
        return self._packed

    @property
    def _key(self) -> int:
        """Of the block's shuffle: another for every seed, epoch and block."""
        return self.seed + (self.epoch << 64) + (self._block << 128)

    def _read_block(self) -> list[np.ndarray]:
        """The next documents for training, encoded."""
        try:
            texts = list(_block(self._rows))
            if not texts:  # the end
                self._rows.go_to(None)
                self.epoch, self._block, self._start = self.epoch + 1, 0, self._rows.place
                self._fruitless.epochs += 1
                self._fruitless.check(self._corpus.name, self._sizes[1])
                texts = list(_block(self._rows))
        except DataError:
            self._rows.go_to(self._start)  # what broke off must not look like the end
            raise
        self._documents = self._tokenizer.encode_documents(list(filter(self._corpus.is_for_training, texts)))
        self._fruitless.documents += len(texts)
        self._fruitless.longest = max([self._fruitless.longest, *map(len, self._documents)])
        self._fruitless.check(self._corpus.name, self._sizes[1])
        return self._documents

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and what the stream is made of."""
        place = {"epoch": self.epoch, "block": self._block, "offset": self._offset, "place": self._start}
        sizes = {"sizes": list(self._sizes), "cut": list(self._cut)}
        return {**place, **sizes, "checksum": _checksum(self._documents), **self._stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stream`.  Reads the block anew, and raises DataError if it holds other text, or gives other tokens."""
        for name, here in self._stream.items():
            if (saved := state.get(name)) != here:
                raise DataError(f"{name}: expected {saved!r} as when saved, got {here!r}; resume with the same data")
        self.epoch, self._block, self._offset = int(state["epoch"]), int(state["block"]), int(state["offset"])
        self._start, self._documents, self._packed = state["place"], None, None
        self._sizes, self._cut = ((*state[key], 1)[:3] for key in ("sizes", "cut"))  # older ones have no long_times
        self._fruitless = _Fruitless()
        self._rows.go_to(self._start)
        if state["checksum"] is not None and _checksum(self._read_block()) != state["checksum"]:
            raise DataError(
                f"{self._corpus.name}: expected the documents that were being read when saved, got others; "
                "resume with the same data and tokenizer"
            )

    @property
    def _stream(self) -> dict[str, Any]:
        source = self._corpus.source.to_dict() | {"revision": self._corpus.revision}
        if not self._corpus.source.from_hub:
            del source["path"]  # the same files may lie elsewhere by now
        return {**source, "seed": self.seed}


@dataclass
class _Fruitless:
    """How much was read since the last document that was long enough."""

    documents: int = 0
    epochs: int = 0
    longest: int = 0

    def check(self, name: str, min_document: int) -> None:
        """Raises DataError when it is enough: two ends of the data without one, or `PATIENCE` documents."""
        if self.epochs < 2 and self.documents < PATIENCE:
            return
        if self.longest:
            raise DataError(
                f"min_document: expected at most {self.longest} tokens (the longest document found), "
                f"got {min_document}; lower it or add longer text"
            )
        raise DataError(f"{name}: expected text to learn from, found none; check text_key, held_out and clean")


def _block(rows: Iterable[str]) -> Iterator[str]:
    """The next documents of `rows` that make a block."""
    characters = 0
    for text in islice(rows, BLOCK_ROWS):
        yield text
        characters += len(text)
        if characters >= BLOCK_CHARACTERS:
            return


def _checksum(documents: list[np.ndarray] | None) -> int | None:
    if documents is None:
        return None
    lengths = np.array([len(document) for document in documents], dtype="<i8")
    return zlib.crc32(np.concatenate([lengths, *documents]).astype("<i8"))


def _find(source: TextSource) -> Any:
    """The dataset's builder, which knows its files and has read none of them."""
    datasets = needed("datasets", source.path)
    if source.from_hub:
        place: dict[str, Any] = {"path": source.path, "name": source.subset, "revision": source.revision}
    else:
        files = [path for _, path in local_files(source.path, source.pattern)]
        formats = {shard_format(path) if is_shard(path) else path.suffix for path in files}
        if len(formats) > 1 or not formats <= set(_FORMATS):
            raise DataError(
                f"{source.path}: expected shards of one kind to stream, *.jsonl, *.jsonl.gz or *.parquet, got "
                f"{', '.join(sorted(formats))}; set pattern, or streamed=false"
            )
        place = {"path": formats.pop(), "data_files": [glob.escape(str(path.resolve())) for path in files]}
    try:
        builder = datasets.load_dataset_builder(**place)
    except Exception as error:
        raise _unreadable(source.path, error) from None
    if builder.name not in _FORMATS:
        raise DataError(
            f"{source.path}: expected a dataset of {', '.join(_FORMATS)} files, got {builder.name}; convert it"
        )
    return builder


def _streaming(builder: Any, source: TextSource) -> Any:
    """The dataset that `builder` knows, one column of it, from the start."""
    try:
        dataset = builder.as_streaming_dataset(split=source.split)
    except Exception as error:
        raise _unreadable(source.path, error) from None
    columns = dataset.column_names  # None: known only when read
    if columns is None:
        return dataset
    if source.text_key not in columns:
        raise DataError(
            f"{source.path}: expected a column {source.text_key!r}, got {', '.join(map(repr, columns))}; set text_key"
        )
    return dataset.select_columns([source.text_key])


def _unreadable(path: str, error: Exception) -> DataError:
    said = " ".join(str(error).split())
    return DataError(
        f"{path}: expected a dataset that can be read, got {type(error).__name__} ({said}); "
        "check its name, subset, split and files, and the network"
    )

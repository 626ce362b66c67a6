"""Text made ready once, to be streamed in every run: copies, near copies and what is no text are left out.

A stream remembers nothing and could not know a copy; this pass remembers 16 bytes of every text, and 1 KiB where near
copies are looked for, and never holds more text than a shard's.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perilune.core.errors import DataError
from perilune.core.text import printable
from perilune.data.corpus import local_files, reason_to_skip
from perilune.data.duplicates import NearDuplicates
from perilune.data.shards import is_shard, needed, read_shard
from perilune.data.source import STANDARD_LIBRARY, TextSource, open_source

SHARD_CHARACTERS = 64_000_000
"""Going on in the middle of a shard reads it from its start, so none should be large."""
GROUP_ROWS = 512
"""Rows of a Parquet row group: a block of the stream."""


@dataclass
class Count:
    """What became of the documents."""

    read: int = 0
    kept: int = 0
    kept_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first document of each reason."""

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {**asdict(self), "dropped": dict(self.dropped)}


class Selection:
    """Which documents to keep: the first of equal and of nearly equal ones, none that is no text."""

    def __init__(self, *, clean: bool = False, near_duplicates: float | None = None) -> None:
        self.count = Count()
        self._clean = clean
        self._seen: set[bytes] = set()
        self._near = None if near_duplicates is None else NearDuplicates(near_duplicates)

    def know(self, name: str, text: str) -> None:
        """From now on `text` counts as kept: what is judged elsewhere, or was prepared before."""
        self._seen.add(_digest(text))
        if self._near is not None:
            self._near.keep(name, text)

    def keeps(self, name: str, text: str) -> bool:
        """Counts a document, and says whether it stays."""
        reason = self._reason(name, text)
        self.count.read += 1
        if reason is not None:
            self.count.dropped[reason] += 1
            self.count.examples.setdefault(reason, name)
            return False
        self.count.kept += 1
        self.count.kept_bytes += len(text.encode())
        return True

    def _reason(self, name: str, text: str) -> str | None:
        if reason := reason_to_skip(text, self._clean):
            return reason
        if (digest := _digest(text)) in self._seen:
            return "copy"
        if self._near is not None and self._near.keep(name, text) is not None:
            return "near copy"
        self._seen.add(digest)
        return None


def documents(source: TextSource) -> Iterator[tuple[str, str]]:
    """Every text of a source with a name of its own, held-out ones among them; nothing is left out."""
    if source.from_hub:
        corpus: Any = open_source(source.replace(held_out=0.0))
        yield from ((f"{source.path}:{row}", text) for row, text in enumerate(corpus.rows(), 1))
        return
    if source.path == STANDARD_LIBRARY:
        raise DataError("path: expected files or a dataset, got the standard library; it is ready as it is")
    for _, path in local_files(source.path, source.pattern):
        if is_shard(path):
            yield from ((f"{printable(str(path))}:{line}", text) for line, text in read_shard(path, source.text_key))
        else:
            yield printable(str(path)), _read(path)


def write_shards(rows: Iterable[tuple[str, str]], folder: Path, tell: Callable[[int], None] = lambda rows: None) -> int:
    """Writes (name, text) as `part-00000.parquet` and so on, columns `text` and `source`; gives how many shards.

    Each has about `SHARD_CHARACTERS`; none counts before it is whole.  tell: hears how many rows there are after each.
    """
    shards, written = 0, 0
    names: list[str] = []
    texts: list[str] = []
    size = 0
    for name, text in rows:
        names.append(name)
        texts.append(text)
        size += len(text)
        written += 1
        if size >= SHARD_CHARACTERS:
            _write(folder / f"part-{shards:05}.parquet", names, texts)
            shards, names, texts, size = shards + 1, [], [], 0
            tell(written)
    if texts:
        _write(folder / f"part-{shards:05}.parquet", names, texts)
        shards += 1
        tell(written)
    return shards


def _write(path: Path, names: list[str], texts: list[str]) -> None:
    arrow, parquet = needed("pyarrow", str(path)), needed("pyarrow.parquet", str(path))
    table = arrow.table(
        {"text": arrow.array(texts, arrow.large_string()), "source": arrow.array(names, arrow.string())}
    )
    partial = path.with_suffix(".partial")
    parquet.write_table(table, partial, row_group_size=GROUP_ROWS, compression="zstd")
    os.replace(partial, path)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path}: expected UTF-8, got other bytes; convert the file, or set the pattern") from None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

"""Text to train on, in memory: named documents, split into what a model learns from and what it is judged on.

A file of text is held out when a hash of its name falls below the share asked for, a document of a shard when a hash of
its text does.  The split thus needs no seed, does not move when other files come or go, and is the same on every
machine that has the same files.
"""

import hashlib
import logging
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.core.errors import ConfigError, DataError
from perilune.core.text import has_half_pair
from perilune.data.duplicates import NearDuplicates
from perilune.data.filters import reason_to_drop
from perilune.data.shards import find_files, is_shard, read_shard

if TYPE_CHECKING:
    import numpy as np

    from perilune.data.packing import PackedText
    from perilune.data.tokenizer import ByteBPE

log = logging.getLogger("perilune.data")

# Names of folders and files that are tests, other people's packages, or written anew for every build of Python.
_NOT_LIBRARY = (
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "config-*",
    "_sysconfigdata*",
)
# Chosen by sizes alone, so that 5 % of the library's files are about 5 % of its bytes and of its character tables;
# unsalted, one file of prose (pydoc_data/topics.py) would be most of what is held out.
_SALT = b"orbit"
_SMALLEST_LIBRARY = 1_000_000  # bytes; below this a model has too little to learn from


@dataclass(frozen=True)
class Document:
    name: str
    """Path below the corpus' folder, with forward slashes on every system; in a shard `PATH:LINE`, from 1."""
    text: str

    @property
    def byte_count(self) -> int:
        """Length in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their files' names; `held_out` shares no file and no text with `train`."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    skipped: tuple[str, ...] = ()
    """Documents left out, each as `name: reason`."""
    name: str = "text"

    @property
    def train_bytes(self) -> int:
        return sum(document.byte_count for document in self.train)

    @property
    def held_out_bytes(self) -> int:
        return sum(document.byte_count for document in self.held_out)

    def texts(self, limit_bytes: int | None = None) -> Iterator[str]:
        """The training texts; of more than `limit_bytes`, about so many, from all over the corpus."""
        if limit_bytes is None or self.train_bytes <= limit_bytes:
            yield from (document.text for document in self.train)
            return
        size = 0
        for document in self._mixed():
            if size >= limit_bytes:
                return
            size += document.byte_count
            yield document.text

    def stream(self, tokenizer: "ByteBPE", seed: int) -> "PackedText":
        """The training texts as tokens, for ever."""
        from perilune.data.packing import PackedText

        return PackedText(tokenizer.encode_documents([document.text for document in self.train]), seed)

    def filler(self, tokenizer: "ByteBPE", tokens: int) -> "list[np.ndarray]":
        """Encoded training documents from all over the corpus, about `tokens` tokens in all."""
        return encode_some((document.text for document in self._mixed()), tokenizer, tokens)

    def _mixed(self) -> list[Document]:
        """The training documents in an order that has nothing to do with what they are about."""
        return sorted(self.train, key=lambda document: _place(document.name))


def standard_library(
    held_out: float = 0.05, root: Path | None = None, *, clean: bool = False, near_duplicates: float | None = None
) -> Corpus:
    """The sources of the running Python's own library, without its tests: real, long, licensed, always there.

    About 12 MB.  `held_out` is the share of files to hold out; `root` stands in for the library's folder; `clean` and
    `near_duplicates` as in `text_files`.  What an installation writes about its own build is left out, so that one
    release of Python gives much the same corpus on every machine; distributions leave out a package here and there.
    Raises DataError where the library is missing or cut down (as Debian's python3-minimal is).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else Path(root)
    files = find_files(root, "*.py", _NOT_LIBRARY)
    corpus = _read("standard_library", files, held_out, clean=clean, near=near_duplicates)
    size = corpus.train_bytes + corpus.held_out_bytes
    if size < _SMALLEST_LIBRARY:
        raise DataError(
            f"standard library: expected at least {_SMALLEST_LIBRARY / 1e6:.0f} MB of *.py files in {root}, found "
            f"{size / 1e6:.2f} MB; install the full library (Debian: libpython3-stdlib) or train on a folder of text"
        )
    return corpus


def text_files(
    path: str | Path,
    pattern: str = "*.txt",
    held_out: float = 0.05,
    *,
    text_key: str = "text",
    clean: bool = False,
    near_duplicates: float | None = None,
) -> Corpus:
    """The file `path`, or the files below the folder `path`, at any depth, whose names match `pattern`.

    `*.jsonl`, `*.jsonl.gz` and `*.parquet` are shards with many documents in the field or column `text_key`; any other
    file is a document.  About a share `held_out` of all documents is held out.  Where hashes would leave nothing to
    learn from or to be judged on, the document next to the limit changes sides; a single one is cut at a line end
    instead, its last part held out.  `clean` leaves out what `filters.reason_to_drop` finds to be no text,
    `near_duplicates` what is so similar to a document before it, on either side (`duplicates.NearDuplicates`).
    Raises DataError if there is no such folder, no such file with text in it, or a shard that cannot be read; a file of
    text that cannot be read is noted in `skipped`.
    """
    corpus = _read(str(path), local_files(path, pattern), held_out, text_key, clean, near_duplicates)
    if not corpus.train and not corpus.held_out:
        reasons = f" ({len(corpus.skipped)} skipped, {corpus.skipped[0]})" if corpus.skipped else ""
        raise DataError(f"{path}: expected at least one document with text, found none{reasons}; put UTF-8 text there")
    return corpus


def local_files(path: str | Path, pattern: str) -> list[tuple[str, Path]]:
    """The file `path`, or those of the folder that match `pattern`, as (name, path); DataError if there is none."""
    path = Path(path)
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise DataError(f"{path}: expected a folder of {pattern} files, found none; check the path")
    files = find_files(path, pattern)
    if not files:
        raise DataError(f"{path}: expected at least one {pattern} file, found none; put text there or set pattern")
    return files


def _read(
    name: str,
    files: list[tuple[str, Path]],
    held_out: float,
    text_key: str = "text",
    clean: bool = False,
    near: float | None = None,
) -> Corpus:
    if not 0 <= held_out < 1:
        raise ConfigError(
            f"held_out: expected a share from 0 to below 1, got {held_out}; 0.05 holds out one file in 20"
        )
    skipped: list[str] = []
    kept = None if near is None else NearDuplicates(near)
    placed = list(_documents(files, text_key, clean, kept, skipped))
    if skipped:
        log.info(f"{name}: {len(skipped)} of {len(placed) + len(skipped)} documents skipped ({'; '.join(skipped[:3])})")
    train, judged = _split(placed, held_out)
    return Corpus(train, judged, tuple(skipped), name)


def _documents(
    files: list[tuple[str, Path]], text_key: str, clean: bool, kept: NearDuplicates | None, skipped: list[str]
) -> Iterator[tuple[Document, float]]:
    """Every text once, with its place in the split; `skipped` gains a line for every document passed over."""
    seen: dict[str, str] = {}
    for name, text, key in _texts(files, text_key, skipped):
        # A copy of a document on the other side of the split would be an answer learned by heart.
        reason = f"the same text as {seen[text]}" if text in seen else reason_to_skip(text, clean)
        if not reason and kept is not None and (other := kept.keep(name, text)):
            reason = f"nearly the text of {other}"
        if reason:
            skipped.append(f"{name}: {reason}")
            continue
        seen[text] = name
        yield Document(name, text), _place(key)


def _texts(files: list[tuple[str, Path]], text_key: str, skipped: list[str]) -> Iterator[tuple[str, str, str]]:
    """(name, text, what the split goes by) of every document."""
    for name, path in files:
        if is_shard(path):
            for line, text in read_shard(path, text_key):
                yield f"{name}:{line}", text, text
            continue
        try:
            text = path.read_bytes().decode("utf-8")  # as bytes: line ends stay what they are
        except UnicodeDecodeError:
            skipped.append(f"{name}: not UTF-8")
        except OSError as error:
            skipped.append(f"{name}: {error.strerror}")
        else:
            yield name, text, name


def reason_to_skip(text: str, clean: bool) -> str | None:
    """Why `text` is nothing to learn from, in a word or two; None if it is."""
    if not text:
        return "empty"
    if has_half_pair(text):
        return "half of a surrogate pair"
    return reason_to_drop(text) if clean else None


def is_held_out(text: str, share: float) -> bool:
    """The side of a document of a shard, wherever it is read."""
    return share > 0 and _place(text) <= share


def encode_some(texts: Iterable[str], tokenizer: "ByteBPE", tokens: int) -> "list[np.ndarray]":
    """The first of `texts`, encoded, about `tokens` tokens in all."""
    encoded: list[np.ndarray] = []
    texts, total = iter(texts), 0
    while total < tokens and (some := list(islice(texts, 64))):
        for document in tokenizer.encode_documents(some):
            if total < tokens:
                encoded.append(document)
                total += len(document)
    return encoded


def _split(placed: list[tuple[Document, float]], share: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """(train, held out); neither is empty unless `share` is 0 or there is nothing to cut."""
    if share == 0 or not placed:
        return tuple(document for document, _ in placed), ()
    if len(placed) == 1:
        return _cut(placed[0][0], share)
    ranked = sorted(place for _, place in placed)
    limit = min(max(share, ranked[0]), ranked[-2])  # at least the first, never the last
    train = tuple(document for document, place in placed if place > limit)
    return train, tuple(document for document, place in placed if place <= limit)


def _place(key: str) -> float:
    """Where `key` falls in [0, 1), evenly and for ever."""
    digest = hashlib.sha256(_SALT + key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _cut(document: Document, share: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    text = document.text
    limit = max(1, int(len(text) * (1 - share)))
    cut = text.rfind("\n", 0, limit) + 1 or limit
    train, judged = Document(document.name, text[:cut]), Document(document.name, text[cut:])
    return (train,), (judged,) if judged.text else ()


def total_text(documents: Iterable[Document]) -> bytes:
    """All texts in UTF-8, end to end: what a compressor is given."""
    return b"".join(document.text.encode() for document in documents)

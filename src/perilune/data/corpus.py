"""Text to train on: named documents, split by file into what a model learns from and what it is judged on.

A file is held out when a hash of its name falls below the share asked for.  The split thus needs no seed, does not move
when other files come or go, and is the same on every machine that has files of the same names.
"""

import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from perilune.core.errors import ConfigError, DataError

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
    """Path below the corpus' folder, with forward slashes on every system."""
    text: str

    @property
    def byte_count(self) -> int:
        """Length in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents sorted by name; `held_out` shares no file with `train`."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    skipped: tuple[str, ...] = ()
    """Files left out, each as `name: reason`."""

    @property
    def train_bytes(self) -> int:
        return sum(document.byte_count for document in self.train)

    @property
    def held_out_bytes(self) -> int:
        return sum(document.byte_count for document in self.held_out)


def standard_library(held_out: float = 0.05, root: Path | None = None) -> Corpus:
    """The sources of the running Python's own library, without its tests: real, long, licensed, always there.

    About 12 MB.  `held_out` is the share of files to hold out; `root` stands in for the library's folder.  What an
    installation writes about its own build is left out, so that one release of Python gives much the same corpus on
    every machine; distributions leave out a package here and there.
    Raises DataError where the library is missing or cut down (as Debian's python3-minimal is).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else Path(root)
    corpus = _read(root, "*.py", held_out, _NOT_LIBRARY)
    size = corpus.train_bytes + corpus.held_out_bytes
    if size < _SMALLEST_LIBRARY:
        raise DataError(
            f"standard library: expected at least {_SMALLEST_LIBRARY / 1e6:.0f} MB of *.py files in {root}, found "
            f"{size / 1e6:.2f} MB; install the full library (Debian: libpython3-stdlib) or train on a folder of text"
        )
    return corpus


def text_folder(path: str | Path, pattern: str = "*.txt", held_out: float = 0.05) -> Corpus:
    """The files below `path`, at any depth, whose names match `pattern`; a share `held_out` of them is held out.

    Where the hash of their names would leave nothing to learn from or to be judged on, the file next to the limit
    changes sides; a single file is cut at a line end instead, its last part held out.
    Raises DataError if there is no such folder or no such file with text in it.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path}: expected a folder of {pattern} files, found none; check the path")
    corpus = _read(path, pattern, held_out)
    if not corpus.train and not corpus.held_out:
        reasons = f" ({len(corpus.skipped)} skipped, {corpus.skipped[0]})" if corpus.skipped else ""
        raise DataError(
            f"{path}: expected at least one {pattern} file, found none{reasons}; "
            "put UTF-8 text there or give another pattern"
        )
    return corpus


def _read(root: Path, pattern: str, held_out: float, left_out: Sequence[str] = ()) -> Corpus:
    if not 0 <= held_out < 1:
        raise ConfigError(
            f"held_out: expected a share from 0 to below 1, got {held_out}; 0.05 holds out one file in 20"
        )
    skipped: list[str] = []
    documents = tuple(_documents(root, pattern, left_out, skipped))
    if skipped:
        log.info(f"{root}: {len(skipped)} of {len(documents) + len(skipped)} files skipped ({'; '.join(skipped[:3])})")
    train, judged = _split(documents, held_out)
    return Corpus(train, judged, tuple(skipped))


def _documents(root: Path, pattern: str, left_out: Sequence[str], skipped: list[str]) -> Iterator[Document]:
    """The texts of the files, sorted by name, each text once; `skipped` gains a line for every file passed over."""
    seen: dict[str, str] = {}
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in _files(root, pattern, left_out)):
        try:
            text = path.read_bytes().decode("utf-8")  # as bytes: line ends stay what they are
        except UnicodeDecodeError:
            skipped.append(f"{name}: not UTF-8")
            continue
        except OSError as error:
            skipped.append(f"{name}: {error.strerror}")
            continue
        # A copy of a file on the other side of the split would be an answer learned by heart.
        if not text or text in seen:
            skipped.append(f"{name}: {'the same text as ' + seen[text] if text else 'empty'}")
            continue
        seen[text] = name
        yield Document(name, text)


def _files(root: Path, pattern: str, left_out: Sequence[str]) -> Iterator[Path]:
    """The files below `root` whose names match `pattern`, without entering or taking what matches `left_out`."""

    def kept(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in left_out)

    for folder, folders, names in os.walk(root):
        folders[:] = filter(kept, folders)
        yield from (Path(folder, name) for name in names if fnmatchcase(name, pattern) and kept(name))


def _split(documents: tuple[Document, ...], share: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """(train, held out); neither is empty unless `share` is 0 or there is nothing to cut."""
    if share == 0 or not documents:
        return documents, ()
    if len(documents) == 1:
        return _cut(documents[0], share)
    place = {document.name: _place(document.name) for document in documents}
    ranked = sorted(place.values())
    limit = min(max(share, ranked[0]), ranked[-2])  # at least the first, never the last
    train = tuple(document for document in documents if place[document.name] > limit)
    return train, tuple(document for document in documents if place[document.name] <= limit)


def _place(name: str) -> float:
    """Where `name` falls in [0, 1), evenly and for ever."""
    digest = hashlib.sha256(_SALT + name.encode("utf-8", "surrogateescape")).digest()
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

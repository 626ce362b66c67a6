"""Where text comes from, as data, and the one function that opens it.  Imports nothing heavy: recipes hold sources."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from perilune.core.config import Config, require

if TYPE_CHECKING:
    from perilune.data.corpus import Corpus
    from perilune.data.streamed import StreamedCorpus

STANDARD_LIBRARY = "standard_library"
HUB = "hf://datasets/"


@dataclass(frozen=True, kw_only=True)
class TextSource(Config):
    """Some text to learn from, and which part of it is held out.

    The name of a file says what is in it: `*.jsonl`, `*.jsonl.gz` and `*.parquet` are shards, many documents in the
    field or column `text_key`; any other file is one document.
    """

    path: str = STANDARD_LIBRARY
    """`standard_library`, a folder, a file, or `hf://datasets/OWNER/NAME`: a dataset of the Hugging Face Hub."""
    pattern: str = "*.txt"
    """Which files of a folder, at any depth."""
    text_key: str = "text"
    """The field (JSONL) or column (Parquet, datasets) that holds the text."""
    subset: str | None = None
    """Which part of a dataset of the Hub that has several."""
    split: str = "train"
    """Which split of a dataset of the Hub."""
    revision: str | None = None
    """Branch, tag or commit of a dataset of the Hub; None is its newest."""
    held_out: float = 0.05
    """Share of the documents that is never trained on."""
    streamed: bool = False
    """Read shards block by block instead of holding them in memory; what comes from the Hub always is."""
    clean: bool = False
    """Leave out what is no text: cut files, binary blobs, machine logs, endless repetition (`data.filters`)."""
    near_duplicates: float | None = None
    """Leave out documents that are almost an earlier one: from this similarity on, 0.8 is usual (`data.duplicates`).
    Of text in memory; what is streamed is prepared once (`perilune prepare`)."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path", "a folder, a file or a dataset", "nothing", f"{STANDARD_LIBRARY} is built in")
        if "://" in self.path:
            require(
                re.fullmatch(HUB + r"[\w.-]+/[\w.-]+", self.path) is not None,
                "path", f"{HUB}OWNER/NAME", self.path, "a file from elsewhere has to be downloaded first",
            )  # fmt: skip
        require(
            0 <= self.held_out < 1, "held_out", "a share from 0 to below 1", self.held_out, "0.05 holds out one in 20"
        )
        for name in ("pattern", "text_key", "split"):
            require(bool(getattr(self, name)), name, "a name", "nothing", "leave it out for the usual one")
        near = self.near_duplicates
        require(near is None or 0 < near <= 1, "near_duplicates", "a similarity above 0, up to 1", near, "0.8 is usual")
        require(
            near is None or not (self.streamed or self.from_hub),
            "near_duplicates", "null for a stream, which remembers no text", near, "see perilune prepare",
        )  # fmt: skip
        # What would be ignored is a mistake.
        for name in ("subset", "split", "revision"):
            self._default_unless(self.from_hub, name, f"a dataset of the Hub ({HUB}OWNER/NAME)")
        self._default_unless(self.is_local, "pattern", "a folder of files")
        self._default_unless(self.path != STANDARD_LIBRARY, "text_key", "files or a dataset")
        self._default_unless(self.path != STANDARD_LIBRARY, "streamed", "files or a dataset")

    def _default_unless(self, fits: bool, name: str, place: str) -> None:
        value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
        require(fits or value == default, name, f"{default!r} for {self.path}", repr(value), f"it is only for {place}")

    @property
    def from_hub(self) -> bool:
        return self.path.startswith(HUB)

    @property
    def is_local(self) -> bool:
        """A file or folder of this machine."""
        return not self.from_hub and self.path != STANDARD_LIBRARY

    def resolved(self) -> Self:
        """The same source, found from any working directory: a local path made absolute, `~` spelled out."""
        return self.replace(path=str(Path(self.path).expanduser().resolve())) if self.is_local else self


def open_source(source: TextSource) -> "Corpus | StreamedCorpus":
    """The text of `source`, in memory or streamed.

    Raises DataError where there is none, or a shard cannot be read: its message names file and line.
    """
    if source.from_hub or source.streamed:
        from perilune.data.streamed import StreamedCorpus

        return StreamedCorpus.open(source)
    from perilune.data.corpus import standard_library, text_files

    if source.path == STANDARD_LIBRARY:
        return standard_library(source.held_out, clean=source.clean, near_duplicates=source.near_duplicates)
    return text_files(
        source.path,
        source.pattern,
        source.held_out,
        text_key=source.text_key,
        clean=source.clean,
        near_duplicates=source.near_duplicates,
    )

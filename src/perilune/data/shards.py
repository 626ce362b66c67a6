"""Shards, files of many documents each: JSON lines, plain or gzipped, and Parquet.

A shard that is not what its name says is an error that names file and line: whoever made it wants to know, and what
could still be read of it would be another corpus on the day it is mended.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from perilune.core.errors import DataError

_JSONL, _GZIPPED, _PARQUET = ".jsonl", ".jsonl.gz", ".parquet"


def is_shard(path: Path) -> bool:
    """By its name: `*.jsonl`, `*.jsonl.gz`, `*.parquet`."""
    return path.name.endswith((_JSONL, _GZIPPED, _PARQUET))


def shard_format(path: Path) -> str:
    """`json` or `parquet`, as the `datasets` library calls them."""
    return "parquet" if path.name.endswith(_PARQUET) else "json"


def read_shard(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    """The texts in the field or column `text_key`, each with its line or row, counted from 1; a null is an empty text.

    Holds no more than a line, or a thousand rows, at a time.  Raises DataError for a shard that is cut short or broken,
    a line that is no JSON object, a missing field, a value that is no text.
    """
    return _parquet(path, text_key) if path.name.endswith(_PARQUET) else _json_lines(path, text_key)


def find_files(root: Path, pattern: str, left_out: Iterable[str] = ()) -> list[tuple[str, Path]]:
    """The files below `root` whose names match `pattern`, as (path below root with `/`, path), sorted; nothing that
    matches one of `left_out` is entered or taken.

    Links to files are taken, links to folders are not entered: they may lead in a circle, or to the same text twice.
    Raises DataError for a folder that cannot be read, and for what is neither file nor folder, such as a named pipe.
    """
    left_out = tuple(left_out)

    def kept(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in left_out)

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # what is not there, or no more, has no files
            raise DataError(f"{error.filename}: expected a folder to read, got {error.strerror}; make it readable")

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = filter(kept, folders)
        found += [Path(folder, name) for name in names if fnmatchcase(name, pattern) and kept(name)]
    for path in found:
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for ever
            raise DataError(f"{path}: expected a file, got a pipe, socket or device; move it, or set pattern")
    return sorted((path.relative_to(root).as_posix(), path) for path in found)


def needed(module: str, what: str) -> Any:
    """The optional package `module`; DataError where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(f"{what}: expected the package {module}, found none; pip install 'perilune[data]'") from None


def _json_lines(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with gzip.open(path) if path.name.endswith(_GZIPPED) else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    yield number, _text_of(_object(line, f"{path}:{number}"), text_key, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:  # gzip's own errors among them
        raise DataError(
            f"{path}: expected a whole file, got {_one_line(error)} after line {number}; fetch it anew"
        ) from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise DataError(f"{where}: expected UTF-8, got other bytes; convert the file") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: expected a JSON object, got what cannot be read ({_one_line(error)}); mend the line"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(value).__name__}; write one object a line")
    return value


def _text_of(row: dict[str, Any], text_key: str, where: str) -> str:
    if text_key not in row:
        fields = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: expected a field {text_key!r}, got {fields}; set text_key")
    return checked_text(row[text_key], text_key, where)


def checked_text(value: Any, text_key: str, where: str) -> str:
    """`value` if it is text, empty text for None; DataError otherwise."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text in {text_key!r}, got {type(value).__name__}; set text_key")
    return value


def _parquet(path: Path, text_key: str) -> Iterator[tuple[int, str]]:
    parquet = needed("pyarrow.parquet", str(path))
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise DataError(
                    f"{path}: expected a column {text_key!r}, got {', '.join(map(repr, columns))}; set text_key"
                )
            for batch in file.iter_batches(batch_size=1000, columns=[text_key]):  # within a row group
                for value in batch.column(0):
                    text = checked_text(value.as_py(), text_key, f"{path}:{row + 1}")
                    row += 1
                    yield row, text
    except UnicodeDecodeError:
        raise DataError(f"{path}: expected UTF-8, got other bytes after row {row}; convert the column") from None
    except (OSError, needed("pyarrow", str(path)).ArrowException) as error:
        raise DataError(
            f"{path}: expected a whole Parquet file, got {_one_line(error)} after row {row}; fetch it anew"
        ) from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

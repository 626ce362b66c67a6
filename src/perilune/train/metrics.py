"""What a run says of itself while it trains: one JSON object a step, or a stage."""

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from perilune.train.folder import write_whole


class Metrics:
    """Appends lines to a file such as `metrics.jsonl`; what is killed afterwards leaves them whole.

    `after`: where a run goes on from, the last step whose lines stay; lines of later steps, which will come again, and
    what was half written are cut off.
    """

    def __init__(self, path: Path, after: int | None = None) -> None:
        if after is not None and path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            write_whole(path, b"".join(line for line in lines if _step(line) <= after))
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Adds a line, which names its `step`.  Raises OSError where the disk does not take it."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Has all lines survive a power cut."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _step(line: bytes) -> float:
    """The step of a whole line; infinite where it is none."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf

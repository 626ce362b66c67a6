"""What a run says of itself while it trains: one JSON object a step."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Metrics:
    """Appends lines to `metrics.jsonl`; each is whole on disk before the next step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

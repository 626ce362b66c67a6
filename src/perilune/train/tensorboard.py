"""The figures of every step for TensorBoard, beside `metrics.jsonl`, which stays what is true."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from perilune.core.errors import ConfigError
from perilune.train.loop import Progress


def summary_writer() -> Any:
    """The class that writes for TensorBoard; ConfigError where the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard: expected the package, found none; pip install 'perilune[tensorboard]'"
        ) from None
    return SummaryWriter


class TensorBoard:
    """Writes scalars into `folder`; `after` is the last step that stays there where a run goes on.

    Raises ConfigError where the package is missing.
    """

    def __init__(self, folder: Path, after: int = 0) -> None:
        self._writer = summary_writer()(str(folder), purge_step=after + 1)

    def write(self, progress: Progress) -> None:
        """All figures of one step."""
        line = progress.line()
        figures = {f"loss/{name}": value for name, value in line.pop("losses").items()} | line
        for name, value in figures.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, progress.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

"""How a long run shows itself: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from perilune.train.loop import Progress, Trainer

LINE_SECONDS = 15.0


class Smoothed:
    """A running mean that follows the last twenty values or so."""

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 0.0

    def add(self, value: float, share: float = 0.05) -> float:
        self._weight += share * (1 - self._weight)
        self.value += (value - self.value) * share / self._weight
        return self.value


@contextmanager
def watching(console: Console, trainer: "Trainer") -> Iterator[Callable[["Progress"], None]]:
    """Gives the function that is to be told of every step.

    The time left is judged by the steps since now alone: a run may go on where it stopped days ago.
    """
    loss, speed = Smoothed(), Smoothed()
    first = trainer.steps_done

    def describe(progress: "Progress") -> str:
        if progress.skipped is None:  # else it may be no number
            loss.add(progress.losses["next_token"])
        speed.add(progress.stage.batch_tokens / progress.seconds)
        stage = f"stage {progress.stage_number}/{progress.stages} {progress.stage.name}"
        left_out = f"  {trainer.guard.skipped} left out" if trainer.guard.skipped else ""
        return f"{stage}  loss {loss.value:.3f}  {speed.value:,.0f} tokens/s{left_out}"

    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=console) as bar:
            task = bar.add_task("starting", total=trainer.steps, completed=first)
            yield lambda progress: bar.update(task, completed=progress.step, description=describe(progress))
        return
    last = start = time.monotonic()

    def line(progress: "Progress") -> None:
        nonlocal last
        text, now = describe(progress), time.monotonic()
        if now - last >= LINE_SECONDS or progress.step == progress.steps:
            last = now
            left = (now - start) / (progress.step - first) * (progress.steps - progress.step)
            console.print(f"step {progress.step}/{progress.steps}  {text}  {left / 60:.1f} min left", markup=False)

    yield line

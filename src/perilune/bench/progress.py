"""How a benchmark shows what it is doing, beside its results: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 15.0

Tell = Callable[[str, int, int], None]
"""Is told what comes next, how many steps are done, and of how many."""


def quiet(what: str, done: int, total: int) -> None:
    """Shows nothing."""


class Steps:
    """Counts the steps of a benchmark and tells of each before it is taken."""

    def __init__(self, tell: Tell, total: int) -> None:
        self.tell, self.total, self.done = tell, total, 0

    def next(self, what: str) -> None:
        self.tell(what, self.done, self.total)
        self.done += 1


@contextmanager
def watching(name: str, console: Console) -> Iterator[Tell]:
    """Gives the function that is to be told of every step of the benchmark `name`."""
    if console.is_terminal:
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(name, total=None)
            yield lambda what, done, total: bar.update(task, description=f"{name}: {what}", completed=done, total=total)
        return
    start = time.monotonic()
    last = -LINE_SECONDS  # the first step is told at once

    def line(what: str, done: int, total: int) -> None:
        nonlocal last
        spent = time.monotonic() - start
        if spent - last >= LINE_SECONDS:
            last = spent
            left = f", {spent / done * (total - done) / 60:.1f} min left" if done else ""
            console.print(f"{name} {done + 1}/{total}: {what}{left}", markup=False, highlight=False)

    yield line

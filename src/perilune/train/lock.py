"""One process trains in a run's folder at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perilune.core.errors import DataError
from perilune.train.folder import LOCK


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps other processes from training in `folder`, which is made if need be, until the block ends.

    The system gives the lock back however the process ends.  Raises DataError naming the process that has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                raise DataError(
                    f"{folder}: expected no process at work there, found {file.read().strip() or 'one'}; "
                    "wait for it to end or choose another folder"
                ) from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # its holder removed it between our opening and locking
    with file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_unclaimed(folder: Path) -> None:
    """Raises DataError as `claimed` does, before anything is made ready; makes nothing."""
    if (folder / LOCK).exists():
        with claimed(folder):
            pass

"""A run's checkpoints: folders that are whole or do not count, the newest two kept.

checkpoints/step-00000100/      a model folder (config, weights, tokenizer) and what training needs beside it
checkpoints/step-00000200.partial/      being written, or never finished

Files are written into the partial folder, then on disk, then listed with size and checksum in `manifest.json`, which is
the last; one rename makes the folder count.  At any moment before it the older checkpoint is the newest whole one, at
any moment after it this one is.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from perilune.core.errors import CheckpointError
from perilune.train.folder import free_space, sync
from perilune.train.parallel.ranks import Ranks

log = logging.getLogger("perilune.train")
KEPT = 2
MANIFEST = "manifest.json"
NAME = re.compile(r"step-(\d{8,})((?:\.partial)*)")


class Checkpoints:
    """The checkpoints of the run in `folder`, which all `ranks` see, if there are several: every one of them calls."""

    def __init__(self, folder: Path, ranks: Ranks | None = None) -> None:
        self.folder = folder / "checkpoints"
        self.ranks = ranks or Ranks()
        self.last: Path | None = None
        """The newest one known to be whole: found by `latest`, or made by `save`."""

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Makes the checkpoint of `step` from what `write` puts into a folder, then removes all but the newest two.

        One that `save` or `latest` gave before is kept as it is.  Raises CheckpointError where it cannot be written,
        and leaves what was there.
        """
        path = self.folder / f"step-{step:08}"
        if path == self.last:
            return path
        partial = path.with_name(path.name + ".partial")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        def end() -> None:
            _seal(partial)
            shutil.rmtree(path, ignore_errors=True)  # a damaged one of the same step
            partial.rename(path)
            sync(self.folder)
            for other in self._found():
                if other not in (path, self.last):
                    shutil.rmtree(other, ignore_errors=True)

        try:
            self.ranks.from_first(begin)
            with self.ranks.agreeing():
                write(partial)
            self.ranks.from_first(end)
        except BaseException as error:
            if self.ranks.first:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, (OSError, SafetensorError)):
                raise CheckpointError(self._failure(step, error)) from error
            raise
        self.last = path
        return path

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None before the first one; says once which newer ones it passed over, and why.

        Raises CheckpointError if there are finished ones and none of them is whole.
        """
        self.last = self.ranks.from_first(self._latest)
        return self.last

    def _latest(self) -> Path | None:
        flaws = []
        for path in self._found():
            flaw = find_flaw(path)
            if flaw is None:
                return path
            log.warning("%s: passed over: %s", path, flaw)
            if not path.name.endswith(".partial"):
                flaws.append(f"{path.name}: {flaw}")
        if flaws:
            raise CheckpointError(
                f"{self.folder}: expected a whole checkpoint, found none ({flaws[0]}); "
                "copy one back, or begin anew with --overwrite"
            )
        return None

    def _found(self) -> list[Path]:
        """All of them, whole or not, the newest first; what bears another name is left alone."""
        if not self.folder.is_dir():
            return []
        numbered = [(match, path) for path in self.folder.iterdir() if (match := NAME.fullmatch(path.name))]
        return [path for match, path in sorted(numbered, key=lambda item: (-int(item[0][1]), item[0][2]))]

    def _failure(self, step: int, error: Exception) -> str:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        rest = f"{self.last.name} is whole" if self.last else "there is no older one"
        return (
            f"{self.folder}: expected to write the checkpoint of step {step}, got {reason} "
            f"({free_space(self.folder)}, {rest}); make room"
        )


def check_whole(path: Path) -> Path:
    """`path` itself; CheckpointError unless a whole checkpoint is there."""
    if flaw := find_flaw(path):
        raise CheckpointError(f"{path}: expected a whole checkpoint, but {flaw}; choose another")
    return path


def find_flaw(path: Path) -> str | None:
    """Why the checkpoint at `path` does not count; None if it is whole, to the last bit."""
    if path.name.endswith(".partial"):
        return "it was never finished"
    try:
        listed = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, written in listed.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != written["bytes"]:
                return f"{name} has {file.stat().st_size} bytes of {written['bytes']}"
            if _checksum(file) != written["sha256"]:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def _seal(folder: Path) -> None:
    """Has every file of `folder` on disk, then lists them in the manifest."""
    files = sorted(folder.iterdir())
    for path in files:
        sync(path)
    listed = {path.name: {"bytes": path.stat().st_size, "sha256": _checksum(path)} for path in files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": listed}, indent=2) + "\n", encoding="utf-8")
    sync(manifest)
    sync(folder)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

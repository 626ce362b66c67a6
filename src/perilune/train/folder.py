"""A run's folder: everything a run was and made, to be copied as a whole.

run.json          the whole configuration         metrics.jsonl     one line a step
tokenizer.json    trained when it began           snapshots.jsonl   one line a stage
checkpoints/      to go on from, the newest two   result.json       what it reached
model/            weights, config, tokenizer      report.html       all of it, to look at
"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.core.errors import CheckpointError, ConfigError, DataError
from perilune.train.config import Run

if TYPE_CHECKING:
    from perilune.data.tokenizer import ByteBPE

LOCK = "training.pid"
"""Names the process that trains in the folder, and is locked by it (`perilune.train.lock`)."""
BEFORE_A_RUN = (LOCK, "run.json.partial")
"""What is left of a run whose process was killed before its configuration was written: nothing to keep."""
LINES = ("metrics.jsonl", "snapshots.jsonl")
MADE_BY_A_RUN = ("result.json", *LINES, "report.html", "tokenizer.json")
FOLDERS_MADE_BY_A_RUN = ("checkpoints", "model", "tensorboard")


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """Raises DataError unless a run may begin in `folder`: it is new or empty (but for what a run killed before
    it began has left), or holds a run to `overwrite`, and can be written to."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: expected a folder for the run, got a file; choose another name")
    check_writable(folder)
    if not folder.exists() or all(path.name in BEFORE_A_RUN for path in folder.iterdir()):
        return
    if not (folder / "run.json").is_file():
        raise DataError(f"{folder}: expected a new or empty folder, found files that are no run; choose another")
    if not overwrite:
        raise DataError(
            f"{folder}: expected a new or empty folder, found a run; choose another, go on with it (--resume), "
            "or add --overwrite"
        )


def check_writable(folder: Path) -> None:
    """Raises DataError where nothing can be written to `folder`, or it cannot be made."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
        raise DataError(f"{folder}: expected a folder to write to, {nearest} is read-only; choose another")


def start_folder(folder: Path, run: Run, overwrite: bool = False) -> None:
    """Makes the run's folder, without what an overwritten run made, and writes the configuration.

    Nothing else in the folder is touched.  Raises DataError as `check_folder` does.
    """
    clear_folder(folder, overwrite)
    write_json(folder / "run.json", run.to_dict())


def clear_folder(folder: Path, overwrite: bool = False) -> None:
    """As `start_folder`, but for the configuration: what makes it a run that can be gone on with."""
    check_folder(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS_MADE_BY_A_RUN:  # first: checkpoints must not be taken for those of the new configuration
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in MADE_BY_A_RUN:
        (folder / name).unlink(missing_ok=True)


def keep_tokenizer(folder: Path, tokenizer: "ByteBPE") -> None:
    """Writes the run's `tokenizer.json`, whole or not at all."""
    partial = folder / "tokenizer.partial"
    try:
        file = tokenizer.save(partial)
        sync(file)
        file.replace(folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_past(source: Path, folder: Path) -> None:
    """The lines that the run in `source` has written, for one that goes on from it in `folder`."""
    for name in LINES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def read_run(folder: Path) -> Run:
    """The configuration of the run in `folder`; CheckpointError if there is none that can be read."""
    path = folder / "run.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder}: expected a run, found no run.json; give a folder that training made"
        ) from None
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise CheckpointError(f"{path}: expected a run's configuration, got {error}; the file is damaged") from None
    try:
        return Run.from_dict(values)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def differences(here: Any, there: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two configurations, as plain values, differ: dotted keys with the value here and there, None for none."""
    if isinstance(here, dict) and isinstance(there, dict):
        parts = {name: (here.get(name), there.get(name)) for name in {**here, **there}}
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        parts = {str(i): pair for i, pair in enumerate(zip(here, there))}
    else:
        return {} if here == there else {key: (here, there)}
    found: dict[str, tuple[Any, Any]] = {}
    for name, (a, b) in parts.items():
        found |= differences(a, b, f"{key}.{name}" if key else name)
    return found


def spell(found: dict[str, tuple[Any, Any]], most: int = 3) -> str:
    """The first of some `differences`: `seed=1 (there 0), stages.0.lr=0.1 (there 0.02) and 2 more`."""
    first = ", ".join(f"{key}={here} (there {there})" for key, (here, there) in list(found.items())[:most])
    return first + (f" and {len(found) - most} more" if len(found) > most else "")


def free_space(folder: Path) -> str:
    """What is left on the disk of `folder`, or of where it will be: `12.3 GB free`."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(nearest).free / 1e9:,.1f} GB free"


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all, and on disk."""
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """`content` under that name, on disk; where it cannot be written, what was there before stays."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """What was written to the file or folder `path` survives a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

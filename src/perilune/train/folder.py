"""A run's folder: everything a run was and made, to be copied as a whole.

run.json        the whole configuration        metrics.jsonl   one line a step
model/          weights, config, tokenizer     result.json     what it reached
"""

import json
import shutil
from pathlib import Path
from typing import Any

from perilune.core.errors import CheckpointError, ConfigError, DataError
from perilune.train.config import Run


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """Raises DataError unless a run may begin in `folder`: it is new or empty, or holds a run to `overwrite`."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder for the run, got a file; choose another name")
    if not any(folder.iterdir()):
        return
    if not (folder / "run.json").is_file():
        raise DataError(f"{folder}: expected a new or empty folder, found files that are no run; choose another")
    if not overwrite:
        raise DataError(f"{folder}: expected a new or empty folder, found a run; choose another, or add --overwrite")


def start_folder(folder: Path, run: Run, overwrite: bool = False) -> None:
    """Makes the run's folder, without what an overwritten run made, and writes the configuration.

    Nothing else in the folder is touched.  Raises DataError as `check_folder` does.
    """
    check_folder(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", "metrics.jsonl"):
        (folder / name).unlink(missing_ok=True)
    if (folder / "model").exists():
        shutil.rmtree(folder / "model")
    write_json(folder / "run.json", run.to_dict())


def read_run(folder: Path) -> Run:
    """The configuration of the run in `folder`; CheckpointError if there is none that can be read."""
    path = folder / "run.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: expected a run, found no run.json; give a folder that training made"
        ) from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise CheckpointError(f"{path}: expected a run's configuration, got {error}; the file is damaged") from None
    try:
        return Run.from_dict(values)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise

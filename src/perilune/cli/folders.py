"""Where a trained model lies: a model folder, or a run folder that holds one."""

from pathlib import Path

from perilune.core.errors import CheckpointError


def model_folder(path: Path) -> Path:
    """`path` itself if it holds a model, its `model` folder if it is a run; CheckpointError otherwise."""
    for folder in (path, path / "model"):
        if (folder / "config.json").exists():
            return folder
    raise CheckpointError(
        f"{path}: expected a trained model, found no config.json; train one with: perilune train nano --out {path}"
    )

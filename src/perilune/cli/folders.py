"""Where a trained model lies: a model folder, or a run folder that holds one; and where a file can be put."""

from pathlib import Path
from typing import TYPE_CHECKING

from perilune.core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from perilune.data.tokenizer import ByteBPE
    from perilune.models.k3 import K3Model


def model_folder(path: Path) -> Path:
    """`path` itself if it holds a model, its `model` folder if it is a run; CheckpointError otherwise."""
    for folder in (path, path / "model"):
        if (folder / "config.json").exists():
            return folder
    raise CheckpointError(
        f"{path}: expected a trained model, found no config.json; train one with: perilune train nano --out FOLDER"
    )


def load_model(path: Path) -> "tuple[K3Model, ByteBPE]":
    """The model at `path` and the tokenizer beside it.  CheckpointError or DataError where they cannot serve."""
    from perilune.data.tokenizer import ByteBPE
    from perilune.models.k3 import K3Model

    folder = model_folder(path)
    tokenizer = ByteBPE.load(folder)
    model = K3Model.from_pretrained(folder)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise CheckpointError(
            f"{folder}: expected a tokenizer of at most {model.config.vocab_size} tokens, got {tokenizer.vocab_size}; "
            "it is another model's"
        )
    return model, tokenizer


def check_file(path: Path | None, option: str) -> None:
    """Raises ConfigError, before any work is done, where the file that `option` asks for cannot be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"{option}: expected a file in a folder that exists, got {path}; make the folder first")

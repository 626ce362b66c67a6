"""Checkpoints of several ranks, by `torch.distributed.checkpoint`: each writes the parts it has, any number read them.

The files are safetensors that say which part of which tensor they hold, so nothing is unpickled to read them:

    shard-*.safetensors      model/NAME  optimizer/NAME/KEY, a rank's parts in each file
    training.safetensors     what is alike on all ranks, as one process writes it
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from perilune.core.errors import CheckpointError
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Config, K3Model
from perilune.models.k3.convert import load_into, read_config

if TYPE_CHECKING:
    from perilune.train.parallel.ranks import Ranks

PARTS = "shard-*.safetensors"


def in_parts(folder: Path) -> bool:
    """Whether several ranks wrote the checkpoint in `folder`."""
    return any(folder.glob(PARTS))


def write_parts(tensors: dict[str, Tensor], folder: Path, ranks: "Ranks") -> None:
    """Writes every rank's part of the tensors, of plain ones the first rank's.  Collective.

    Raises CheckpointError on all ranks where one could not write.
    """
    try:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.control)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: expected every rank to write its part, got {_reason(error)}") from error


def read_parts(tensors: dict[str, Tensor], folder: Path, ranks: "Ranks") -> None:
    """Fills the tensors, DTensors with this rank's part, from the safetensors in `folder`, whoever wrote them.

    Collective.  Raises CheckpointError where one is not there or of another shape.
    """
    try:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        there = reader.read_metadata().state_dict_metadata
        with ranks.agreeing():
            for name, tensor in tensors.items():
                if name not in there or there[name].size != tensor.shape:  # type: ignore[union-attr]
                    got = list(there[name].size) if name in there else "none"  # type: ignore[union-attr]
                    raise CheckpointError(
                        f"{folder}: expected {name} of shape {list(tensor.shape)}, got {got}; it is of another run"
                    )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
            warnings.filterwarnings("ignore", "Detected mismatched keys")  # stages have layers of their own
            dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.control, no_dist=ranks.mesh is None)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: expected to read every part, got {_reason(error)}; is it damaged?") from error
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{folder}: expected whole safetensors, got {error}; the file is damaged") from error


def names_in(folder: Path) -> set[str]:
    """Of all tensors in the safetensors there."""
    return set(dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def model_tensors(model: K3Model) -> dict[str, Tensor]:
    """What a model saves, by the names that its tensors have in a checkpoint of several ranks."""
    return {f"model/{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def load_weights(model: K3Model, folder: Path, ranks: "Ranks") -> None:
    """Fills the model, in parts or in one piece, from a checkpoint or model folder of any world.  Collective."""
    if in_parts(folder):
        read_parts(model_tensors(model), folder, ranks)
    elif ranks.mesh is None:
        load_into(model, folder)
    else:
        state: dict[str, Any] = ranks.only_first(lambda: _read_whole(model.config, folder)) or {}
        one = ranks.stages == 1  # a stage lacks the others' parameters; what was read whole lacks none
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=one)
        set_model_state_dict(model, state, options=options)


def export(folder: Path, into: Path) -> None:
    """The model of a run's checkpoint, of one rank or many, as a folder that `K3Model.from_pretrained` reads."""
    from perilune.train.parallel.ranks import Ranks

    with torch.random.fork_rng(devices=[]):
        model = K3Model(K3Config.from_hf(read_config(folder)))
    load_weights(model, folder, Ranks())
    ByteBPE.load(folder).save(into)
    model.save_pretrained(into)


def _read_whole(config: K3Config, folder: Path) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        model = K3Model(config)
    load_into(model, folder)
    return model.state_dict()


def _reason(error: CheckpointException) -> str:
    """What the ranks that failed said, in a line."""
    said = {
        f"{type(e[0]).__name__}: {str(e[0]).splitlines()[0]}" for e in error.failures.values() if isinstance(e, tuple)
    }
    return "; ".join(sorted(said)) or str(error).splitlines()[0]

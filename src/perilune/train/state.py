"""All that a training run is between two steps, written to a folder and put back bit for bit.

Of one process the folder is a model's, with its tokenizer and two files more: `training.safetensors` has every other
tensor, by names such as `optimizer/lm_head.weight/momentum`, `training.json` the step, the place in the data and the
configuration.  Several ranks write parts of tensors (`perilune.train.parallel.checkpoint`).
"""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import perilune
from perilune.core.errors import CheckpointError, ConfigError
from perilune.models.k3 import K3Config
from perilune.models.k3.convert import open_shard, read_config, write_shards
from perilune.train.checkpoint import Checkpoints, check_whole
from perilune.train.config import Run
from perilune.train.folder import differences, spell, write_json
from perilune.train.parallel.checkpoint import in_parts, load_weights, model_tensors, names_in, read_parts, write_parts

if TYPE_CHECKING:
    from perilune.train.loop import Trainer

log = logging.getLogger("perilune.train")
TENSORS = "training.safetensors"
VALUES = "training.json"
FORMAT = 1
CHANGEABLE = re.compile(
    r"stages\.\d+\.(lr|lr_end|warmup|micro_tokens|recompute)|optimizer\.\w+|guard\.\w+|checkpoint_every"
    r"|data\.sources\.[^.]+\.path"
)
"""Keys of a run's configuration that may have changed since the checkpoint: what it holds goes on to fit."""
NO_PART_OF_WEIGHTS = (
    "carried", "initializer_range", "mtp_loss_weight", "balance_loss_weight", "answer_loss_weight",
)  # fmt: skip
"""Keys of a model's configuration in which a run may differ from what it starts from."""


def write(trainer: "Trainer", folder: Path) -> None:
    """Raises OSError or SafetensorError where the disk does not take it.  Of several ranks, all have to call it."""
    ranks = trainer.ranks
    tensors = {name: tensor.detach() for name, tensor in _tensors(trainer)}
    if ranks.mesh is None:
        write_shards(trainer.model, folder)
        _write_rest(trainer, tensors, folder)
        return
    parts = {name: tensors.pop(name) for name, _ in _optimizer_tensors(trainer)}
    tensors |= ranks.to_first({name: tensor for name, tensor in tensors.items() if name.startswith("balancer/")})
    ranks.from_first(lambda: _write_rest(trainer, tensors, folder))
    write_parts(model_tensors(trainer.model) | parts, folder, ranks)


def _write_rest(trainer: "Trainer", tensors: dict[str, Tensor], folder: Path) -> None:
    """All but the weights."""
    trainer.feed.tokenizer.save(folder)
    write_json(folder / "config.json", trainer.model.config.to_hf())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    write_json(
        folder / VALUES,
        {
            "format": FORMAT,
            "written_by": {"perilune": perilune.__version__, "torch": torch.__version__},
            "step": trainer.steps_done,
            "tokens": trainer.tokens_done,
            "stage": trainer.stage.name,
            "feed": trainer.feed.state_dict(),
            "guard": trainer.guard.state_dict(),
            "run": trainer.run.to_dict(),
        },
    )


def restore(trainer: "Trainer", folder: Path) -> None:
    """Takes up what `write` left in `folder`: the trainer's next step is the one that would have come next.

    Raises CheckpointError where it is of another configuration, DataError where the data are not what they were.
    """
    values = json.loads((folder / VALUES).read_text(encoding="utf-8"))
    _check_run(folder, values, trainer.run)
    load_weights(trainer.model, folder, trainer.ranks)
    stored = _read_tensors(folder)
    _fill_optimizer(trainer, folder, stored)
    _fill_balancers(trainer, folder, stored)
    for name, window in trainer.loads.items():
        window.clear()
        for loads in stored.get(f"loads/{name}", []):
            window.add(loads)
    torch.set_rng_state(stored["random/cpu"])
    if "random/cuda" in stored and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(stored["random/cuda"], trainer.device)
    trainer.steps_done, trainer.tokens_done = values["step"], values["tokens"]
    trainer.feed.begin(trainer.stage)
    trainer.feed.load_state_dict(values["feed"])
    trainer.guard.load_state_dict(values.get("guard", {}))


def starting_point(run: Run) -> Path | None:
    """The model folder that `run.init` means: a model or a checkpoint itself, of a run the newest whole checkpoint or
    else the final model.  None without `init`.  Raises CheckpointError where there is none, or it is damaged."""
    if run.init is None:
        return None
    if run.data.tokenizer is not None:
        raise ConfigError("data.tokenizer: expected none beside init, which brings its own; leave one of them out")
    folder = Path(run.init)
    if (folder / "config.json").exists():
        return check_whole(folder) if (folder / TENSORS).exists() else folder
    newest = Checkpoints(folder).latest()
    if newest is None and not (folder / "model" / "config.json").exists():
        raise CheckpointError(f"{folder}: expected a run or a model to start from, found neither; check init")
    return newest or folder / "model"


def start_from(trainer: "Trainer", folder: Path) -> None:
    """Takes up the model in `folder`; from a checkpoint also what optimizer and balancers have gathered.

    Steps, rates and data begin anew.  Raises CheckpointError where the model's configuration is another.
    """
    there, here = K3Config.from_hf(read_config(folder)).to_dict(), trainer.run.model.to_dict()
    weights_alone = not (folder / TENSORS).exists()
    for values in (there, here):
        for name in (*NO_PART_OF_WEIGHTS, *["balance"] * weights_alone):
            del values[name]
    if found := differences(here, there):
        raise CheckpointError(
            f"init: expected the model of {folder}, got {spell(found)}; give both the same configuration"
        )
    load_weights(trainer.model, folder, trainer.ranks)
    if weights_alone:
        log.info("%s: weights without an optimizer's state, which starts at zero", folder)
        return
    stored = _read_tensors(folder)
    _fill_optimizer(trainer, folder, stored)
    _fill_balancers(trainer, folder, stored)


def _tensors(trainer: "Trainer") -> Iterator[tuple[str, Tensor]]:
    yield from _optimizer_tensors(trainer)
    for name, balancer in trainer.balancers.items():
        yield f"balancer/{name}/loads", balancer.loads
        for key, tensor in balancer.training_state().items():
            yield f"balancer/{name}/{key}", tensor
    for name, window in trainer.loads.items():
        if len(window):
            yield f"loads/{name}", window.stack()
    yield "random/cpu", torch.get_rng_state()
    if trainer.device.type == "cuda":
        yield "random/cuda", torch.cuda.get_rng_state(trainer.device)


def _optimizer_tensors(trainer: "Trainer") -> Iterator[tuple[str, Tensor]]:
    """The optimizer's own memory: read it to save, fill it to load."""
    for group in trainer.optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"]):
            for key, tensor in trainer.optimizer.state[param].items():
                yield f"optimizer/{name}/{key}", tensor


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    with open_shard(folder / TENSORS) as shard:
        return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118  no dict


def _fill_optimizer(trainer: "Trainer", folder: Path, stored: dict[str, Tensor]) -> None:
    own = dict(_optimizer_tensors(trainer))
    parted = in_parts(folder)
    there = {name for name in (names_in(folder) if parted else stored) if name.startswith("optimizer/")}
    if odd := trainer.ranks.names(own) ^ there:
        raise CheckpointError(
            f"{folder / TENSORS}: expected the state of the same optimizer, got another ({min(odd)}); "
            "go on with the version that wrote it"
        )
    if parted or trainer.ranks.mesh is not None:
        read_parts(own, folder, trainer.ranks)
        return
    for name, tensor in own.items():
        tensor.copy_(stored[name])


def _fill_balancers(trainer: "Trainer", folder: Path, stored: dict[str, Tensor]) -> None:
    for name, balancer in trainer.balancers.items():
        prefix = f"balancer/{name}/"
        own = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
        balancer.loads.copy_(own.pop("loads"))
        balancer.load_training_state(own)


def _check_run(folder: Path, values: dict[str, Any], run: Run) -> None:
    if values["format"] != FORMAT:
        raise CheckpointError(
            f"{folder / VALUES}: expected format {FORMAT}, got {values['format']}; "
            f"go on with perilune {values['written_by']['perilune']}, which wrote it"
        )
    found = differences(run.to_dict(), Run.from_dict(values["run"]).to_dict())
    if fixed := {key: pair for key, pair in found.items() if not CHANGEABLE.fullmatch(key)}:
        raise CheckpointError(
            f"{folder}: expected a checkpoint of this run, got one with {spell(fixed)}; "
            "only rates, options of optimizer and guard, micro_tokens and recompute may change under way"
        )
    if found:
        log.warning("%s: from here on %s", folder, spell(found, most=len(found)))

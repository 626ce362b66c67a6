"""Released files to models and back: names, the few reshaped tensors, safetensors shards.

In memory experts are stacked, a mixer is one module, and the selection bias belongs to its balancer; on disk each
expert's matrix, the mixer's norm and projection, and `e_score_correction_bias` have names of their own.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.core.errors import CheckpointError
from perilune.models.k3.config import K3Config

if TYPE_CHECKING:
    from perilune.models.k3.model import K3Model

log = logging.getLogger("perilune.models.k3")
SHARD_BYTES = 5 * 2**30
PREFIX = "language_model."  # of the text tensors in a multimodal checkpoint
DENSE = re.compile(r"\.block_sparse_moe\.((gate|up|down)_proj\.weight)$")  # a dense layer, as `transformers` saves it
EMBEDDING = "model.embed_tokens.weight"
OPTIONAL = re.compile(r"model\.mtp\.")
NOT_TEXT = re.compile(r"(vision_tower|mm_projector)\.")
RENAMED = [  # ours, released
    (re.compile(r"_res\.query$"), "_res_proj.weight"),
    (re.compile(r"_res\.norm\.weight$"), "_res_norm.weight"),
    (re.compile(r"\.balancer\.bias$"), ".gate.e_score_correction_bias"),
]


def released_views(model: "K3Model") -> dict[str, Tensor]:
    """Every stored tensor's released name with a view of the model's own memory: read it to save, fill it to load."""
    views: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor = tensor.detach()
        if match := re.fullmatch(r"(.*\.experts)\.(w[123])", name):
            views.update({f"{match[1]}.{e}.{match[2]}.weight": w for e, w in enumerate(tensor)})
            continue
        for ours, released in RENAMED:
            name, count = ours.subn(released, name)
            if count and released == "_res_proj.weight":
                tensor = tensor[None]
        views[name] = tensor
    if model.config.tie_word_embeddings:
        del views["lm_head.weight"]
    return views


def stored_shape(name: str, view: Tensor, config: K3Config) -> list[int]:
    """The shape on disk, which for `A_log` is not the model's: K3 pads it to a multiple of the head width."""
    if not name.endswith(".A_log"):
        return list(view.shape)
    heads, width = len(view), config.linear_attn_config.head_dim
    return [1, 1, heads, 1] if config.linear_attn_config.gate_lower_bound is None else [-(-heads // width) * width]


def to_stored(name: str, view: Tensor, config: K3Config) -> Tensor:
    if not name.endswith(".A_log"):
        return view
    padded = view.new_zeros(stored_shape(name, view, config)).flatten()
    padded[: len(view)] = view
    return padded.view(stored_shape(name, view, config))


def from_stored(name: str, tensor: Tensor, view: Tensor) -> Tensor:
    """`tensor` as read, in the model's shape; CheckpointError where it cannot be that parameter."""
    if name.endswith(".A_log") and tensor.numel() >= len(view):
        tensor, tail = tensor.flatten().split([len(view), tensor.numel() - len(view)])
        if tail.count_nonzero():
            raise CheckpointError(
                f"{name}: expected zeros behind its {len(view)} heads, got other values; wrong model?"
            )
    if tensor.shape != view.shape:
        raise CheckpointError(
            f"{name}: expected shape {list(view.shape)}, got {list(tensor.shape)}; the config is of another model"
        )
    return tensor


# reading


def load(cls: type["K3Model"], folder: Path, dtype: torch.dtype | None) -> "K3Model":
    config = K3Config.from_hf(read_config(folder))
    stored = _stored_tensors(folder)
    with torch.device("meta"):
        model = cls(config)
    model.to(dtype or read_tensor(*stored[EMBEDDING]).dtype).to_empty(device="cpu")
    model.init_weights()
    _fill(model, folder, stored)
    return model.eval()


def load_into(model: "K3Model", folder: Path) -> None:
    """Fills `model`, which keeps its device and dtypes, from the safetensors in `folder`.

    Raises CheckpointError where the names or shapes there are not the model's.
    """
    _fill(model, folder, _stored_tensors(folder))


def _stored_tensors(folder: Path) -> dict[str, tuple[Path, str]]:
    """By this library's released name: the shard and the name inside it."""
    stored = {released_name(name): (path, name) for name, path in read_index(folder).items()}
    if EMBEDDING not in stored:
        raise CheckpointError(
            f"{folder}: expected the tensor {EMBEDDING}, found none; this is not a K3-class checkpoint"
        )
    return stored


def _fill(model: "K3Model", folder: Path, stored: dict[str, tuple[Path, str]]) -> None:
    views = released_views(model)
    _check_names(folder, set(stored), set(views))
    by_file: dict[Path, list[str]] = {}
    for name in views:
        if name in stored:
            by_file.setdefault(stored[name][0], []).append(name)
    with torch.no_grad():
        for path, names in by_file.items():
            with open_shard(path) as shard:
                for name in names:
                    views[name].copy_(from_stored(name, shard.get_tensor(stored[name][1]), views[name]))


def released_name(stored: str) -> str:
    """The name a text tensor has in this library, from the one in a file: two spellings are put right."""
    return DENSE.sub(r".mlp.\1", stored.removeprefix(PREFIX))


def _check_names(folder: Path, found: set[str], expected: set[str]) -> None:
    if packed := sorted(n for n in found if n.endswith(".weight_packed")):
        raise CheckpointError(f"{folder}: expected unpacked experts, got {packed[0]} (MXFP4); dequantise it first")
    if missing := sorted(n for n in expected - found if not OPTIONAL.match(n)):
        raise CheckpointError(
            f"{folder}: expected the tensor {missing[0]}, found none ({len(missing)} missing); "
            "the weights are incomplete or the config is of another model"
        )
    unread = found - expected
    if other := sorted(n for n in unread if not OPTIONAL.match(n) and not NOT_TEXT.match(n)):
        raise CheckpointError(
            f"{folder}: no place for the tensor {other[0]} ({len(other)} unexpected); the config is of another model"
        )
    if unread:
        log.warning(
            "%s: left %d tensors unread, such as %s: the model has no part for them", folder, len(unread), min(unread)
        )


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder; or the file itself."""
    path = folder if folder.is_file() else folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: expected a checkpoint, found no config.json; give a folder that holds one"
        ) from None
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise CheckpointError(f"{path}: expected JSON, got {error}; the file is damaged") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(values).__name__}; the file is damaged")
    return values


def read_index(folder: Path) -> dict[str, Path]:
    """Tensor name to the shard that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: expected a weight_map, got {error!r}; the file is damaged") from None
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{index}: expected file names without folders, got {file!r}; do not trust this file"
                )
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder}: expected the shard {file}, found none; the download is incomplete")
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.exists() and any(folder.glob("shard-*.safetensors")):
        raise CheckpointError(
            f"{folder}: expected model.safetensors or its index, found the parts that several ranks wrote; "
            "make a model of them with perilune export"
        )
    if not single.exists():
        raise CheckpointError(
            f"{folder}: expected model.safetensors or its index, found neither; give a folder with weights"
        )
    with open_shard(single) as shard:
        return dict.fromkeys(shard.keys(), single)


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """The safetensors file at `path`; CheckpointError for what cannot be read from it, then or later."""
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected safetensors, got {error}; the file is damaged or cut short") from None


def read_tensor(path: Path, name: str) -> Tensor:
    with open_shard(path) as shard:
        return shard.get_tensor(name)


# writing


def save(model: "K3Model", folder: Path) -> None:
    """Writes beside the folder first and moves files in when all are whole, the config last: without it, no model."""
    folder = folder.resolve()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_shards(model, partial)
        (partial / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n")
        _move_in(partial, folder)
    except SafetensorError as error:  # the disk is full
        raise CheckpointError(f"{folder}: expected to write the weights, got {error}; make room") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_in(partial: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        if not (partial / stale.name).exists():
            stale.unlink()
    for path in sorted(partial.iterdir(), key=lambda p: p.name == "config.json"):
        os.replace(path, folder / path.name)


def write_shards(model: "K3Model", folder: Path) -> None:
    prefix = PREFIX if "outer" in model.config.carried else ""
    shards = list(_shards(model))
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {prefix + name: tensor for name, tensor in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.nbytes for t in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(model: "K3Model") -> Iterator[dict[str, Tensor]]:
    """The stored tensors in order, cut into shards of about SHARD_BYTES, never inside a tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, view in released_views(model).items():
        tensor = to_stored(name, view, model.config).contiguous()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name], size = tensor, size + tensor.nbytes
    yield shard

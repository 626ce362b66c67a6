"""A run's files as dataclasses.  What is there is read; what is missing, cut short or damaged is noted, never guessed.

Numbers that a file does not give are NaN in columns and None elsewhere.  Nothing here needs the code that trained.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from perilune.core.errors import CheckpointError

Column = np.ndarray  # [steps] float64
FILES = ("run.json", "metrics.jsonl", "snapshots.jsonl", "result.json")
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, RecursionError)


@dataclass(frozen=True)
class Stage:
    """A stage as it was planned."""

    name: str
    context: int
    tokens: int
    batch_tokens: int

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / self.batch_tokens))


@dataclass(frozen=True)
class Steps:
    """`metrics.jsonl`: one entry a step in every column."""

    step: Column
    stage: tuple[str, ...]
    tokens: Column
    """Trained on so far, this step included."""
    seconds: Column
    lr: Column
    next_token: Column
    mtp: Column
    answers: Column
    """Of what tasks ask for; NaN in a step without a task."""
    grad_norm: Column
    gini: Column
    max_violation: Column
    dead: Column
    skipped: Column
    """1 in a step that the guard left out, else 0."""

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def speed(self) -> Column:
        """Tokens a second; NaN where a step says no time."""
        batch = np.diff(self.tokens, prepend=0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((batch > 0) & (self.seconds > 0), batch / self.seconds, math.nan)

    @cached_property
    def borders(self) -> list[int]:
        """Where stages begin, the first at 0."""
        return [i for i, name in enumerate(self.stage) if i == 0 or name != self.stage[i - 1]]

    @property
    def parts(self) -> list[slice]:
        """The steps of each stage."""
        return [slice(a, b) for a, b in zip(self.borders, [*self.borders[1:], len(self)])]


@dataclass(frozen=True)
class Snapshot:
    """A line of `snapshots.jsonl`: the model at the end of a stage."""

    step: int
    stage: str
    tokens: int
    bits_per_byte: float | None
    expert_load: dict[str, list[float]]
    """Layer: load of each expert, 1 is the mean."""
    depth_attention: list[tuple[str, list[float]]]
    """Sublayer, mean weight of each source: embedding, finished blocks, live sum."""
    half_life: dict[str, list[tuple[float, float, float]]]
    """Layer: (p10, p50, p90) tokens of each head."""
    activation_rms: list[tuple[str, float, float]]
    """Sublayer, input, output."""
    state_rms: dict[str, list[float]]
    bits_by_source: dict[str, float]
    """Bits per byte of each source's held-out text; empty where there is one source."""


@dataclass(frozen=True)
class Position:
    start: float
    stop: float
    asked: int
    accuracy: float


@dataclass(frozen=True)
class Length:
    """A task at one length of text."""

    length: int
    chance: float
    asked: int
    accuracy: float
    positions: list[Position]


@dataclass(frozen=True)
class Bucket:
    """Mean loss of the tokens at positions [start, stop) of a text."""

    start: int
    stop: int
    nats: float
    tokens: int


@dataclass(frozen=True)
class LongContext:
    trained: int | None
    """The longest context trained on, in tokens."""
    tasks: dict[str, list[Length]]
    loss_by_position: dict[int, list[Bucket]]
    """Context: buckets in rising order."""


@dataclass(frozen=True)
class Result:
    """`result.json`."""

    bits_per_byte: dict[str, float]
    gini: float | None
    max_violation: float | None
    dead_experts: int | None
    tokens: int | None
    seed: int | None
    seconds: float | None
    parameters: int | None
    machine: dict[str, str]
    long_context: LongContext | None
    samples: list[tuple[str, str]]


@dataclass(frozen=True)
class RunFiles:
    """All that a run's folder says."""

    name: str
    config: dict[str, Any] | None
    steps: Steps | None
    snapshots: list[Snapshot]
    result: Result | None
    notes: list[str] = field(default_factory=list)
    """What is missing or damaged, a sentence each."""

    @cached_property
    def stages(self) -> list[Stage]:
        """As planned; empty where the configuration does not say."""
        try:
            return [
                Stage(str(s["name"]), int(s["context"]), int(s["tokens"]), max(1, int(s["batch_tokens"])))
                for s in (self.config or {})["stages"]
            ]
        except DAMAGE:
            return []

    @property
    def trained_context(self) -> int | None:
        """The longest context trained on so far."""
        if self.result and self.result.long_context and self.result.long_context.trained:
            return self.result.long_context.trained
        seen = set(self.steps.stage) if self.steps else set()
        return max((s.context for s in self.stages if s.name in seen or not seen), default=None)

    @property
    def planned_steps(self) -> int:
        """0 where the configuration does not say."""
        return sum(s.steps for s in self.stages)

    @property
    def finished(self) -> bool:
        return self.result is not None

    def setting(self, path: str) -> Any:
        """What the configuration holds at the dotted `path`; None if nothing."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(folder: Path) -> RunFiles:
    """Reads a run's folder; CheckpointError if none of a run's files is in it."""
    if not any((folder / name).is_file() for name in FILES):
        raise CheckpointError(
            f"{folder}: expected a run, found none of {', '.join(FILES)}; give a folder that training made"
        )
    notes: list[str] = []
    config = _whole(folder / "run.json", _object, notes)
    steps = _lines(folder / "metrics.jsonl", _step, notes)
    snapshots = _lines(folder / "snapshots.jsonl", _snapshot, notes)
    result = _whole(folder / "result.json", _result, notes)
    return RunFiles(folder.resolve().name, config, _columns(steps, notes), snapshots, result, notes)


# files


def _whole(path: Path, build: Callable[[Any], Any], notes: list[str]) -> Any:
    """What `build` makes of a JSON file; None, and a note, where it cannot."""
    if not path.is_file():
        notes.append(f"{path.name} is not there{' yet' if path.name == 'result.json' else ''}.")
        return None
    try:
        return build(json.loads(path.read_bytes()))
    except DAMAGE:
        notes.append(f"{path.name} is cut short or damaged, and was left out.")
        return None


def _lines(path: Path, build: Callable[[Any], Any], notes: list[str]) -> list[Any]:
    """What `build` makes of each line; a note on those of which it makes nothing."""
    if not path.is_file():
        notes.append(f"{path.name} is not there.")
        return []
    *whole, rest = path.read_bytes().split(b"\n")
    built, damaged = [], 0
    for line in filter(bytes.strip, whole):
        try:
            built.append(build(json.loads(line)))
        except DAMAGE:
            damaged += 1
    if rest.strip():
        try:
            built.append(build(json.loads(rest)))
        except DAMAGE:
            notes.append(f"The last line of {path.name} is half-written, and was left out.")
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged:,} lines"
        notes.append(f"{lines} of {path.name} could not be read, and {'was' if damaged == 1 else 'were'} left out.")
    if not built:
        notes.append(f"{path.name} is empty.")
    return built


# values: absent ones are NaN or None; ones of the wrong type raise, and damage their line


def _object(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise TypeError(values)
    return values


def _part(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`; an empty one if there is none."""
    value = values.get(key)
    return {} if value is None else _object(value)


def _number(values: dict[str, Any], key: str) -> float:
    value = values.get(key)
    return math.nan if value is None else float(_real(value))


def _real(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return value


def _maybe(values: dict[str, Any], key: str) -> float | None:
    value = _number(values, key)
    return None if math.isnan(value) else value


def _count(values: dict[str, Any], key: str) -> int | None:
    value = _maybe(values, key)
    return None if value is None else _whole_number(value)


def _share(values: dict[str, Any], key: str) -> float:
    value = _number(values, key)
    if value < 0 or value > 1:
        raise ValueError(value)
    return value


def _whole_number(value: Any, least: int = 0) -> int:
    if not least <= _real(value) < 2**63:
        raise ValueError(value)
    return int(value)


def _numbers(values: Iterable[Any]) -> list[float]:
    return [math.nan if value is None else float(_real(value)) for value in values]


# metrics.jsonl


def _step(line: dict[str, Any]) -> dict[str, Any]:
    losses = _part(line, "losses")
    return {
        "step": float(_whole_number(line["step"])),
        "stage": str(line.get("stage", "")),
        "tokens": float(_whole_number(line["tokens"])),
        "next_token": _number(losses, "next_token"),
        "mtp": _number(losses, "mtp"),
        "answers": _number(losses, "answers"),
        "skipped": float(line.get("skipped") is not None),
        **{key: _number(line, key) for key in ("seconds", "lr", "grad_norm", "gini", "max_violation", "dead")},
    }


def _columns(lines: list[dict[str, Any]], notes: list[str]) -> Steps | None:
    """Lines as columns.  A run that went back to a checkpoint wrote steps twice: the later ones count."""
    kept: list[dict[str, Any]] = []
    redone = 0
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
            redone += 1
        kept.append(line)
    if redone:
        notes.append(
            f"The run went back to a checkpoint: {redone:,} steps were done again, and the later ones are shown."
        )
    if not kept:
        return None
    columns = {key: np.array([line[key] for line in kept]) for key in kept[0] if key != "stage"}
    return Steps(stage=tuple(line["stage"] for line in kept), **columns)


# snapshots.jsonl


def _snapshot(line: dict[str, Any]) -> Snapshot:
    return Snapshot(
        step=_whole_number(line["step"]),
        stage=str(line.get("stage", "")),
        tokens=_whole_number(line["tokens"]),
        bits_per_byte=_maybe(line, "bits_per_byte"),
        expert_load=_by_layer(line, "expert_load", _numbers),
        depth_attention=[(str(s["sublayer"]), _numbers(s["weights"])) for s in line.get("depth_attention") or []],
        half_life=_by_layer(line, "half_life", lambda heads: [_three(head) for head in heads]),
        activation_rms=[
            (str(s["sublayer"]), _number(s, "input"), _number(s, "output")) for s in line.get("activation_rms") or []
        ],
        state_rms=_by_layer(line, "state_rms", _numbers),
        bits_by_source={str(name): float(_real(bits)) for name, bits in _part(line, "bits_by_source").items()},
    )


def _by_layer(line: dict[str, Any], key: str, build: Callable[[Any], Any]) -> dict[str, Any]:
    """Layers in the order of depth."""
    layers = _part(line, key)
    ordered = sorted(layers, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    return {name: build(layers[name]) for name in ordered}


def _three(values: Iterable[Any]) -> tuple[float, float, float]:
    low, median, high = _numbers(values)
    return low, median, high


# result.json


def _result(values: Any) -> Result:
    load = _part(values, "expert_load")
    bits = _part(values, "bits_per_byte")
    long_context = values.get("long_context")
    return Result(
        bits_per_byte={str(name): float(_real(value)) for name, value in bits.items()},
        gini=_maybe(load, "gini"),
        max_violation=_maybe(load, "max_violation"),
        dead_experts=_count(load, "dead_experts"),
        tokens=_count(values, "tokens"),
        seed=_count(values, "seed"),
        seconds=_maybe(values, "seconds"),
        parameters=_count(values, "parameters"),
        machine={str(name): str(value) for name, value in _part(values, "machine").items()},
        long_context=None if long_context is None else _long_context(_object(long_context)),
        samples=[(str(sample["prompt"]), str(sample["text"])) for sample in values.get("samples") or []],
    )


def _long_context(values: dict[str, Any]) -> LongContext:
    tasks = {
        str(name): sorted((_length(entry) for entry in lengths), key=lambda entry: entry.length)
        for name, lengths in _part(values, "tasks").items()
    }
    curves = {
        _whole_number(curve["context"], 1): [
            Bucket(
                _whole_number(b["from"]),
                _whole_number(b["to"]),
                _number(b, "nats"),
                _whole_number(b.get("tokens", 0)),
            )
            for b in curve["buckets"]
        ]
        for curve in values.get("loss_by_position") or []
    }
    trained = None if values.get("trained") is None else _whole_number(values["trained"], 1)
    return LongContext(trained, tasks, dict(sorted(curves.items())))


def _length(values: dict[str, Any]) -> Length:
    return Length(
        length=_whole_number(values["length"], 1),
        chance=_share(values, "chance"),
        asked=_count(values, "asked") or 0,
        accuracy=_share(values, "accuracy"),
        positions=[
            Position(float(_real(p["from"])), float(_real(p["to"])), _count(p, "asked") or 0, _share(p, "accuracy"))
            for p in values.get("positions") or []
        ],
    )

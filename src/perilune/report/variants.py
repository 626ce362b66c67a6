"""Runs that differ by their seed alone are one variant; how far apart two variants are beside their seeds' spread."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.core.errors import CheckpointError
from perilune.report import measures, words
from perilune.report.read import RunFiles

SEED = re.compile(r"[-_. ]*(seed|s)[-_. ]?\d+$", re.IGNORECASE)
# 97.5th percentile of Student's t for 1, 2, ... degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Variant:
    """A configuration and the runs that have it, one a seed."""

    name: str
    settings: dict[str, Any]
    """Dotted key: value, without the seed."""
    runs: list[RunFiles]


@dataclass(frozen=True)
class Sample:
    """What the seeds of a variant reached."""

    values: list[float]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for one seed."""
        n = len(self.values)
        return math.hypot(*(v - self.mean for v in self.values)) / math.sqrt(n - 1) if n > 1 else None


@dataclass(frozen=True)
class Measure:
    """A figure by which variants are compared."""

    name: str
    of: Callable[[RunFiles], float | None]
    show: Callable[[float], str]
    lower: bool
    """Whether less is better."""
    ticks: str = ""
    """How an axis shows it (d3)."""


MEASURES = (
    Measure("bits per byte", measures.bits_per_byte, lambda v: f"{v:.3f}", True),
    Measure("Gini of expert load", measures.gini, lambda v: f"{v:.3f}", True),
    Measure("dead experts", measures.dead_experts, lambda v: f"{v:.3g}", True),
    Measure("needles found, trained length", measures.needle_trained, words.percent, False, "~%"),
    Measure("needles found, longest text", measures.needle_longest, words.percent, False, "~%"),
    Measure("tokens a second", measures.speed, words.human, False),
)


def grouped(runs: Sequence[RunFiles]) -> list[Variant]:
    """The variants, in the order in which their first runs were given."""
    groups: dict[str, list[RunFiles]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    settings = [_settings(group[0]) for group in groups.values()]
    varying = [key for key, _ in differences(settings)]
    names = [_name(group, values, varying) for group, values in zip(groups.values(), settings)]
    told = [
        name if names.count(name) == 1 else f"{name}: {_spelled(values, varying) or i + 1}"
        for i, (name, values) in enumerate(zip(names, settings))
    ]
    return [Variant(name, values, group) for name, values, group in zip(told, settings, groups.values())]


def differences(settings: Sequence[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The keys whose values are not the same everywhere, with the values; None where a key is absent."""
    keys = sorted({key for values in settings for key in values})
    rows = [(key, [values.get(key) for values in settings]) for key in keys]
    return [(key, row) for key, row in rows if any(json.dumps(v) != json.dumps(row[0]) for v in row)]


def sample(variant: Variant, measure: Measure) -> Sample | None:
    """What the variant's finished runs reached; None if none says."""
    values = [measure.of(run) for run in variant.runs if run.finished]
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    return Sample(known) if known else None


def apart(a: Sample, b: Sample) -> bool | None:
    """Whether the means differ by more than the seeds' spread (Welch's t test at 5%); None where one has one seed."""
    if a.spread is None or b.spread is None:
        return None
    parts = [a.spread**2 / len(a.values), b.spread**2 / len(b.values)]
    error, difference = math.sqrt(sum(parts)), abs(a.mean - b.mean)
    if error == 0:
        return difference > 0
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a.values) - 1) + parts[1] ** 2 / (len(b.values) - 1))
    return difference > error * STUDENT[min(int(freedom + 1e-9), len(STUDENT)) - 1]


def ranked(variants: Sequence[Variant], measure: Measure) -> list[tuple[Variant, Sample]]:
    """The variants of which the measure is known, best first."""
    known = [(v, s) for v in variants if (s := sample(v, measure)) is not None]
    return sorted(known, key=lambda entry: entry[1].mean if measure.lower else -entry[1].mean)


def conclusion(variants: Sequence[Variant], measure: Measure) -> str | None:
    """Who leads by a measure, and which of the others are behind by more than seeds explain; in words."""
    order = ranked(variants, measure)
    if len(order) < 2:
        return None
    top = order[0][1]
    leaders = [v.name for v, s in order if s.mean == top.mean]
    if len(leaders) == len(order):
        return f"all have {told(top, measure)}."
    behind = [(f"{v.name} ({measure.show(s.mean)})", apart(top, s)) for v, s in order if s.mean != top.mean]
    beyond, within, unknown = ([name for name, said in behind if said is what] for what in (True, False, None))
    sentences = [f"{words.listed(leaders)} {'leads' if len(leaders) == 1 else 'lead'} with {told(top, measure)}."]
    if beyond:
        sentences.append(f"Behind by more than the seeds' spread: {words.listed(beyond)}.")
    if within:
        sentences.append(f"Within the seeds' spread: {words.listed(within)}.")
    if unknown:
        sentences.append(f"Not to be told from chance with one seed: {words.listed(unknown)}.")
    return " ".join(sentences)


def told(sample: Sample, measure: Measure) -> str:
    """Mean and spread: 1.5301 ± 0.0042."""
    if sample.spread is None:
        return measure.show(sample.mean)
    return f"{measure.show(sample.mean)} ± {measure.show(sample.spread)}"


def _identity(run: RunFiles) -> str:
    """What all seeds of a variant share."""
    return json.dumps(_settings(run), sort_keys=True) if run.config is not None else f"name {_stem(run.name)}"


def _settings(run: RunFiles) -> dict[str, Any]:
    try:
        flat = dict(_flat(run.config or {}, ""))
    except RecursionError:
        raise CheckpointError(
            f"{run.name}: expected a run's configuration, got one nested too deep; its run.json is damaged"
        ) from None
    flat.pop("seed", None)
    return flat


def _flat(value: Any, path: str) -> list[tuple[str, Any]]:
    """Dotted keys of nested objects and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    parts = [part for key, inner in inside for part in _flat(inner, f"{path}.{key}" if path else str(key))]
    return parts or ([(path, value)] if path else [])


def _stem(name: str) -> str:
    """A run's name without its seed."""
    return SEED.sub("", name) or name


def _name(runs: list[RunFiles], settings: dict[str, Any], varying: list[str]) -> str:
    """The runs' common name, or what sets their configuration apart."""
    stems = {_stem(run.name) for run in runs}
    return stems.pop() if len(stems) == 1 else _spelled(settings, varying) or runs[0].name


def _spelled(settings: dict[str, Any], varying: list[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={settings.get(key)}" for key in varying[:3])

"""Single figures of a run, for the page's head, the health rules and comparisons; None where the files do not say."""

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from perilune.report.read import Bucket, Column, Length, RunFiles

OURS = "perilune"
RECENT = 0.1  # share of the steps that "at the end" means


def known(values: Column) -> Column:
    """The finite values."""
    return values[np.isfinite(values)]


def middle(values: Column) -> float | None:
    """The median of the finite values."""
    values = known(values)
    return float(np.median(values)) if len(values) else None


def recent(values: Column) -> float | None:
    """The median over the last tenth of the steps, five at least."""
    return middle(values[-max(5, round(len(values) * RECENT)) :])


def smoothed(values: Column, parts: list[slice], most: int = 50) -> Column:
    """Running medians, which no leap moves, and of these running means, within each part; gaps stay gaps.

    A value is judged with its neighbours, a hundredth of all steps to each side.
    """
    half = max(2, min(most, len(values) // 100))
    out = np.where(np.isfinite(values), values, math.nan)
    for part in parts:
        there = np.isfinite(values[part])
        for average in (np.nanmedian, np.nanmean):
            padded = np.pad(out[part], half, constant_values=math.nan)
            out[part][there] = average(sliding_window_view(padded, 2 * half + 1)[there], axis=1)
    return out


def bits_per_byte(run: RunFiles) -> float | None:
    """On the whole held-out text, or as the last snapshot has it."""
    if run.result and OURS in run.result.bits_per_byte:
        return run.result.bits_per_byte[OURS]
    return next((s.bits_per_byte for s in reversed(run.snapshots) if s.bits_per_byte is not None), None)


def gini(run: RunFiles) -> float | None:
    """Of the worst layer over the last window."""
    if run.result and run.result.gini is not None:
        return run.result.gini
    return recent(run.steps.gini) if run.steps else None


def dead_share(run: RunFiles) -> float | None:
    """Share of all experts that got no token over the last window."""
    if run.steps and len(known(run.steps.dead)):
        return float(known(run.steps.dead)[-1])
    return None


def dead_experts(run: RunFiles) -> int | None:
    """How many experts got no token."""
    if run.result and run.result.dead_experts is not None:
        return run.result.dead_experts
    return None


def speed(run: RunFiles) -> float | None:
    """Median tokens a second."""
    return middle(run.steps.speed) if run.steps else None


def seconds(run: RunFiles) -> float | None:
    """Time the training took: as the run says, or as its steps sum up to."""
    if run.result and run.result.seconds is not None:
        return run.result.seconds
    return float(known(run.steps.seconds).sum()) if run.steps and len(known(run.steps.seconds)) else None


def tokens(run: RunFiles) -> int | None:
    if run.result and run.result.tokens is not None:
        return run.result.tokens
    return int(run.steps.tokens[-1]) if run.steps else None


def seed(run: RunFiles) -> int | None:
    value = run.setting("seed")
    if isinstance(value, int):
        return value
    return run.result.seed if run.result else None


def task(run: RunFiles, name: str) -> list[Length]:
    """A task's lengths in rising order; empty where it was not asked."""
    context = run.result.long_context if run.result else None
    return context.tasks.get(name, []) if context else []


def position_curves(run: RunFiles) -> dict[int, list[Bucket]]:
    """Context: loss by position."""
    context = run.result.long_context if run.result else None
    return context.loss_by_position if context else {}


def within(lengths: list[Length], trained: int | None) -> Length | None:
    """The longest length that was trained on."""
    return next((entry for entry in reversed(lengths) if trained is None or entry.length <= trained), None)


def needle_trained(run: RunFiles) -> float | None:
    """Needle accuracy at the longest trained length."""
    entry = within(task(run, "needle"), run.trained_context)
    return entry.accuracy if entry else None


def needle_longest(run: RunFiles) -> float | None:
    """Needle accuracy at the longest length asked, if it is beyond the trained one."""
    lengths, trained = task(run, "needle"), run.trained_context
    return lengths[-1].accuracy if lengths and trained is not None and lengths[-1].length > trained else None

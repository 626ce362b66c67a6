"""Whether errors grow along a sequence: by window, against the exact recurrence by chunks in float64."""

from functools import partial

import torch

from perilune.bench.contest import error
from perilune.bench.kda.check import ALLOWED
from perilune.bench.kda.problem import INPUTS, REGIMES, Shape, forward_backward, make, ours
from perilune.bench.progress import Steps, quiet

WINDOWS = 8
LEEWAY = 2
"""What a window may err more than all tokens together."""
ALONG = ("o", *(f"d{name}" for name in INPUTS[:5]))
"""What has a row for every token: outputs err forward, gradients of what is remembered err backward."""


def drift(
    shape: Shape, device: torch.device, windows: int = WINDOWS, steps: Steps | None = None
) -> dict[str, dict[str, list[float]]]:
    """By regime and name: the errors of o and of the gradients in each of `windows` equal parts of the sequence.

    A step for each regime.
    """
    steps = steps or Steps(quiet, len(REGIMES))
    found = {}
    for regime in REGIMES:
        steps.next(f"checking {shape.T:,} tokens, {regime} gates")
        found[regime] = _of(shape, regime, device, windows)
    return found


def _of(shape: Shape, regime: str, device: torch.device, windows: int) -> dict[str, list[float]]:
    problem = make(shape, regime, device)
    got = forward_backward(ours, problem)
    exact = forward_backward(partial(ours, backend="chunked"), problem.map(torch.Tensor.double))
    return {
        name: [error(x, y) for x, y in zip(mine.chunk(windows, 1), right.chunk(windows, 1))]
        for name, mine, right in zip(ALONG, got, exact)
    }


def worst(errors: dict[str, dict[str, list[float]]]) -> str:
    """What is off by more than it may be, or nothing."""
    for regime, by_name in errors.items():
        for name, along in by_name.items():
            if (off := max(along)) > LEEWAY * ALLOWED[name]:
                return f"{name} is off by {off:.1e} of its size in window {along.index(off) + 1} ({regime} gates)"
    return ""

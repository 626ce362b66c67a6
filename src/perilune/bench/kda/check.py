"""Whether contenders are right: relative errors against the token loop in float64, on the same inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor

from perilune.bench.contest import error, reason
from perilune.bench.kda.contenders import Contender
from perilune.bench.kda.problem import INPUTS, REGIMES, Problem, Shape, forward_backward, make, ours
from perilune.bench.progress import Steps, quiet

ALLOWED = {
    "o": 4e-3,
    "dq": 5e-3,
    "dk": 5e-3,
    "dv": 5e-3,
    "dg": 6e-3,
    "dbeta": 5e-3,
    "dA_log": 1.5e-2,
    "ddt_bias": 1.5e-2,
}
"""Of the norm; rounding a result to bf16 alone makes 1.7e-3.  dg is the gradient of the logit where there is one."""
BROKEN = 0.1
"""Who errs by more, or raises, does something else; who errs by less than that is worse, and may be as fast."""
SHAPES = (Shape(2, 300, 8), Shape(1, 300, 8, documents=(17, 64, 100, 119)))


@dataclass
class Verdict:
    errors: dict[str, float] = field(default_factory=dict)
    """The largest over all gates and shapes; infinite where a value is not finite."""
    failed: str = ""
    """What is wrong first."""
    broken: bool = False

    def add(self, got: tuple[Tensor, ...], expected: tuple[Tensor, ...], where: str) -> None:
        for name, x, exact in zip(("o", *(f"d{name}" for name in INPUTS)), got, expected):
            off = error(x, exact)
            self.errors[name] = max(off, self.errors.get(name, 0.0))
            self.broken |= off > BROKEN
            if off > ALLOWED[name] and not self.failed:
                self.failed = f"{name} is off by {off:.1e} of its size, allowed {ALLOWED[name]:.1e} ({where})"


def check(
    contenders: Sequence[Contender],
    device: torch.device,
    shapes: Sequence[Shape] = SHAPES,
    steps: Steps | None = None,
) -> dict[str, Verdict]:
    """By label; a step for each shape and kind of gates.

    One from elsewhere that raises has failed; one of ours that raises is our bug.
    """
    steps = steps or Steps(quiet, len(shapes) * len(REGIMES))
    verdicts = {contender.label: Verdict() for contender in contenders}
    for shape, regime in product(shapes, REGIMES):
        where = f"{regime} gates, {'packed' if shape.documents else 'rows'}"
        steps.next(f"checking {where}")
        logits = make(shape, regime, device)
        for problem in (logits, logits.activate()):
            same = [contender for contender in contenders if contender.activated == problem.activated]
            expected = exact(problem) if same else ()
            for contender in same:
                verdict = verdicts[contender.label]
                try:
                    verdict.add(forward_backward(contender.run, problem), expected, where)
                except Exception as stop:
                    if contender.package is None:
                        raise
                    verdict.failed = verdict.failed or f"{reason(stop)} ({where})"
                    verdict.broken = True
    return verdicts


def exact(problem: Problem) -> tuple[Tensor, ...]:
    return forward_backward(partial(ours, backend="reference"), problem.map(torch.Tensor.double))

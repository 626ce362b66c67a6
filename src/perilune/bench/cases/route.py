"""Routing on a GPU: one kernel a pass, and plain torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perilune.bench.operation import BYTES_PER_MS, Inputs, Operation, Shape
from perilune.ops.route import route
from perilune.ops.route.api import ROUTE


@dataclass(frozen=True)
class Choice(Shape):
    """k of E experts for each of M tokens."""

    M: int
    E: int
    k: int

    def __str__(self) -> str:
        return f"{self.M} x {self.E}, {self.k} of them"

    @property
    def forward_ms(self) -> float:
        """Scores read, ids and weights written."""
        return self.M * (4 * self.E + 12 * self.k) / BYTES_PER_MS

    @property
    def both_ms(self) -> float:
        """And ids, gradients and scores of those chosen read, the scores' gradient written."""
        return self.forward_ms + self.M * (4 * self.E + 16 * self.k) / BYTES_PER_MS

    def make(self, device: torch.device) -> Inputs:
        torch.manual_seed(0)
        # Of 16 bits, so that float32 adds them exactly: in float64 the same are equal, and the same are chosen.
        scores = torch.randint(0, 2**16, (self.M, self.E), device=device).div(2**16).requires_grad_()
        bias = torch.randint(-(2**13), 2**13, (self.E,), device=device) / 2**16

        def op(scores: Tensor, *, backend: str) -> Tensor:
            return route(scores, bias, self.k, backend=backend)[1]

        return Inputs([scores], op, torch.randn(self.M, self.k, device=device))


class Comparison(Operation):
    allowed: ClassVar[Mapping[str, float]] = {"weights": 1e-6, "dscores": 1e-6}

    def reasons(self, inputs: Inputs) -> Mapping[str, str]:
        (scores,) = inputs.leaves
        return ROUTE.choice(scores, scores[0], 1, True, 1.0, None)[1]


CASE = Comparison(
    name="route",
    title="routing by float32 scores",
    shapes=(Choice(32768, 256, 8), Choice(32768, 896, 16)),
    checked=(Choice(300, 256, 8), Choice(100, 1000, 32)),
    contenders={"perilune": "triton", "plain torch": "chunked"},
)

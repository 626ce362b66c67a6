"""A router's scores on a GPU: float32 weights in bfloat16 parts, and float32 products."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from perilune.bench.operation import BYTES_PER_MS, FLOPS_PER_MS, Inputs, Operation, Shape
from perilune.ops import wide_linear
from perilune.ops.wide_linear.api import BACKENDS


@dataclass(frozen=True)
class Scores(Shape):
    """M bfloat16 rows of width K, N float32 outputs."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return f"{self.M} x {self.K} x {self.N}"

    @property
    def forward_ms(self) -> float:
        """Three products, or x read and y written."""
        flops, moved = 6 * self.M * self.K * self.N, 2 * self.M * self.K + 4 * self.M * self.N
        return max(flops / FLOPS_PER_MS, moved / BYTES_PER_MS)

    @property
    def both_ms(self) -> float:
        """Nine products, or x read twice, dx written, y and dy."""
        flops, moved = 18 * self.M * self.K * self.N, 6 * self.M * self.K + 8 * self.M * self.N
        return max(flops / FLOPS_PER_MS, moved / BYTES_PER_MS)

    def make(self, device: torch.device) -> Inputs:
        torch.manual_seed(0)
        x = torch.randn(self.M, self.K, device=device).bfloat16().requires_grad_()
        weight = torch.randn(self.N, self.K, device=device).mul_(self.K**-0.5).requires_grad_()
        return Inputs([x, weight], wide_linear, torch.randn(self.M, self.N, device=device))


class Comparison(Operation):
    allowed: ClassVar[Mapping[str, float]] = {"y": 2e-6, "dx": 2e-3, "dweight": 2e-6}

    def reasons(self, inputs: Inputs) -> Mapping[str, str]:
        return BACKENDS.choice(*inputs.leaves)[1]


CASE = Comparison(
    name="wide_linear",
    title="scores of bf16 rows by float32 weights",
    shapes=(Scores(32768, 1024, 256), Scores(8192, 7168, 896)),
    checked=(Scores(1000, 1024, 256), Scores(300, 77, 33)),
    contenders={"perilune": "chunked", "float32 products": "reference"},
)

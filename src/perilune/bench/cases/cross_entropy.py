"""The head and its loss on a GPU: the kernel between two products, and plain torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perilune.bench.operation import BYTES_PER_MS, FLOPS_PER_MS, Inputs, Operation, Shape
from perilune.ops import linear_cross_entropy
from perilune.ops.cross_entropy import IGNORED
from perilune.ops.cross_entropy.api import BACKENDS


@dataclass(frozen=True)
class Head(Shape):
    """M rows of width D, V words; every tenth row without a target."""

    M: int
    D: int
    V: int

    def __str__(self) -> str:
        return f"{self.M} x {self.D} x {self.V}"

    @property
    def forward_ms(self) -> float:
        """A product; logits written and read."""
        return 2 * self.M * self.D * self.V / FLOPS_PER_MS + 4 * self.M * self.V / BYTES_PER_MS

    @property
    def both_ms(self) -> float:
        """Three products; logits written, read and overwritten."""
        return 6 * self.M * self.D * self.V / FLOPS_PER_MS + 6 * self.M * self.V / BYTES_PER_MS

    def targets(self, device: torch.device) -> Tensor:
        targets = torch.arange(self.M, device=device) * 7919 % self.V
        targets[::10] = IGNORED
        return targets

    def make(self, device: torch.device) -> Inputs:
        torch.manual_seed(0)
        h = torch.randn(self.M, self.D, device=device).bfloat16()
        weight = torch.randn(self.V, self.D, device=device).mul_(self.D**-0.5).bfloat16()
        targets = self.targets(device)

        def op(h: Tensor, weight: Tensor, *, backend: str) -> Tensor:
            return linear_cross_entropy(h, weight, targets, backend=backend)

        return Inputs([h.requires_grad_(), weight.requires_grad_()], op, None)


class Comparison(Operation):
    allowed: ClassVar[Mapping[str, float]] = {"loss": 1e-4, "dh": 6e-3, "dweight": 6e-3}

    def reasons(self, inputs: Inputs) -> Mapping[str, str]:
        h, weight = inputs.leaves
        return BACKENDS.choice(h, weight, h.new_zeros(len(h), dtype=torch.int64), IGNORED)[1]


CASE = Comparison(
    name="cross_entropy",
    title="head and loss, bf16",
    shapes=(Head(32768, 1024, 32768), Head(32768, 1024, 65536)),
    checked=(Head(300, 256, 5000), Head(129, 64, 50257)),
    contenders={"perilune": "triton", "plain torch": "chunked"},
)

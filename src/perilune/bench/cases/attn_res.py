"""Attention residuals on a GPU: kernels, plain torch, and the equation under `torch.compile`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from perilune.bench.operation import BYTES_PER_MS, Inputs, Operation, Shape
from perilune.ops import attn_res
from perilune.ops.attn_res import reference
from perilune.ops.attn_res.api import BACKENDS

EPS = 1e-5
compiled = torch.compile(reference.attn_res, dynamic=False)


def mixture(query: Tensor, key_weight: Tensor, *sources: Tensor, backend: str) -> Tensor:
    if backend == "compiled":
        return compiled(query, sources, key_weight, EPS, None, EPS, sources[0].dtype)
    return attn_res(query, sources, key_weight, backend=backend)


@dataclass(frozen=True)
class Sources(Shape):
    """N sources of R rows of width D, bf16."""

    N: int
    R: int
    D: int

    def __str__(self) -> str:
        return f"{self.N} x {self.R} x {self.D}"

    @property
    def forward_ms(self) -> float:
        """The sources read, the mixture written, once each."""
        return (self.N + 1) * self.R * self.D * 2 / BYTES_PER_MS

    @property
    def both_ms(self) -> float:
        """And sources and the mixture's gradient read, gradients written."""
        return self.forward_ms + (2 * self.N + 1) * self.R * self.D * 2 / BYTES_PER_MS

    def make(self, device: torch.device) -> Inputs:
        """query, key_weight [D], N sources [R, D]; scores are about 1."""
        torch.manual_seed(0)
        normal = partial(torch.randn, device=device)
        vectors = normal(self.D).mul_(self.D**-0.5), normal(self.D).mul_(0.3).add_(1)
        *sources, slope = (normal(self.R, self.D, dtype=torch.bfloat16) for _ in range(self.N + 1))
        return Inputs([x.requires_grad_() for x in (*vectors, *sources)], mixture, slope)


class Comparison(Operation):
    # Of the norm; rounding a result to bf16 alone makes 1.7e-3
    allowed: ClassVar[Mapping[str, float]] = {"out": 3e-3, "dquery": 5e-3, "dkey_weight": 5e-3, "dsources": 3e-3}

    def reasons(self, inputs: Inputs) -> Mapping[str, str]:
        query, key_weight, *sources = inputs.leaves
        return BACKENDS.choice(query, sources, key_weight, EPS, None, EPS, sources[0].dtype)[1]


CASE = Comparison(
    name="attn_res",
    title="attention residuals, bf16",
    shapes=(Sources(9, 8192, 7168), Sources(9, 32768, 2048), Sources(2, 8192, 7168), Sources(16, 8192, 7168)),
    checked=(Sources(9, 300, 7168), Sources(5, 1000, 2048), Sources(2, 77, 1000)),
    contenders={"perilune": "triton", "chunked": "chunked", "torch.compile": "compiled"},
)

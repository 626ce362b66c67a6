"""The short convolution on a GPU: kernels, plain torch, and the equation under `torch.compile`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from perilune.bench.operation import BYTES_PER_MS, Inputs, Operation, Shape
from perilune.ops import short_conv
from perilune.ops.short_conv.api import BACKENDS

TAPS = 4


def equation(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Shifted rows, where they are of the same document; before: [T, 1], how many rows of it are."""
    wide, T = x.float(), x.shape[1]
    u = weight[:, -1] * wide
    for s in range(1, TAPS):
        u = u + weight[:, -1 - s] * torch.where(before >= s, pad(wide, (0, 0, s, 0))[:, :T], 0.0)
    return silu(u).to(x.dtype)


compiled = torch.compile(equation, dynamic=False)


@dataclass(frozen=True)
class Rows(Shape):
    """T rows of D channels, bf16, in N documents of unequal lengths."""

    T: int
    D: int
    N: int

    def __str__(self) -> str:
        return f"{self.T} x {self.D}, {self.N} documents"

    @property
    def forward_ms(self) -> float:
        """Rows read, result written, once each."""
        return 2 * self.T * self.D * 2 / BYTES_PER_MS

    @property
    def both_ms(self) -> float:
        """And rows and the result's gradient read, the rows' gradient written."""
        return self.forward_ms + 3 * self.T * self.D * 2 / BYTES_PER_MS

    @property
    def bounds(self) -> list[int]:
        """Of the documents, the n-th about n times as long as the first."""
        return [self.T * n * (n + 1) // (self.N * (self.N + 1)) for n in range(self.N + 1)]

    def make(self, device: torch.device) -> Inputs:
        """x [1, T, D], weight [D, TAPS] in float32."""
        torch.manual_seed(0)
        normal = partial(torch.randn, device=device)
        x, slope = (normal(1, self.T, self.D, dtype=torch.bfloat16) for _ in range(2))
        weight = normal(self.D, TAPS).mul_(TAPS**-0.5)
        return Inputs([x.requires_grad_(), weight.requires_grad_()], partial(packed, self.bounds), slope)


def packed(bounds: list[int], x: Tensor, weight: Tensor, *, backend: str) -> Tensor:
    if backend == "compiled":
        return compiled(x, weight, offsets(bounds, x.device))
    return short_conv(x, weight, cu_seqlens=bounds, backend=backend)[0]


def offsets(bounds: list[int], device: torch.device) -> Tensor:
    """[T, 1], how many rows of its document are before each."""
    return torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(bounds)]).unsqueeze(1)


class Comparison(Operation):
    # Of the norm; rounding a result to bf16 alone makes 1.7e-3, and the filter's gradient is float32
    allowed: ClassVar[Mapping[str, float]] = {"y": 3e-3, "dx": 3e-3, "dweight": 1e-4}

    def reasons(self, inputs: Inputs) -> Mapping[str, str]:
        x, weight = inputs.leaves
        return BACKENDS.choice(x, weight, None, [0, x.shape[1]], "silu", False)[1]


CASE = Comparison(
    name="short_conv",
    title="short convolution of 4 taps with SiLU, bf16, packed",
    shapes=(Rows(32768, 1024, 32), Rows(65536, 2048, 64), Rows(8192, 7168, 4)),
    checked=(Rows(3000, 1024, 9), Rows(777, 1000, 40)),
    contenders={"perilune": "triton", "chunked": "chunked", "torch.compile": "compiled"},
)

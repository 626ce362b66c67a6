"""The short convolution on a GPU: this library's kernels, its plain torch, and the equation under `torch.compile`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad, silu

from perilune.bench.case import DEVICE
from perilune.bench.contest import Contest, error, table_of
from perilune.bench.meter import Meter
from perilune.ops import short_conv
from perilune.ops.short_conv.api import BACKENDS

ALLOWED = {"y": 3e-3, "dx": 3e-3, "dweight": 1e-4}
"""Of the norm; rounding a result to bf16 alone makes 1.7e-3, and the filter's gradient is float32."""
BYTES_PER_MS = 4.3e9
"""What copies reach of an H200's memory."""
MIB = 2**20
TAPS = 4

Convolver = Callable[[Tensor, Tensor, list[int]], Tensor]


def ours(x: Tensor, weight: Tensor, cu: list[int], backend: str) -> Tensor:
    return short_conv(x, weight, cu_seqlens=cu, backend=backend)[0]


def equation(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Shifted rows, where they are of the same document; before: [T, 1], how many rows of it are."""
    wide, T = x.float(), x.shape[1]
    u = weight[:, -1] * wide
    for s in range(1, TAPS):
        u = u + weight[:, -1 - s] * torch.where(before >= s, pad(wide, (0, 0, s, 0))[:, :T], 0.0)
    return silu(u).to(x.dtype)


compiled = torch.compile(equation, dynamic=False)


def by_compiler(x: Tensor, weight: Tensor, cu: list[int]) -> Tensor:
    return compiled(x, weight, offsets(cu, x.device))


CONVOLVERS: dict[str, Convolver] = {
    "perilune": partial(ours, backend="triton"),
    "chunked": partial(ours, backend="chunked"),
    "torch.compile": by_compiler,
}


@dataclass(frozen=True)
class Shape:
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


@dataclass(frozen=True)
class Comparison(Contest):
    allowed: ClassVar[Mapping[str, float]] = ALLOWED
    name: str = "short_conv"
    title: str = "short convolution of 4 taps with SiLU, bf16, packed"
    shapes: Sequence[Shape] = (Shape(32768, 1024, 32), Shape(65536, 2048, 64), Shape(8192, 7168, 4))
    checked: Sequence[Shape] = (Shape(3000, 1024, 9), Shape(777, 1000, 40))
    contenders: dict[str, Convolver] = field(default_factory=lambda: dict(CONVOLVERS))
    device: torch.device = DEVICE
    meter: Meter = field(default_factory=Meter)

    def refused(self) -> str:
        x, weight, _, cu = make(self.checked[0], self.device)
        reason = BACKENDS.choice(x, weight, None, cu, "silu", False)[1].get("triton")
        return f"triton: {reason}" if reason else ""

    def errors(self, label: str) -> dict[str, float]:
        return check(self.contenders[label], self.checked, self.device)

    def time(self, shape: Shape, label: str) -> dict[str, Any]:
        """Medians of inference and of training, and what either holds beyond inputs at its peak."""
        tensors = make(shape, self.device)
        x, weight, _, cu = tensors
        forward = partial(self.contenders[label], x, weight, cu)
        both = partial(forward_backward, self.contenders[label], tensors)
        row: dict[str, Any] = asdict(shape) | {"label": label}
        for name, call, floor in (("forward", forward, shape.forward_ms), ("both", both, shape.both_ms)):
            with torch.set_grad_enabled(name == "both"):
                ms = self.meter.median_ms(call)
                held = self.meter.peak(call) - self.meter.held()
            row[name] = {"ms": ms, "floor_ms": floor, "ratio": ms / floor, "bytes": held}
        return row

    def times_table(self, times: Sequence[dict[str, Any]]) -> Table:
        heads = (f"{what} {unit}" for what in ("fwd", "f+b") for unit in ("ms", "floor", "ratio", "MiB"))
        table = table_of(f"{self.title}: medians; floor: bytes at {BYTES_PER_MS / 1e9:g} TB/s", "T x D", *heads)
        for row in times:
            cells: list[str] = []
            for x in (row["forward"], row["both"]):
                cells += [f"{x['ms']:.3f}", f"{x['floor_ms']:.3f}", f"{x['ratio']:.2f}", f"{x['bytes'] / MIB:,.0f}"]
            table.add_row(f"{row['T']} x {row['D']}, {row['label']}", *cells)
        return table


def documents(shape: Shape) -> list[int]:
    """Boundaries of N documents, the n-th about n times as long as the first."""
    total = shape.N * (shape.N + 1)
    return [shape.T * n * (n + 1) // total for n in range(shape.N + 1)]


def offsets(cu: list[int], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(cu)]).unsqueeze(1)


def make(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """x [1, T, D], weight [D, 4] in float32, dL/dy, boundaries.  The same at every call."""
    torch.manual_seed(0)
    normal = partial(torch.randn, device=device)
    x, dy = (normal(1, shape.T, shape.D, dtype=torch.bfloat16) for _ in range(2))
    weight = normal(shape.D, TAPS).mul_(TAPS**-0.5)
    return x.requires_grad_(), weight.requires_grad_(), dy, documents(shape)


def forward_backward(convolver: Convolver, tensors: tuple[Tensor, Tensor, Tensor, list[int]]) -> tuple[Tensor, ...]:
    """The result and all gradients."""
    x, weight, dy, cu = tensors
    y = convolver(x, weight, cu)
    return y.detach(), *torch.autograd.grad(y, [x, weight], dy)


def check(convolver: Convolver, shapes: Sequence[Shape], device: torch.device) -> dict[str, float]:
    """The largest relative errors against the reference in float64, by name; infinite for NaN."""
    errors = dict.fromkeys(ALLOWED, 0.0)
    for shape in shapes:
        x, weight, dy, cu = make(shape, device)
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        expected = forward_backward(partial(ours, backend="reference"), (wide[0], wide[1], dy.double(), cu))
        got = forward_backward(convolver, (x, weight, dy, cu))
        for name, result, exact in zip(ALLOWED, got, expected):
            errors[name] = max(errors[name], error(result, exact))
    return errors

"""The routed experts on a GPU: this library's kernels against the same layer composed of torch's grouped products."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from rich.table import Table
from torch import Tensor

from perilune.bench.case import DEVICE
from perilune.bench.contest import Contest, error, table_of
from perilune.bench.meter import Meter
from perilune.ops import grouped_experts
from perilune.ops.grouped_experts.api import BACKENDS

ALLOWED = {"out": 6e-3, "dx": 7e-3, "dw_gate": 7e-3, "dw_up": 7e-3, "dw_down": 7e-3, "dweights": 7e-3}
"""Of the norm; rounding a result to bf16 alone makes 1.7e-3."""
CONTENDERS = {"perilune": "gluon", "torch grouped_mm": "chunked"}
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """M tokens of width D, each through top_k of E experts of width F."""

    E: int
    M: int
    top_k: int
    D: int
    F: int

    def __str__(self) -> str:
        return f"{self.E} experts"

    @property
    def flops(self) -> int:
        """Of the three products of the forward; a backward has twice as many."""
        return 6 * self.M * self.top_k * self.D * self.F


@dataclass(frozen=True)
class Comparison(Contest):
    allowed: ClassVar[Mapping[str, float]] = ALLOWED
    name: str = "experts"
    title: str = "routed experts, bf16"
    shapes: Sequence[Shape] = (Shape(896, 8192, 16, 1024, 1024), Shape(128, 8192, 16, 1024, 1024))
    checked: Sequence[Shape] = (Shape(40, 300, 3, 256, 384), Shape(4, 1000, 1, 128, 256))
    contenders: dict[str, str] = field(default_factory=lambda: dict(CONTENDERS))
    """Backends by label."""
    device: torch.device = DEVICE
    meter: Meter = field(default_factory=Meter)

    def refused(self) -> str:
        arguments = make(self.checked[0], self.device)[:-1]
        reasons = BACKENDS.choice(*arguments)[1]
        return next((f"{x}: {reasons[x]}" for x in self.contenders.values() if reasons.get(x)), "")

    def errors(self, label: str) -> dict[str, float]:
        return check(self.contenders[label], self.checked, self.device)

    def time(self, shape: Shape, label: str) -> dict[str, Any]:
        """Medians of inference and of training, and what either holds beyond inputs at its peak."""
        tensors = make(shape, self.device)
        forward = partial(grouped_experts, *tensors[:-1], backend=self.contenders[label])
        both = partial(forward_backward, self.contenders[label], tensors)
        row: dict[str, Any] = asdict(shape) | {"label": label}
        for name, call, flops in (("forward", forward, shape.flops), ("both", both, 3 * shape.flops)):
            with torch.set_grad_enabled(name == "both"):
                ms = self.meter.median_ms(call)
                row[name] = {"ms": ms, "tflops": flops / ms / 1e9, "bytes": self.meter.peak(call) - self.meter.held()}
        return row

    def times_table(self, times: Sequence[dict[str, Any]]) -> Table:
        heads = (f"{what} {unit}" for what in ("fwd", "f+b") for unit in ("ms", "TFLOP/s", "MiB"))
        table = table_of(f"{self.title}: medians; memory beyond the inputs", "experts x rows", *heads)
        for row in times:
            figures = (row[what] for what in ("forward", "both"))
            cells = [(f"{x['ms']:.2f}", f"{x['tflops']:.0f}", f"{x['bytes'] / MIB:,.0f}") for x in figures]
            table.add_row(f"{row['E']} x {row['M'] * row['top_k']}, {row['label']}", *cells[0], *cells[1])
        return table


def make(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """x, w_gate, w_up, w_down, ids, weights of a random router; and dL/dy.  The same at every call."""
    torch.manual_seed(0)
    E, M, D, F = shape.E, shape.M, shape.D, shape.F
    normal = partial(torch.randn, dtype=torch.bfloat16, device=device)
    matrices = [normal(E, *sides).mul_(sides[1] ** -0.5) for sides in ((F, D), (F, D), (D, F))]
    weights, ids = torch.rand(M, E, device=device).topk(shape.top_k)
    weights = (weights / weights.sum(-1, keepdim=True)).requires_grad_()
    leaves = (x.requires_grad_() for x in (normal(M, D), *matrices))
    return *leaves, ids, weights, normal(M, D)


def forward_backward(backend: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of everything that has one."""
    *arguments, dy = tensors
    y = grouped_experts(*arguments, backend=backend)
    return y.detach(), *torch.autograd.grad(y, [x for x in arguments if x.requires_grad], dy)


def check(backend: str, shapes: Sequence[Shape], device: torch.device) -> dict[str, float]:
    """The largest relative errors against the loop over experts in float64, by name; infinite for NaN."""
    errors = dict.fromkeys(ALLOWED, 0.0)
    for shape in shapes:
        tensors = make(shape, device)
        wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in tensors]
        expected = forward_backward("reference", wide)
        for name, x, exact in zip(ALLOWED, forward_backward(backend, tensors), expected):
            errors[name] = max(errors[name], error(x, exact))
    return errors

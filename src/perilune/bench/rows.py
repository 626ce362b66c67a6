"""Norms and gated units on a GPU: this library's kernels, plain torch, and the equation under `torch.compile`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from rich.table import Table
from torch import Tensor

from perilune.bench.case import DEVICE
from perilune.bench.contest import Contest, error, table_of
from perilune.bench.meter import Meter
from perilune.core.backends import Backends

ALLOWED = {"out": 5e-3, "gradients": 8e-3}
"""Of the norm; rounding a result to bf16 alone makes 1.7e-3, and plain torch rounds several times."""
BYTES_PER_MS = 4.3e9
"""What copies reach of an H200's memory."""
MIB = 2**20

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Operation:
    """A function of tensors [R, D] in bf16 and of vectors [D] in float32; the result is [R, D] in bf16."""

    backends: Backends
    rest: tuple[Any, ...]
    """Arguments behind the tensors."""
    inputs: str
    """A letter a tensor: r for rows, v for a vector."""
    plain: str
    """The backend of plain torch."""

    def call(self, name: str) -> Call:
        """One way to compute it: "perilune", "plain" or "torch.compile"."""
        if name == "torch.compile":
            compiled = torch.compile(self.backends.pick("reference", *self.usual()), dynamic=False)
            return lambda *tensors: compiled(*tensors, *self.rest)
        backend = {"perilune": "triton", "plain": self.plain}.get(name, name)
        return lambda *tensors: self.backends.pick(backend, *tensors, *self.rest)(*tensors, *self.rest)

    def usual(self, device: torch.device = DEVICE) -> tuple[Any, ...]:
        return *self.make(Shape("", 2, 16), device)[0], *self.rest

    def make(self, shape: "Shape", device: torch.device) -> tuple[list[Tensor], Tensor]:
        """The tensors, and the result's gradient.  The same at every call."""
        torch.manual_seed(0)
        R, D = shape.R, shape.D
        tensors = [
            torch.randn(R, D, dtype=torch.bfloat16, device=device)
            if kind == "r"
            else torch.randn(D, device=device).mul_(0.3).add_(1)
            for kind in self.inputs
        ]
        return [x.requires_grad_() for x in tensors], torch.randn(R, D, dtype=torch.bfloat16, device=device)


@dataclass(frozen=True)
class Shape:
    """R rows of width D, bf16, through the operation of this name."""

    op: str
    R: int
    D: int

    def __str__(self) -> str:
        return f"{self.op}, {self.R} x {self.D}"


@dataclass(frozen=True)
class Comparison(Contest):
    """Of several operations, each at shapes of its own."""

    allowed: ClassVar[Mapping[str, float]] = ALLOWED
    name: str
    title: str
    operations: Mapping[str, Operation]
    shapes: Sequence[Shape]
    checked: Sequence[Shape]
    contenders: Sequence[str] = ("perilune", "plain", "torch.compile")
    device: torch.device = DEVICE
    meter: Meter = field(default_factory=Meter)

    def refused(self) -> str:
        operation = next(iter(self.operations.values()))
        reason = operation.backends.choice(*operation.usual(self.device))[1].get("triton")
        return f"triton: {reason}" if reason else ""

    def errors(self, label: str) -> dict[str, float]:
        """Against the equation in float64; infinite for NaN."""
        errors = dict.fromkeys(ALLOWED, 0.0)
        for shape in self.checked:
            operation = self.operations[shape.op]
            tensors, dy = operation.make(shape, self.device)
            wide = [x.detach().double().requires_grad_() for x in tensors]
            exact = forward_backward(operation.call("reference"), wide, dy.double())
            got = forward_backward(operation.call(label), tensors, dy)
            for i, (x, y) in enumerate(zip(got, exact)):
                name = "gradients" if i else "out"
                errors[name] = max(errors[name], error(x, y))
        return errors

    def time(self, shape: Shape, label: str) -> dict[str, Any]:
        """Medians of inference and of training, and what either holds beyond inputs at its peak.

        Floors: rows read and written once; for training those, then rows and the result's gradient read, gradients
        written.
        """
        operation = self.operations[shape.op]
        tensors, dy = operation.make(shape, self.device)
        call, rows = operation.call(label), operation.inputs.count("r")
        forward = partial(call, *tensors)
        both = partial(forward_backward, call, tensors, dy)
        one = shape.R * shape.D * 2 / BYTES_PER_MS
        row: dict[str, Any] = asdict(shape) | {"label": label}
        for name, run, floor in (("forward", forward, rows + 1), ("both", both, 3 * rows + 2)):
            with torch.set_grad_enabled(name == "both"):
                ms = self.meter.median_ms(run)
                held = self.meter.peak(run) - self.meter.held()
            row[name] = {"ms": ms, "floor_ms": floor * one, "ratio": ms / (floor * one), "bytes": held}
        return row

    def times_table(self, times: Sequence[dict[str, Any]]) -> Table:
        heads = (f"{what} {unit}" for what in ("fwd", "f+b") for unit in ("ms", "floor", "ratio", "MiB"))
        table = table_of(f"{self.title}: medians; floor: bytes at {BYTES_PER_MS / 1e9:g} TB/s", "rows x width", *heads)
        for row in times:
            cells: list[str] = []
            for x in (row["forward"], row["both"]):
                cells += [f"{x['ms']:.3f}", f"{x['floor_ms']:.3f}", f"{x['ratio']:.2f}", f"{x['bytes'] / MIB:,.0f}"]
            table.add_row(f"{row['op']}, {row['R']} x {row['D']}, {row['label']}", *cells)
        return table


def forward_backward(call: Call, tensors: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """The result and all gradients."""
    y = call(*tensors)
    return y.detach(), *torch.autograd.grad(y, tensors, dy)

"""An operation's backends on a GPU, against its reference in float64 and against what its work must take."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from perilune.bench.case import DEVICE
from perilune.bench.contest import Contest, error, table_of
from perilune.bench.meter import Meter

BYTES_PER_MS = 4.3e9
"""What copies reach of an H200's memory."""
FLOPS_PER_MS = 989e9
"""An H200's tensor cores, dense bfloat16, as specified."""
MIB = 2**20


class Inputs(NamedTuple):
    leaves: list[Tensor]
    """What has a gradient."""
    op: Callable[..., Tensor]
    """The operation on the leaves, with a `backend`."""
    slope: Tensor | None
    """The gradient of its result; None for 1."""


class Shape(ABC):
    """Inputs of one size, and the least that a GPU needs for them."""

    @property
    @abstractmethod
    def forward_ms(self) -> float: ...

    @property
    @abstractmethod
    def both_ms(self) -> float: ...

    @abstractmethod
    def make(self, device: torch.device) -> Inputs:
        """The same at every call."""


@dataclass(frozen=True)
class Operation(Contest):
    """allowed: by name, the result's relative error, then the leaves' gradients', the last name for all that are left.
    contenders: backends by label, or whatever else the inputs' `op` takes for one."""

    allowed: ClassVar[Mapping[str, float]]

    name: str
    title: str
    shapes: Sequence[Shape]
    checked: Sequence[Shape]
    contenders: Mapping[str, str]
    device: torch.device = DEVICE
    meter: Meter = field(default_factory=Meter)

    @abstractmethod
    def reasons(self, inputs: Inputs) -> Mapping[str, str]:
        """Why backends cannot serve a call with these inputs, by backend."""

    def refused(self) -> str:
        reasons = self.reasons(self.checked[0].make(self.device))
        return next((f"{x}: {reasons[x]}" for x in self.contenders.values() if x in reasons), "")

    def errors(self, label: str) -> dict[str, float]:
        errors = dict.fromkeys(self.allowed, 0.0)
        for shape in self.checked:
            leaves, op, slope = shape.make(self.device)
            wide = [x.detach().double().requires_grad_() for x in leaves]
            exact = forward_backward("reference", Inputs(wide, op, None if slope is None else slope.double()))
            got = forward_backward(self.contenders[label], Inputs(leaves, op, slope))
            names = chain(self.allowed, repeat(list(self.allowed)[-1]))
            for (x, y), name in zip(zip(got, exact, strict=True), names):
                errors[name] = max(errors[name], error(x, y))
        return errors

    def time(self, shape: Shape, label: str) -> dict[str, Any]:
        """Medians of inference and of training, and what either holds beyond inputs at its peak."""
        inputs, backend = shape.make(self.device), self.contenders[label]
        forward = partial(inputs.op, *inputs.leaves, backend=backend)
        both = partial(forward_backward, backend, inputs)
        row: dict[str, Any] = {"shape": str(shape), "label": label}
        for what, call, floor in (("forward", forward, shape.forward_ms), ("both", both, shape.both_ms)):
            with torch.set_grad_enabled(what == "both"):
                ms = self.meter.median_ms(call)
                held = self.meter.peak(call) - self.meter.held()
            row[what] = {"ms": ms, "floor_ms": floor, "ratio": ms / floor, "bytes": held}
        return row

    def times_table(self, times: Sequence[dict[str, Any]]) -> Table:
        heads = (f"{what} {unit}" for what in ("fwd", "f+b") for unit in ("ms", "floor", "ratio", "MiB"))
        rates = f"{FLOPS_PER_MS / 1e9:g} Tflop/s and {BYTES_PER_MS / 1e9:g} TB/s"
        table = table_of(f"{self.title}: medians; floor: at {rates}", "", *heads)
        for row in times:
            cells: list[str] = []
            for x in (row["forward"], row["both"]):
                cells += [f"{x['ms']:.3f}", f"{x['floor_ms']:.3f}", f"{x['ratio']:.2f}", f"{x['bytes'] / MIB:,.0f}"]
            table.add_row(f"{row['shape']}, {row['label']}", *cells)
        return table


def forward_backward(backend: str, inputs: Inputs) -> tuple[Tensor, ...]:
    """The result and all gradients."""
    y = inputs.op(*inputs.leaves, backend=backend)
    return y.detach(), *torch.autograd.grad(y, inputs.leaves, inputs.slope)

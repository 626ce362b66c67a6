"""Attention residuals on a GPU: this library's kernels, its plain torch, and the equation under `torch.compile`."""

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
from perilune.ops import attn_res
from perilune.ops.attn_res import reference
from perilune.ops.attn_res.api import BACKENDS

ALLOWED = {"out": 3e-3, "dquery": 5e-3, "dkey_weight": 5e-3, "dsources": 3e-3}
"""Of the norm; rounding a result to bf16 alone makes 1.7e-3."""
BYTES_PER_MS = 4.3e9
"""What copies reach of an H200's memory."""
MIB = 2**20
EPS = 1e-5

Mixer = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]
compiled = torch.compile(reference.attn_res, dynamic=False)
MIXERS: dict[str, Mixer] = {
    "perilune": partial(attn_res, backend="triton"),
    "chunked": partial(attn_res, backend="chunked"),
    "torch.compile": lambda query, sources, key_weight: compiled(
        query, sources, key_weight, EPS, None, EPS, sources[0].dtype
    ),
}


@dataclass(frozen=True)
class Shape:
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


@dataclass(frozen=True)
class Comparison(Contest):
    allowed: ClassVar[Mapping[str, float]] = ALLOWED
    name: str = "attn_res"
    title: str = "attention residuals, bf16"
    shapes: Sequence[Shape] = (Shape(9, 8192, 7168), Shape(9, 32768, 2048), Shape(2, 8192, 7168), Shape(16, 8192, 7168))
    checked: Sequence[Shape] = (Shape(9, 300, 7168), Shape(5, 1000, 2048), Shape(2, 77, 1000))
    contenders: dict[str, Mixer] = field(default_factory=lambda: dict(MIXERS))
    device: torch.device = DEVICE
    meter: Meter = field(default_factory=Meter)

    def refused(self) -> str:
        query, key_weight, sources, _ = make(self.checked[0], self.device)
        reason = BACKENDS.choice(query, sources, key_weight, EPS, None, EPS, torch.bfloat16)[1].get("triton")
        return f"triton: {reason}" if reason else ""

    def errors(self, label: str) -> dict[str, float]:
        return check(self.contenders[label], self.checked, self.device)

    def time(self, shape: Shape, label: str) -> dict[str, Any]:
        """Medians of inference and of training, and what either holds beyond inputs at its peak."""
        tensors = make(shape, self.device)
        forward = partial(self.contenders[label], tensors[0], tensors[2], tensors[1])
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
        table = table_of(f"{self.title}: medians; floor: bytes at {BYTES_PER_MS / 1e9:g} TB/s", "N x R x D", *heads)
        for row in times:
            cells: list[str] = []
            for x in (row["forward"], row["both"]):
                cells += [f"{x['ms']:.3f}", f"{x['floor_ms']:.3f}", f"{x['ratio']:.2f}", f"{x['bytes'] / MIB:,.0f}"]
            table.add_row(f"{row['N']} x {row['R']} x {row['D']}, {row['label']}", *cells)
        return table


def make(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """query, key_weight [D], N sources [R, D], and dL/dh.  The same at every call; scores are about 1."""
    torch.manual_seed(0)
    N, R, D = shape.N, shape.R, shape.D
    normal = partial(torch.randn, device=device)
    query, key_weight = normal(D).mul_(D**-0.5), normal(D).mul_(0.3).add_(1)
    sources = [normal(R, D, dtype=torch.bfloat16).requires_grad_() for _ in range(N)]
    return query.requires_grad_(), key_weight.requires_grad_(), sources, normal(R, D, dtype=torch.bfloat16)


def forward_backward(mixer: Mixer, tensors: tuple[Tensor, Tensor, list[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """The mixture and all gradients."""
    query, key_weight, sources, dout = tensors
    out = mixer(query, sources, key_weight)
    return out.detach(), *torch.autograd.grad(out, [query, key_weight, *sources], dout)


def check(mixer: Mixer, shapes: Sequence[Shape], device: torch.device) -> dict[str, float]:
    """The largest relative errors against the equation in float64, by name; infinite for NaN."""
    errors = dict.fromkeys(ALLOWED, 0.0)
    for shape in shapes:
        query, key_weight, sources, dout = make(shape, device)
        wide = [x.detach().double().requires_grad_() for x in (query, key_weight, *sources)]
        expected = forward_backward(partial(attn_res, backend="reference"), (wide[0], wide[1], wide[2:], dout.double()))
        got = forward_backward(mixer, (query, key_weight, sources, dout))
        for i, (x, exact) in enumerate(zip(got, expected)):
            name = list(ALLOWED)[min(i, 3)]
            errors[name] = max(errors[name], error(x, exact))
    return errors

"""The kernels as functions of rows: how many at a time, and by how many programs."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from perilune.ops.fused import processors
from perilune.ops.rms_norm.kernels import norm_grads_kernel, norm_kernel

TILE = 2048  # elements at a time, at least
EACH = 16  # of them to a thread
RESIDENT = 4  # programs of the backward pass on a processor, of TILE elements


class Plan:
    """How rows of D elements are spread: `rows` of them, `width` wide, to a program of so many warps."""

    def __init__(self, R: int, D: int) -> None:
        self.width = triton.next_power_of_2(D)
        self.rows = max(1, TILE // self.width)
        self.warps = min(8, max(4, self.rows * self.width // (32 * EACH)))
        self.programs = triton.cdiv(R, self.rows)


def normalize(x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """The norm of x [R, D], behind sigmoid(gate) [R, D] if there is one; elements of a row side by side."""
    R, D = x.shape
    out = torch.empty(R, D, dtype=dtype, device=x.device)
    plan = Plan(R, D)
    if R:
        norm_kernel[(plan.programs,)](
            x, x.stride(0), weight, gate, 0 if gate is None else gate.stride(0), out, R, eps,
            D=D, ROWS=plan.rows, WIDTH=plan.width, num_warps=plan.warps,
        )  # fmt: skip
    return out


def gradients(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, dy: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of x and gate [R, D], in their dtypes, and of weight [D] in float32, as far as they are wanted.

    The weight's is summed over rows in an order of its own, which shapes and the device alone decide.
    """
    R, D = x.shape
    plan = Plan(R, D)
    programs = min(plan.programs, max(1, RESIDENT * 4 // plan.warps) * processors(x.device))
    dx = torch.empty(R, D, dtype=x.dtype, device=x.device) if wanted[0] else None
    dweight = torch.empty(programs, D, dtype=torch.float32, device=x.device) if wanted[1] else None
    dgate = torch.empty(R, D, dtype=gate.dtype, device=x.device) if gate is not None and wanted[2] else None
    if R:
        norm_grads_kernel[(programs,)](
            x, x.stride(0), weight, gate, 0 if gate is None else gate.stride(0), dy, dy.stride(0),
            dx, dgate, dweight, R, eps,
            D=D, ROWS=plan.rows, WIDTH=plan.width, num_warps=plan.warps,
        )  # fmt: skip
    return dx, None if dweight is None else dweight.sum(0), dgate

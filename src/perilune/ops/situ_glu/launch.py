"""The kernels as functions of rows [R, C] whose elements stand side by side."""

import torch
import triton
from torch import Tensor

from perilune.ops.situ_glu.kernels import glu_grads_kernel, glu_kernel

TILE = 2048  # elements of a program
WARPS = 4


class Plan:
    """How R rows of C elements are spread over programs; rows that follow one another count as one."""

    def __init__(self, *tensors: Tensor) -> None:
        R, C = tensors[0].shape
        if all(x.is_contiguous() for x in tensors):
            R, C = 1, R * C
        self.size = R, C
        self.width = min(TILE, triton.next_power_of_2(C))
        self.rows = TILE // self.width if R > 1 else 1
        self.tiles = triton.cdiv(C, self.width)
        self.programs = self.tiles * triton.cdiv(R, self.rows)


def glu(gate: Tensor, up: Tensor, unit: str, beta_gate: float, beta_up: float) -> Tensor:
    """The unit, of `situ`, `swiglu` and `sigmoid`."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        plan = Plan(gate, up)
        glu_kernel[(plan.programs,)](
            gate, gate.stride(0), up, up.stride(0), out, *plan.size, plan.tiles, beta_gate, beta_up,
            UNIT=unit, ROWS=plan.rows, WIDTH=plan.width, num_warps=WARPS,
        )  # fmt: skip
    return out


def glu_gradients(
    gate: Tensor, up: Tensor, dy: Tensor, unit: str, beta_gate: float, beta_up: float
) -> tuple[Tensor, Tensor]:
    """Those of gate and up."""
    dgate, dup = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    if dy.numel():
        plan = Plan(gate, up, dy)
        glu_grads_kernel[(plan.programs,)](
            gate, gate.stride(0), up, up.stride(0), dy, dy.stride(0), dgate, dup, *plan.size, plan.tiles,
            beta_gate, beta_up,
            UNIT=unit, ROWS=plan.rows, WIDTH=plan.width, num_warps=WARPS,
        )  # fmt: skip
    return dgate, dup

"""Muon's passes over memory on a GPU: 24 bytes a parameter in two kernels, 48 in torch's five.

They are imported when they are first needed.
"""

import torch
from torch import Tensor

from perilune.ops.fused import INTERPRETED, TRITON

BLOCK = 2048  # numbers a program


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels can: float32 side by side in memory, in the same order.

    What lies otherwise, tall matrices among them, is moved by torch's operations; results differ by rounding alone.
    """
    return TRITON and all(
        (x.is_cuda or INTERPRETED) and x.dtype == torch.float32 and x.is_contiguous() for x in tensors
    )


def directions_(momentum: Tensor, grad: Tensor, into: Tensor, mu: float, nesterov: bool) -> None:
    """M <- mu M + G, and G + mu M, or M, rounded to what is given for it."""
    from perilune.optim.kernels import direction_kernel

    assert into.is_contiguous()
    if count := momentum.numel():
        direction_kernel[(-(-count // BLOCK),)](
            momentum, grad, into, count, float(mu), NESTEROV=nesterov, BLOCK=BLOCK, num_warps=4
        )


def descend_(weight: Tensor, update: Tensor, keep: float, rate: float) -> None:
    """W <- keep W - rate U, of an update of any dtype."""
    from perilune.optim.kernels import descend_kernel

    assert update.is_contiguous()
    if count := weight.numel():
        descend_kernel[(-(-count // BLOCK),)](weight, update, count, float(keep), float(rate), BLOCK=BLOCK, num_warps=4)

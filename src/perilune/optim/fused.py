"""Muon's passes over memory on a GPU: 24 bytes a parameter in two kernels, 48 in torch's five, and many tensors in one
launch.

They are imported when they are first needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from perilune.ops.fused import INTERPRETED, TRITON

BLOCK = 2048  # numbers a program
MOST = 16  # tensors a launch


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels can: float32 side by side in memory, in the same order.

    What lies otherwise is moved by torch's operations; results differ by rounding alone.
    """
    return TRITON and all(
        (x.is_cuda or INTERPRETED) and x.dtype == torch.float32 and x.is_contiguous() for x in tensors
    )


def directions_(momenta: Sequence[Tensor], grads: Sequence[Tensor], into: Tensor, mu: float, nesterov: bool) -> None:
    """M <- mu M + G, and G + mu M, or M, of every tensor, rounded to what is given for all of them, one behind the
    other.  Tensors have as many numbers each."""
    from perilune.optim.kernels import direction_kernel

    assert into.is_contiguous()
    count = momenta[0].numel()
    for start in range(0, len(momenta) if count else 0, MOST):
        some, beside = momenta[start : start + MOST], grads[start : start + MOST]
        with torch.cuda.device_of(into):  # kernels are launched on the current device
            direction_kernel[(len(some) * -(-count // BLOCK),)](
                filled(some), filled(beside), into.view(len(momenta), count)[start:], count, float(mu),
                N=length(some), NESTEROV=nesterov, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    increment_version(momenta)  # torch does not see what kernels write


def descend_(weights: Sequence[Tensor], updates: Tensor, keep: float, rate: float) -> None:
    """W <- keep W - rate U, of tensors of as many numbers each, and of updates of any dtype, one behind the other."""
    from perilune.optim.kernels import descend_kernel

    assert updates.is_contiguous()
    count = weights[0].numel()
    for start in range(0, len(weights) if count else 0, MOST):
        some = weights[start : start + MOST]
        with torch.cuda.device_of(updates):
            descend_kernel[(len(some) * -(-count // BLOCK),)](
                filled(some), updates.view(len(weights), count)[start:], count, float(keep), float(rate),
                N=length(some), BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    increment_version(weights)


def length(tensors: Sequence[Tensor]) -> int:
    """A power of two, at least as many: so that few forms of a kernel serve any number."""
    return 1 << (len(tensors) - 1).bit_length()


def filled(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """With the last one again up to `length`; nothing is done to those."""
    return (*tensors, *[tensors[-1]] * (length(tensors) - len(tensors)))

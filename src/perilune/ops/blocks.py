"""Row blocks: elementwise work on a large tensor, a few rows at a time.

An operation of several steps that runs block by block keeps its float32 intermediates in the processor's cache and
never holds them for the whole tensor.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

FEW = 2**15  # elements
CPU_BLOCK = 2**18  # elements: 1 MiB of float32, of the order of a core's own cache
DEVICE_BLOCK = 2**26  # elements: enough to fill any accelerator


def as_rows(x: Tensor) -> Tensor:
    """[..., D] as [R, D], a view where the strides allow it."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def row_blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    """The bounds (first, past last) of blocks that cover the rows of x [R, D], in order."""
    R, D = x.shape
    elements = CPU_BLOCK if x.device.type == "cpu" else DEVICE_BLOCK
    step = max(1, elements // max(1, D))
    return ((first, min(first + step, R)) for first in range(0, R, step))


def only_few(x: Tensor) -> bool:
    """Whether x is so small, and autograd off, that the plain equation beats blocks: the tokens of a decoding step."""
    return not torch.is_grad_enabled() and x.numel() <= FEW

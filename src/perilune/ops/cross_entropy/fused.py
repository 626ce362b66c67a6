"""Logits a block of rows at a time, by the device's own products; one kernel makes a block's loss and its gradient.

The gradient takes the place of the logits (`kernels.py`), and goes at once into dh and dW, as in `chunked.py`.  Beside
dh and dW, the latter in float32 until it is whole, a call holds one block: LOGITS_BYTES, however large the batch.
"""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.first_order import first_order
from perilune.ops.fused import DTYPES, out_of_reach
from perilune.ops.products import add_product_, not_wide

LOGITS_BYTES = 2**28  # of a block: 4,096 rows of 32,768 16-bit logits, where a product's sums outweigh its traffic
TILE = 128  # rows: what a product works on at a time
PITCH = 16  # logits: rows begin at multiples, as wide loads need
MOST_LANES = 512  # of the kernel, 64 to a warp
SIDE = 8  # logits that a lane takes at a time: 16 bytes of 16-bit ones


@torch.compiler.disable  # a compiled function calls the kernel as it is, between its graphs
def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """See the public function."""
    with torch.cuda.device_of(h):  # kernels are launched on the current device
        return _LinearCrossEntropy.apply(h, weight, targets, ignored, torch.is_grad_enabled())


def refuses(h: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> str | None:
    """Why the kernel cannot serve a call, or None."""
    if (reason := out_of_reach(h)) is not None:
        return reason
    if h.dtype not in DTYPES or weight.dtype != h.dtype:
        return f"it serves one dtype of 16 or 32 bits, and h and weight are {h.dtype} and {weight.dtype}"
    if any(x.device != h.device for x in (weight, targets)):
        return "the tensors are on more than one device"
    if not len(weight):
        return "there is no vocabulary"
    return not_wide()


def rows_of_block(M: int, row_bytes: int) -> int:
    """Rows of a block, full tiles as a rule: M rows in as few blocks as fit, all about alike."""
    most = max(TILE, LOGITS_BYTES // row_bytes // TILE * TILE)
    blocks = max(1, -(-M // most))
    return max(1, -(-M // (blocks * TILE))) * TILE


class _LinearCrossEntropy(torch.autograd.Function):
    """h [M, D], weight [V, D], targets [M] -> the sum of the losses.  Keeps dh and dW."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, ignored: int, learning: bool) -> Tensor:
        from perilune.ops.cross_entropy.kernels import loss_kernel

        (M, D), V = h.shape, len(weight)
        absent = targets == ignored
        torch._assert_async(  # on a GPU without waiting for it
            (absent | ((targets >= 0) & (targets < V))).all(),
            f"targets: expected 0 to {V - 1}, or {ignored}, got another; look at how they were made",
        )
        dh = h.new_empty(M, D) if learning and ctx.needs_input_grad[0] else None
        dw = weight.new_zeros(V, D, dtype=torch.float32) if learning and ctx.needs_input_grad[1] else None
        writes = dh is not None or dw is not None
        losses = h.new_empty(M, dtype=torch.float32)
        targets = targets.contiguous()
        pitch = -(-V // PITCH) * PITCH
        lanes = min(MOST_LANES, 1 << (-(-V // SIDE) - 1).bit_length())
        size = rows_of_block(M, pitch * h.element_size())
        room = h.new_empty(min(size, M), pitch)  # of all blocks, one after the other
        for start in range(0, M, size):
            rows = slice(start, start + size)
            x = h[rows].masked_fill(absent[rows, None], 0)  # it may hold no numbers
            z = room[: len(x), :V]
            torch.mm(x, weight.T, out=z)
            loss_kernel[(len(x),)](
                z, pitch, targets[rows], losses[rows], V, ignored,
                WRITE=writes, LANES=lanes, SIDE=SIDE, num_warps=max(1, lanes // 64),
            )  # fmt: skip
            if dh is not None:
                torch.mm(z, weight, out=dh[rows])
            if dw is not None:
                add_product_(dw, z.T, x)
        ctx.save_for_backward(dh, None if dw is None else dw.to(weight.dtype))
        return losses.sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        return *(None if g is None else g * grad.to(g.dtype) for g in (dh, dw)), None, None, None

"""A row's loss, and its gradient where the logits stood: two passes, the second from the second-level cache."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher

LOWEST = tl.constexpr(-3.0e38)  # of logits; finite, so that its distance to itself is 0


@Launcher
@triton.jit
def loss_kernel(
    logits, stride, targets, losses, V, ignored, WRITE: tl.constexpr, LANES: tl.constexpr, SIDE: tl.constexpr
):
    """losses [R] of logits [R, V], rows `stride` apart, a multiple of 16; with WRITE logits become their gradient.

        loss = log sum_j exp z_j - z_y,   dz_j = exp(z_j - log sum_i exp z_i) - [j = y]       0 where y is `ignored`

    A program takes a row.  Each of LANES goes through it SIDE logits at a time and rescales its sum where a larger one
    comes.  What lies between V and the stride is read, does not count, and may be overwritten.
    """
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * stride
    y = tl.load(targets + row)
    first = tl.arange(0, LANES)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    loss = 0.0
    if y == ignored:
        if WRITE:
            for start in range(0, V, LANES * SIDE):
                column = start + first
                zeros = tl.zeros([LANES, SIDE], logits.dtype.element_ty)
                tl.store(z + column, zeros, mask=column < stride)
    else:
        chosen = tl.load(z + y).to(tl.float32)
        top = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        for start in range(0, V, LANES * SIDE):
            column = start + first
            x = tl.load(z + column, mask=column < stride, other=0.0).to(tl.float32)
            x = tl.where(column < V, x, float("-inf"))
            higher = tl.maximum(top, tl.max(x, 1))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
            top = higher
        highest = tl.max(top, 0)  # threads wait for each other here: all have read z_y before any overwrites it
        norm = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
        loss = norm - chosen
        if WRITE:
            for start in range(0, V, LANES * SIDE):
                column = start + first
                x = tl.load(z + column, mask=column < stride, other=0.0).to(tl.float32)
                slope = tl.exp(x - norm) - tl.where(column == y, 1.0, 0.0)
                tl.store(z + column, slope.to(logits.dtype.element_ty), mask=column < stride)
    tl.store(losses + row, loss)

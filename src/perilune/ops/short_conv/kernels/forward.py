"""The convolution in one reading of the rows."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher
from perilune.ops.short_conv.kernels.rows import convolve, load_offsets, load_rows, load_taps, windows


@Launcher
@triton.jit(do_not_specialize=["T", "length", "chunks"])
def conv_kernel(
    x, weight, state, number, before, y, T, length, chunks, x_batch, x_row,
    D: tl.constexpr, W: tl.constexpr, ACTIVATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y [B, T, D] of x [B, T, D], whose sequences lie `x_batch` apart and their rows `x_row`.

    A program: WIDTH channels of `length` rows, a multiple of ROWS.  It goes down the rows, ROWS at a time, and keeps
    the last W-1 of those before them.
    weight: [D, W].  state: [N, W-1, D] or None.  number, before: [T] of packed documents, which one a row is of and how
    many rows of it lie before; or None, then every sequence is a document.
    """
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    column = program % TILES * WIDTH + tl.arange(0, WIDTH)
    here = column < D
    first = program // TILES % chunks * length
    sequence = program // TILES // chunks
    x += sequence.to(tl.int64) * x_batch + column
    y += sequence.to(tl.int64) * T * D + column
    if number is None:
        number = sequence
    taps = load_taps(weight, column, here, W)
    past = load_rows(x, first - (W - 1), x_row, T, here, W - 1)
    for turn in tl.range(0, (min(length, T - first) + ROWS - 1) // ROWS):
        row = first + turn * ROWS
        rows = past + load_rows(x, row, x_row, T, here, ROWS)
        offsets = load_offsets(before, row, T, ROWS)
        us = convolve(taps, windows(rows, offsets, state, number, row, T, D, W, ROWS, column, here), W, ROWS)
        for i in tl.static_range(ROWS):
            u = us[i]
            if ACTIVATE:
                u = u / (1.0 + tl.exp(-u))
            r = row + i
            tl.store(y + r.to(tl.int64) * D, u.to(y.dtype.element_ty), mask=here & (r < T))
        past = rows[ROWS:]

"""The gradients of rows, filter and state; what stood before the activation is computed anew from the rows."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher
from perilune.ops.short_conv.kernels.rows import convolve, load_offsets, load_rows, load_taps, slopes, windows


@triton.jit
def spread(pending, dus, offsets, taps, W: tl.constexpr, COUNT: tl.constexpr):
    """What COUNT rows give themselves and the W-1 before them, to which others have given `pending`.

    dx_t = sum_s taps_s du_(t+s), where t and t+s are of one document; always in the order of s.
    """
    dxs = ()
    for k in tl.static_range(W - 1 + COUNT):
        dx = pending[k] if k < W - 1 else taps[0] * dus[k - (W - 1)]
        for s in tl.static_range(1, W):
            if k + s >= W - 1 and k + s < W - 1 + COUNT:
                du = tl.where(offsets[k + s - (W - 1)] >= s, dus[k + s - (W - 1)], 0.0)
                dx = tl.fma(taps[s], du, dx)
        dxs += (dx,)
    return dxs


@Launcher
@triton.jit(do_not_specialize=["T", "length", "chunks"])
def conv_grads_kernel(
    x, weight, state, number, before, dy, dx, dtaps, T, length, chunks, x_batch, x_row, dy_batch, dy_row,
    D: tl.constexpr, W: tl.constexpr, ACTIVATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dx [B, T, D] from dy; and dtaps [B * chunks, W, D] by their reach, what each program's rows give the filter.

    dx, dtaps: or None, where they are not wanted.  The rest as in the forward pass; the program also looks at the first
    W-1 rows of the next one, which give its own last rows their part.
    """
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    column = program % TILES * WIDTH + tl.arange(0, WIDTH)
    here = column < D
    first = program // TILES % chunks * length
    sequence = program // TILES // chunks
    x += sequence.to(tl.int64) * x_batch + column
    dy += sequence.to(tl.int64) * dy_batch + column
    if dx is not None:
        dx += sequence.to(tl.int64) * T * D + column
    if number is None:
        number = sequence
    taps = load_taps(weight, column, here, W)
    past = load_rows(x, first - (W - 1), x_row, T, here, W - 1)
    sums = ()
    for _ in tl.static_range(W):
        sums += (tl.full([WIDTH], 0.0, tl.float32),)
    pending = sums[1:]
    turns = (min(length, T - first) + ROWS - 1) // ROWS
    for turn in tl.range(0, turns):
        row = first + turn * ROWS
        rows = past + load_rows(x, row, x_row, T, here, ROWS)
        dys = load_rows(dy, row, dy_row, T, here, ROWS)
        offsets = load_offsets(before, row, T, ROWS)
        values = windows(rows, offsets, state, number, row, T, D, W, ROWS, column, here)
        dus = slopes(convolve(taps, values, W, ROWS), dys, ACTIVATE, ROWS)
        if dtaps is not None:
            for i in tl.static_range(ROWS):
                more = ()
                for s in tl.static_range(W):
                    more += (tl.fma(dus[i], values[i * W + s], sums[s]),)
                sums = more
        if dx is not None:
            dxs = spread(pending, dus, offsets, taps, W, ROWS)
            for i in tl.static_range(ROWS):
                r = row + (i - (W - 1))
                to = dx + r.to(tl.int64) * D
                tl.store(to, dxs[i].to(dx.dtype.element_ty), mask=here & (r >= first) & (r < T))
            pending = dxs[ROWS:]
        past = rows[ROWS:]
    if dtaps is not None:
        for s in tl.static_range(W):
            tl.store(dtaps + ((program // TILES).to(tl.int64) * W + s) * D + column, sums[s], mask=here)
    if dx is not None and W > 1:
        row = first + turns * ROWS
        rows = past + load_rows(x, row, x_row, T, here, W - 1)
        dys = load_rows(dy, row, dy_row, T, here, W - 1)
        offsets = load_offsets(before, row, T, W - 1)
        values = windows(rows, offsets, state, number, row, T, D, W, W - 1, column, here)
        dus = slopes(convolve(taps, values, W, W - 1), dys, ACTIVATE, W - 1)
        dxs = spread(pending, dus, offsets, taps, W, W - 1)
        for i in tl.static_range(W - 1):
            r = row + (i - (W - 1))
            to = dx + r.to(tl.int64) * D
            tl.store(to, dxs[i].to(dx.dtype.element_ty), mask=here & (r >= first) & (r < T))


@Launcher
@triton.jit(do_not_specialize=["G"])
def filter_grads_kernel(
    dtaps, dweight, G, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dweight [D, W] from the parts dtaps [G, W, D]; a program: WIDTH channels of one tap."""
    s = tl.program_id(0) % W
    column = tl.program_id(0) // W * WIDTH + tl.arange(0, WIDTH)
    here = column < D
    sums = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    for turn in tl.range(0, (G + ROWS - 1) // ROWS):
        part = turn * ROWS + tl.arange(0, ROWS)
        at = dtaps + (part.to(tl.int64)[:, None] * W + s) * D + column[None, :]
        sums += tl.load(at, mask=(part < G)[:, None] & here[None, :], other=0.0)
    tl.store(dweight + column * W + (W - 1 - s), tl.sum(sums, 0).to(dweight.dtype.element_ty), mask=here)

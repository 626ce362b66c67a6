"""The W-1 rows that a document begins with and those that it leaves; a program: WIDTH channels of one document."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher
from perilune.ops.short_conv.kernels.rows import convolve, load_rows, load_taps, slopes


@triton.jit
def share(bounds, T, D: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    """What a program has: (columns, which of them there are, where they begin in [N, W-1, D], first row, past last,
    the sequence they lie in); bounds: [N+1], or None: every sequence is a document."""
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    n = tl.program_id(0) // TILES
    column = tl.program_id(0) % TILES * WIDTH + tl.arange(0, WIDTH)
    first = n * 0
    last = first + T
    sequence = n
    if bounds is not None:
        first = tl.load(bounds + n)
        last = tl.load(bounds + n + 1)
        sequence = n * 0
    return column, column < D, n.to(tl.int64) * (W - 1) * D + column, first, last, sequence.to(tl.int64)


@triton.jit
def origin(first, last, j, W: tl.constexpr):
    """Where row j of a final state is from: (whether it is the state before, the row there, the row in the sequence)"""
    place = last - first + j  # in (state, document)
    return place < W - 1, place.to(tl.int64), last.to(tl.int64) + (j - (W - 1))


@Launcher
@triton.jit(do_not_specialize=["T"])
def final_state_kernel(
    x, state, bounds, final, T, x_batch, x_row, D: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """final [N, W-1, D], the last rows of (state, document); state: the same, or None for zeros."""
    column, here, at, first, last, sequence = share(bounds, T, D, W, WIDTH)
    for j in tl.static_range(W - 1):
        held, place, row = origin(first, last, j, W)
        value = tl.load(x + sequence * x_batch + row * x_row + column, mask=here & (held == 0), other=0.0)
        value = value.to(tl.float32)
        if state is not None:
            old = tl.load(state + at + place * D, mask=here & held, other=0.0).to(tl.float32)
            value = tl.where(held, old, value)
        tl.store(final + at + j * D, value.to(final.dtype.element_ty), mask=here)


@Launcher
@triton.jit(do_not_specialize=["T"])
def final_grads_kernel(
    dfinal, bounds, dx, dstate, T, D: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dfinal [N, W-1, D] to where its rows are from: dx [B, T, D], dstate [N, W-1, D], or None; they hold zeros."""
    column, here, at, first, last, sequence = share(bounds, T, D, W, WIDTH)
    for j in tl.static_range(W - 1):
        held, place, row = origin(first, last, j, W)
        value = tl.load(dfinal + at + j * D, mask=here, other=0.0)
        if dx is not None:
            to = dx + (sequence * T + row) * D + column
            tl.store(to, value.to(dx.dtype.element_ty), mask=here & (held == 0))
        if dstate is not None:
            tl.store(dstate + at + place * D, value.to(dstate.dtype.element_ty), mask=here & held)


@Launcher
@triton.jit(do_not_specialize=["T"])
def state_grads_kernel(
    x, weight, state, bounds, dy, dstate, T, x_batch, x_row, dy_batch, dy_row,
    D: tl.constexpr, W: tl.constexpr, ACTIVATE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dstate [N, W-1, D], of what a document's first W-1 rows meet: dstate_i = sum_(o <= i) taps_(W-1+o-i) du_o."""
    column, here, at, first, last, sequence = share(bounds, T, D, W, WIDTH)
    taps = load_taps(weight, column, here, W)
    rows = load_rows(state + at, first * 0, D, W - 1, here, W - 1)
    rows += load_rows(x + sequence * x_batch + column, first, x_row, last, here, W - 1)
    dys = load_rows(dy + sequence * dy_batch + column, first, dy_row, last, here, W - 1)
    values = ()
    for o in tl.static_range(W - 1):
        for s in tl.static_range(W):
            values += (rows[o + W - 1 - s],)
    dus = slopes(convolve(taps, values, W, W - 1), dys, ACTIVATE, W - 1)
    for i in tl.static_range(W - 1):
        total = tl.full([WIDTH], 0.0, tl.float32)
        for o in tl.static_range(i + 1):
            total = tl.fma(taps[W - 1 + o - i], tl.where(first + o < last, dus[o], 0.0), total)
        tl.store(dstate + at + i * D, total.to(dstate.dtype.element_ty), mask=here)

"""What the kernels share: rows of a few channels, held in registers, and what the taps of one of them fall on.

A tap of reach s meets the row s before the current one, in the document or in the state it began with.

Sums of products are written with `tl.fma`.  Of a b + c d a compiler rounds one product and fuses the other into the
sum, and takes either, from one compiled form of a kernel to the next: then a gradient would depend on which others are
wanted, and a document on whether it is packed, in the last place.
"""

import triton
import triton.language as tl


@triton.jit
def load_taps(weight, column, here, W: tl.constexpr):
    """weight: [D, W].  By their reach, in float32."""
    taps = ()
    for s in tl.static_range(W):
        taps += (tl.load(weight + column * W + (W - 1 - s), mask=here, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def load_rows(x, row, stride, last, here, COUNT: tl.constexpr):
    """COUNT rows of x from `row` on, which lie `stride` apart, in float32; zeros before row 0 and from `last` on."""
    rows = ()
    for i in tl.static_range(COUNT):
        r = row + i
        rows += (tl.load(x + r.to(tl.int64) * stride, mask=here & (r >= 0) & (r < last), other=0.0).to(tl.float32),)
    return rows


@triton.jit
def load_offsets(before, row, T, COUNT: tl.constexpr):
    """How many rows of its document lie before each of COUNT rows; 0 from T on.  before: [T], or None: one document."""
    offsets = ()
    for i in tl.static_range(COUNT):
        r = row + i
        if before is None:
            offsets += (tl.where(r < T, r, 0),)
        else:
            offsets += (tl.load(before + r, mask=r < T, other=0),)
    return offsets


@triton.jit
def windows(
    rows, offsets, state, number, row, T, D: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr, column, here,
):  # fmt: skip
    """What the taps fall on, for COUNT rows from `row` on, which in `rows` have the W-1 rows before them in front.

    The W values of a row by their reach, one row's behind another's.
    state: [N, W-1, D], or None for zeros.  number: [T], which document a row is of, or the number of all.
    """
    values = ()
    for i in tl.static_range(COUNT):
        values += (rows[i + W - 1],)
        for s in tl.static_range(1, W):
            value = rows[i + W - 1 - s]
            if state is None:
                values += (tl.where(offsets[i] >= s, value, 0.0),)
            else:
                inside = (offsets[i] < s) & (row + i < T)
                n = number
                if n.dtype.is_ptr():
                    n = tl.load(number + row + i, mask=inside, other=0)
                at = n.to(tl.int64) * (W - 1) + (W - 1 - s) + offsets[i]
                beyond = tl.load(state + at * D + column, mask=here & inside, other=0.0).to(tl.float32)
                values += (tl.where(offsets[i] >= s, value, beyond),)
    return values


@triton.jit
def convolve(taps, values, W: tl.constexpr, COUNT: tl.constexpr):
    """u of COUNT rows from their windows."""
    us = ()
    for i in tl.static_range(COUNT):
        u = taps[0] * values[i * W]
        for s in tl.static_range(1, W):
            u = tl.fma(taps[s], values[i * W + s], u)
        us += (u,)
    return us


@triton.jit
def slopes(us, dys, ACTIVATE: tl.constexpr, COUNT: tl.constexpr):
    """The gradient of u from that of silu(u), or of u itself, for COUNT rows."""
    if ACTIVATE:
        dus = ()
        for i in tl.static_range(COUNT):
            share = 1.0 / (1.0 + tl.exp(-us[i]))
            dus += (dys[i] * share * tl.fma(us[i], 1.0 - share, 1.0),)
        return dus
    else:
        return dys

"""A few rows at a time, held in registers from the one reading to the one writing."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher


@triton.jit
def factors(weight, column, x, D: tl.constexpr, ROUNDED: tl.constexpr):
    """The weight [WIDTH] in float32; rounded as x is, where x is scaled in its own dtype."""
    w = tl.load(weight + column, mask=column < D, other=0.0)
    if ROUNDED:
        w = w.to(x.dtype.element_ty)
    return w.to(tl.float32)


@Launcher
@triton.jit
def norm_kernel(
    x, x_stride, weight, gate, gate_stride, out, R, eps,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [R, D], dense, of x [R, D] and, if there is one, gate [R, D], whose rows are `stride` apart."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    here = (row < R)[:, None] & (column < D)[None, :]
    row = row.to(tl.int64)[:, None]
    v = tl.load(x + row * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
    w = factors(weight, column, x, D, gate is None)[None, :]
    y = v * tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
    if gate is not None:
        g = tl.load(gate + row * gate_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
        y = y * w / (1.0 + tl.exp(-g))
    else:
        y = (y.to(x.dtype.element_ty).to(tl.float32) * w).to(x.dtype.element_ty)
    tl.store(out + row * D + column[None, :], y.to(out.dtype.element_ty), mask=here)


@Launcher
@triton.jit
def norm_grads_kernel(
    x, x_stride, weight, gate, gate_stride, dy, dy_stride, dx, dgate, dweight, R, eps,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dx, dgate [R, D], dense, and dweight [programs, D], what each program's rows give; None: not wanted.

    With r the inverse root of a row, n = r x, s = sigmoid(gate), 1 without one, and a = dy s w:

        dx = r (a - n mean(a n)),   dgate = dy n w s (1 - s),   dw = sum over rows of dy n s
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    w = factors(weight, column, x, D, gate is None)[None, :]
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(program * ROWS, R, programs * ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < R)[:, None] & (column < D)[None, :]
        row = row.to(tl.int64)[:, None]
        v = tl.load(x + row * x_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
        d = tl.load(dy + row * dy_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
        to = row * D + column[None, :]
        r = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        n = v * r
        if gate is not None:
            g = tl.load(gate + row * gate_stride + column[None, :], mask=here, other=0.0).to(tl.float32)
            d /= 1.0 + tl.exp(-g)
            if dgate is not None:
                tl.store(dgate + to, (d * n * w / (1.0 + tl.exp(g))).to(dgate.dtype.element_ty), mask=here)
        if dweight is not None:
            found += d * (n if gate is not None else n.to(x.dtype.element_ty).to(tl.float32))
        if dx is not None:
            a = d * w
            a = r * (a - n * (tl.sum(a * n, 1) / D)[:, None])
            tl.store(dx + to, a.to(dx.dtype.element_ty), mask=here)
    if dweight is not None:
        tl.store(dweight + program.to(tl.int64) * D + column, tl.sum(found, 0), mask=column < D)

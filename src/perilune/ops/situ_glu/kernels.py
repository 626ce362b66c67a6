"""A tile of numbers at a time: both inputs read, the unit or its two gradients written."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher


@triton.jit
def tanh(x):
    """By its series near zero, where the exponential form cancels."""
    z = x * x
    near = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 - z * (17.0 / 315))))
    return tl.where(z < 0.05, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def place(R, C, TILES, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """This program's rows [ROWS, 1] and columns [1, WIDTH], in 64 bits, and which of them there are."""
    row = (tl.program_id(0) // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % TILES).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)[None, :]
    return row, column, (row < R) & (column < C)


@Launcher
@triton.jit
def glu_kernel(
    gate, gate_stride, up, up_stride, out, R, C, TILES, beta_gate, beta_up,
    UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [R, C], dense, of gate and up [R, C], whose rows are `stride` apart; TILES: programs side by side."""
    row, column, here = place(R, C, TILES, ROWS, WIDTH)
    g = tl.load(gate + row * gate_stride + column, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=here, other=0.0).to(tl.float32)
    if UNIT == "situ":
        opened = beta_gate * tanh(g / beta_gate) / (1.0 + tl.exp(-g))
        y = opened * (beta_up * tanh(u / beta_up))
    elif UNIT == "swiglu":
        y = g / (1.0 + tl.exp(-g)) * u
    else:
        y = u / (1.0 + tl.exp(-g))
    tl.store(out + row * C + column, y.to(out.dtype.element_ty), mask=here)


@Launcher
@triton.jit
def glu_grads_kernel(
    gate, gate_stride, up, up_stride, dy, dy_stride, dgate, dup, R, C, TILES, beta_gate, beta_up,
    UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dgate, dup [R, C], dense: see the derivatives beside the chunked form."""
    row, column, here = place(R, C, TILES, ROWS, WIDTH)
    g = tl.load(gate + row * gate_stride + column, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=here, other=0.0).to(tl.float32)
    d = tl.load(dy + row * dy_stride + column, mask=here, other=0.0).to(tl.float32)
    d /= 1.0 + tl.exp(-g)
    c = 1.0 / (1.0 + tl.exp(g))  # 1 - sigmoid, which would cancel
    if UNIT == "situ":
        t = tanh(g / beta_gate)
        r = tanh(u / beta_up)
        du = d * t * beta_gate * (1.0 - r * r)
        dg = d * r * beta_up * (1.0 - t * t + beta_gate * t * c)
    elif UNIT == "swiglu":
        du = d * g
        dg = d * u * (1.0 + g * c)
    else:
        du = d
        dg = d * u * c
    to = row * C + column
    tl.store(dgate + to, dg.to(dgate.dtype.element_ty), mask=here)
    tl.store(dup + to, du.to(dup.dtype.element_ty), mask=here)

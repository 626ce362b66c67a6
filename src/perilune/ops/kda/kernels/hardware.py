"""Functions as Hopper has them, for the kernels in Gluon: results below the least normal number are zeros."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from perilune.ops.kda.kernels.gate import LOG2E as _LOG2E

LOG2E = gl.constexpr(_LOG2E.value)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2_minus(x):
    code: gl.constexpr = "{ .reg .f32 y; neg.f32 y, $1; ex2.approx.ftz.f32 $0, y; }"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -LOG2E))


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b

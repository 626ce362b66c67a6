"""The product all kernels use."""

import triton
import triton.language as tl
from triton import knobs

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter multiplies the bits of bfloat16 as integers


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, acc=None):
    """a [M, K] times b [K, N], added to acc [M, N] if given; float32, whatever the operands are."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision=PRECISION)

"""What the kernels share: one row of one of several tensors, and sums over it."""

import triton
import triton.language as tl
from triton import knobs

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter reduces by a function of ours cell by cell


@triton.jit
def both(a, b, c, d):
    return a + c, b + d


@triton.jit
def two_sums(a, b):
    """The sums of a and of b, in one exchange between threads."""
    if _INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0)
    else:
        return tl.reduce((a, b), 0, both)


@triton.jit
def entry(x, i):
    """x[i] of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == i, x, 0.0), 0)


@triton.jit
def weights_of(score, row, number, N: tl.constexpr, COUNT: tl.constexpr):
    """A row's scores [COUNT] out of [R, N], -inf behind N, and their softmax."""
    s = tl.load(score + row * N + number, mask=number < N, other=float("-inf"))
    a = tl.exp(s - tl.max(s, 0))
    return s, tl.div_rn(a, tl.broadcast_to(tl.sum(a, 0), [COUNT]))


@triton.jit
def load_vector(x, column, D: tl.constexpr):
    """x: [D] in float32, zeros behind."""
    return tl.load(x + column, mask=column < D, other=0.0).to(tl.float32)

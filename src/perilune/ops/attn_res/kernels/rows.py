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
def chosen(items, i, N: tl.constexpr):
    """items[i] of N, where i is known only at run time."""
    item = items[0]
    for j in tl.static_range(1, N):
        item = tl.where(i == j, items[j], item)
    return item


@triton.jit
def entry(x, i):
    """x[i] of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == i, x, 0.0), 0)


@triton.jit
def load_vector(x, column, D: tl.constexpr):
    """x: [D] in float32, zeros behind."""
    return tl.load(x + column, mask=column < D, other=0.0).to(tl.float32)

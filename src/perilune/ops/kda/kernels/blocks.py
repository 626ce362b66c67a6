"""The strict lower triangle of a chunk's row pairs as blocks, with the decay of every pair as two factors.

The same cover as `perilune.ops.kda.blocks`: the halves of every 2b rows, referring to the border between them, so that
both factors are at most 1; and, where the decay is bounded, the diagonal tiles of 16 rows as one block each, referring
to half the worst decay of a tile from its start, so that exponents stay within +-58 in base 2 for a bound of -5.

What is retained over a run of rows is a sum of their logarithms.  Such sums are products with matrices of zeros and
ones, which the tensor cores do faster than threads can scan over rows: one operand is exact, the other is split into
terms of bfloat16.
"""

import triton
import triton.language as tl

from perilune.ops.kda.kernels.dot import dot

TILE = tl.constexpr(16)


@triton.jit
def sums(held, x, TERMS: tl.constexpr):
    """held [C, C] of booleans times x [C, W]: sums over the selected rows, x as TERMS terms of 8 bits each.

    With TERMS = 0 in one product of float32.
    """
    if TERMS == 0:
        return dot(tl.where(held, 1.0, 0.0), x, PRECISION="tf32x3")
    else:
        select = tl.where(held, 1.0, 0.0).to(tl.bfloat16)
        term = x.to(tl.bfloat16)
        total = dot(select, term, PRECISION="tf32")
        for _ in tl.static_range(TERMS - 1):
            x -= term.to(tl.float32)
            term = x.to(tl.bfloat16)
            total = dot(select, term, acc=total, PRECISION="tf32")
        return total


@triton.jit
def through(C: tl.constexpr, n: tl.constexpr):
    """[C, C]: for each row, those from the start of its group of n rows through itself."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // n == j // n) & (j <= i)


@triton.jit
def after(C: tl.constexpr, n: tl.constexpr):
    """[C, C]: for each row, those after it to the end of its group of n rows."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // n == j // n) & (j > i)


@triton.jit
def before(C: tl.constexpr):
    """[C, C]: for each row, those before it."""
    return tl.arange(0, C)[None, :] < tl.arange(0, C)[:, None]


@triton.jit
def from_row(C: tl.constexpr):
    """[C, C]: for each row, itself and those after it."""
    return tl.arange(0, C)[None, :] >= tl.arange(0, C)[:, None]


@triton.jit
def to_border(C: tl.constexpr, b: tl.constexpr):
    """[C, C]: for each row, those between it and the border between the halves of its 2b rows."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // b == j // b) & ((i // b % 2 == 1) == (j <= i))


@triton.jit
def second_half(C: tl.constexpr, b: tl.constexpr):
    """[C, 1]: which rows are in the second half of their 2b rows."""
    return (tl.arange(0, C) // b % 2 == 1)[:, None]


@triton.jit
def in_halves(C: tl.constexpr, b: tl.constexpr):
    """[C, C]: the pairs of the halves of every 2b rows."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // (2 * b) == j // (2 * b)) & (i // b > j // b)


@triton.jit
def in_tiles(C: tl.constexpr):
    """[C, C]: the pairs within tiles."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // TILE == j // TILE) & (i > j)

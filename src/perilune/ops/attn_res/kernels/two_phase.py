"""Many queries over one bank, and the merge of each with what is not in it.

The bank is read twice, whatever the number of queries: for the scores of all, and for all their sums.
"""

import triton
import triton.language as tl

from perilune.ops.attn_res.kernels.rows import load_vector, two_sums
from perilune.ops.chosen import chosen
from perilune.ops.launcher import Launcher

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter multiplies bfloat16's bits as integers


@triton.jit
def product(v, parts, at, inside, PARTS: tl.constexpr, PART, sums):
    """sums [BLOCK, Q] plus v [BLOCK, TILE] times the sum of PARTS matrices [TILE, Q], which lie PART apart."""
    for part in tl.static_range(PARTS):
        w = tl.load(parts + part * PART + at, mask=inside, other=0.0)
        if _INTERPRETED:
            sums = tl.dot(v.to(tl.float32), w.to(tl.float32), acc=sums, input_precision="ieee")
        else:
            sums = tl.dot(v.to(w.dtype), w, acc=sums, input_precision="ieee")
    return sums


@Launcher
@triton.jit
def score_kernel(
    sources, strides, parts, score, R, Q, eps,
    N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """score [R, Q, N] of Q queries; a program: one source, BLOCK rows.

    parts: [PARTS, Q, D], whose sum is query * key_weight.  COUNT: at least Q.
    """
    i = tl.program_id(0) % N
    row = tl.program_id(0) // N * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, COUNT)
    source = chosen(sources, i, N) + row.to(tl.int64)[:, None] * chosen(strides, i, N)
    sums = tl.zeros([BLOCK, COUNT], tl.float32)
    squares = tl.zeros([BLOCK, TILE], tl.float32)
    for first in tl.range(0, D, TILE, num_stages=STAGES):
        column = first + tl.arange(0, TILE)
        v = tl.load(source + column[None, :], mask=(row < R)[:, None] & (column < D)[None, :], other=0.0)
        squares += v.to(tl.float32) * v.to(tl.float32)
        at = number[None, :] * D + column[:, None]
        inside = (number < Q)[None, :] & (column < D)[:, None]
        sums = product(v, parts, at, inside, PARTS, Q * D, sums)
    s = sums * tl.rsqrt(tl.sum(squares, 1) / D + eps)[:, None]
    to = (row.to(tl.int64)[:, None] * Q + number[None, :]) * N + i
    tl.store(score + to, s, mask=(row < R)[:, None] & (number < Q)[None, :])


@Launcher
@triton.jit
def bank_kernel(
    sources, strides, score, m, l, o, R, Q,
    N: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """m, l [Q, R] and o [Q, R, D] from score [R, Q, N]; a program: TILE columns of one row, for all queries."""
    row = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    column = tile * TILE + tl.arange(0, TILE)
    here = column < D
    v = ()
    for i in tl.static_range(N):
        v += (tl.load(sources[i] + row * strides[i] + column, mask=here, other=0.0),)
    at = row  # of query q, in [Q, R]
    for q in range(Q):
        s = ()
        top = float("-inf")
        for i in tl.static_range(N):
            s += (tl.load(score + (row * Q + q) * N + i),)
            top = tl.maximum(top, s[i])
        total = 0.0
        mixed = tl.zeros([TILE], tl.float32)
        for i in tl.static_range(N):
            e = tl.exp(s[i] - top)
            total += e
            mixed += e * v[i].to(tl.float32)
        if tile == 0:
            tl.store(m + at, top)
            tl.store(l + at, total)
        tl.store(o + at * D + column, mixed.to(o.dtype.element_ty), mask=here)
        at += R


@Launcher
@triton.jit
def merge_kernel(
    m, l, o, live, live_stride, update, update_stride, query, key_weight, norm_weight, out, summed, eps, norm_eps,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A row of the finished mixture out [R, D]: of m, l [R], o [R, D] and one more source, live [R, D].

    update: [R, D] to be added to live first, which is then written to summed, or None.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    here = column < D
    v = tl.load(live + row * live_stride + column, mask=here, other=0.0)
    if update is not None:
        more = tl.load(update + row * update_stride + column, mask=here, other=0.0)
        v = (v.to(tl.float32) + more.to(tl.float32)).to(live.dtype.element_ty)
        tl.store(summed + row * D + column, v, mask=here)
    v = v.to(tl.float32)
    bank = tl.load(o + row * D + column, mask=here, other=0.0).to(tl.float32)
    squares, along = two_sums(v * v, v * (load_vector(query, column, D) * load_vector(key_weight, column, D)))
    s = along * tl.rsqrt(squares / D + eps)
    before = tl.load(m + row)
    top = tl.maximum(before, s)
    old = tl.exp(before - top)
    new = tl.exp(s - top)
    total = old * tl.load(l + row) + new
    share = tl.div_rn(1.0, total)
    y = old * bank + new * v
    mixed = y * share
    mixed += (y - mixed * total) * share  # as a division rounds
    if norm_weight is not None:
        mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) / D + norm_eps) * load_vector(norm_weight, column, D)
    tl.store(out + row * D + column, mixed.to(out.dtype.element_ty), mask=here)

"""First kernels: all that a chunk determines alone, one program a chunk and head."""

import triton
import triton.language as tl

from perilune.ops.kda.kernels.blocks import TILE, after, in_halves, in_tiles, second_half, sums, through, to_border
from perilune.ops.kda.kernels.dot import dot
from perilune.ops.kda.kernels.gate import sigmoid
from perilune.ops.kda.kernels.rows import load_decay, load_rows
from perilune.ops.launcher import Launcher


@triton.jit
def inverse_norm(x, start, length, head, stride, C: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr):
    """[C]: one over the L2 norm of each row, or ones."""
    if NORM:
        wide = load_rows(x, start, length, head, stride, 0, C, K, K).to(tl.float32)
        return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
    else:
        return tl.full([C], 1.0, tl.float32)


@Launcher
@triton.jit
def prepare_kernel(
    q, k, z, beta, A_log, dt_bias,
    q_since, k_since, k_until, solve, pairs, retained, own, strength, q_norm, k_norm,
    starts, lengths,
    scale, g_min, middle, H, stride,
    C: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, BETA_LOGITS: tl.constexpr, FROM: tl.constexpr, TERMS: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """See `perilune.ops.kda.kernels.workspace` for what is written; `solve` is still A.

    W: channels worked on at a time.  FROM: the smallest halves to join, TILE where the decay is bounded, then middle
    is half the worst decay of a tile in log2; else 1.  TERMS: see `sums`.  HALF: what products within +-1 are rounded
    to.
    """
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    start = tl.load(starts + chunk)
    length = tl.load(lengths + chunk)
    record = (chunk * H + head).to(tl.int64)
    rows = tl.arange(0, C)

    q_factor = inverse_norm(q, start, length, head, stride, C, K, NORM)
    k_factor = inverse_norm(k, start, length, head, stride, C, K, NORM)
    tl.store(q_norm + record * C + rows, q_factor)
    tl.store(k_norm + record * C + rows, k_factor)
    b = tl.load(beta + (start + rows).to(tl.int64) * stride + head, mask=rows < length, other=0.0).to(tl.float32)
    if BETA_LOGITS:
        b = tl.where(rows < length, sigmoid(b), 0.0)
    tl.store(strength + record * C + rows, b)

    P = tl.zeros([C, C], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    diagonal = tl.zeros([C], tl.float32)
    for first in range(0, K, W):
        _, _, _, g = load_decay(z, A_log, dt_bias, start, length, head, stride, first, g_min, C, W, K, GATE)
        Q = load_rows(q, start, length, head, stride, first, C, W, K).to(tl.float32) * (q_factor * scale)[:, None]
        X = load_rows(k, start, length, head, stride, first, C, W, K).to(tl.float32) * k_factor[:, None]
        diagonal += tl.sum(Q * X, 1)
        channels = first + tl.arange(0, W)
        at = record * C * K + rows[:, None] * K + channels[None, :]
        since = tl.exp2(sums(through(C, C), g, TERMS))
        tl.store(q_since + at, (Q * since).to(q_since.dtype.element_ty))
        tl.store(k_since + at, (X * since).to(k_since.dtype.element_ty))
        tl.store(k_until + at, (X * tl.exp2(sums(after(C, C), g, TERMS))).to(k_until.dtype.element_ty))
        tl.store(retained + record * K + channels, tl.exp2(tl.sum(g, 0)))
        if FROM > 1:
            x = sums(through(C, TILE), g, TERMS) + middle
            to = tl.exp2(x)
            column = tl.trans(X * tl.exp2(-x))
            P += tl.where(in_tiles(C), dot(Q * to, column, PRECISION=PRECISION), 0.0)
            A += tl.where(in_tiles(C), dot(X * to, column, PRECISION=PRECISION), 0.0)
        for e in tl.static_range(6):
            if (FROM << e) < C:
                factor = tl.exp2(sums(to_border(C, FROM << e), g, TERMS))
                second = second_half(C, FROM << e)
                column = tl.trans(tl.where(second, 0.0, X * factor).to(HALF))
                held = in_halves(C, FROM << e)
                P += tl.where(held, dot((Q * factor).to(HALF), column, PRECISION=PRECISION), 0.0)
                A += tl.where(held, dot((X * factor).to(HALF), column, PRECISION=PRECISION), 0.0)
    tl.store(own + record * C + rows, diagonal)
    at = record * C * C + rows[:, None] * C + rows[None, :]
    tl.store(pairs + at, P.to(pairs.dtype.element_ty))
    tl.store(solve + at, A.to(solve.dtype.element_ty))


@Launcher
@triton.jit
def solve_kernel(pairs, solve, strength, C: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """-A (I + Diag(beta) A)^-1 from A; pairs and solve [chunks, H, C, C] may be the same memory."""
    record = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, C)
    at = record * C * C + rows[:, None] * C + rows[None, :]
    A = tl.load(pairs + at).to(tl.float32)
    X = inverse(tl.load(strength + record * C + rows)[:, None] * A, HALF, PRECISION).to(HALF)
    tl.debug_barrier()  # every thread has read before any writes
    tl.store(solve + at, (-dot(A.to(HALF), X, PRECISION=PRECISION)).to(solve.dtype.element_ty))


@triton.jit
def inverse(L, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 for L [C, C] below the diagonal, by block doubling.

    Every step is a true inverse of its blocks, whose entries stay within +-1 for unit keys and beta <= 1; the terms of
    a power series grow without bound.
    """
    C: tl.constexpr = L.shape[0]
    i = tl.arange(0, C)
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(in_halves(C, 1), L, 0.0)
    for e in tl.static_range(1, 6):
        if (1 << e) < C:
            E = tl.where(in_halves(C, 1 << e), L, 0.0).to(HALF)
            half = X.to(HALF)
            X -= dot(half, dot(E, half, PRECISION=PRECISION).to(HALF), PRECISION=PRECISION)
    return X

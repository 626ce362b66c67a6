"""Last kernels of the backward: from the gradients of what a chunk wrote and read to those of its inputs."""

import triton
import triton.language as tl

from perilune.ops.kda.kernels.blocks import (
    TILE,
    after,
    before,
    from_row,
    in_halves,
    in_tiles,
    second_half,
    sums,
    through,
    to_border,
)
from perilune.ops.kda.kernels.dot import dot
from perilune.ops.kda.kernels.gate import gate_backward, sigmoid
from perilune.ops.kda.kernels.rows import load_decay, load_rows, store_rows
from perilune.ops.launcher import Launcher


@Launcher
@triton.jit
def value_grads_kernel(
    v, beta, o, do, strength, residuals, dz_, dv, dbeta, dpairs, down, along_q, along_k,
    starts, lengths, H, stride,
    C: tl.constexpr, V: tl.constexpr, VW: tl.constexpr,
    NORM: tl.constexpr, BETA_LOGITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What needs values alone; one program a chunk and head.

    In place, residuals become U and dz_ becomes -dY.  dpairs [chunks, H, 2, C, C]: gradients of P and A below their
    diagonals, rounded once, for rows and columns must cancel in the decay's gradient.  down [chunks, H, C]: that of
    the diagonal of P.  along_q, along_k: the products q . dq and k . dk of each row, which the norms take out.  Values
    tell them: o is linear in q, so q . dq = o . do; and u = b (v - S k) is written as k u^T, so k . dk =
    (2 u - b v) . du.
    """
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H
    start = tl.load(starts + chunk)
    length = tl.load(lengths + chunk)
    record = (chunk * H + head).to(tl.int64)
    rows = tl.arange(0, C)
    b = tl.load(strength + record * C + rows)
    dP = tl.zeros([C, C], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    db = tl.zeros([C], tl.float32)
    diagonal = tl.zeros([C], tl.float32)
    by_q = tl.zeros([C], tl.float32)
    by_k = tl.zeros([C], tl.float32)
    for value in range(0, V, VW):
        cv = record * C * V + rows[:, None] * V + (value + tl.arange(0, VW))[None, :]
        R = tl.load(residuals + cv)
        U = R.to(tl.float32) * b[:, None]
        dZ = tl.load(dz_ + cv).to(tl.float32)
        dY = dZ * b[:, None]
        dO = load_rows(do, start, length, head, stride, value, C, VW, V)
        db += tl.sum(dZ * R.to(tl.float32), 1)
        diagonal += tl.sum(dO.to(tl.float32) * U, 1)
        if NORM:
            O = load_rows(o, start, length, head, stride, value, C, VW, V).to(tl.float32)
            by_q += tl.sum(dO.to(tl.float32) * O, 1)
            written = load_rows(v, start, length, head, stride, value, C, VW, V).to(tl.float32) * b[:, None]
            by_k += tl.sum(dZ * (2.0 * U - written), 1)
        store_rows(dv, dY, start, length, head, stride, value, C, VW, V)
        Uh = U.to(R.dtype)
        dYh = (-dY).to(R.dtype)
        tl.store(residuals + cv, Uh)
        tl.store(dz_ + cv, dYh)
        dP = dot(dO.to(R.dtype), tl.trans(Uh), acc=dP, PRECISION=PRECISION)
        dA = dot(dYh, tl.trans(Uh), acc=dA, PRECISION=PRECISION)
    below = rows[:, None] > rows[None, :]
    cc = 2 * record * C * C + rows[:, None] * C + rows[None, :]
    tl.store(dpairs + cc, tl.where(below, dP, 0.0).to(dpairs.dtype.element_ty))
    tl.store(dpairs + cc + C * C, tl.where(below, dA, 0.0).to(dpairs.dtype.element_ty))
    tl.store(down + record * C + rows, diagonal)
    tl.store(along_q + record * C + rows, by_q)
    tl.store(along_k + record * C + rows, by_k)
    at = (start + rows).to(tl.int64) * stride + head
    if BETA_LOGITS:
        db *= b * sigmoid(-tl.load(beta + at, mask=rows < length, other=0.0).to(tl.float32))
    tl.store(dbeta + at, db.to(dbeta.dtype.element_ty), mask=rows < length)


@triton.jit
def pair_grads(
    dpairs, row, key, held, by, HALF: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(what the pairs that `held` selects bring to their rows, `by` and what they bring to their columns): [C, W] each.

    dpairs: where their gradients [C, C] stand.  row, key: the factors of a pair, split into TERMS of HALF.
    """
    C: tl.constexpr = key.shape[0]
    i = tl.arange(0, C)
    at = dpairs + i[:, None] * C + i[None, :]
    d = tl.where(held, tl.load(at), 0.0).to(HALF)
    turned = tl.where(tl.trans(held), tl.load(tl.trans(at)), 0.0).to(HALF)
    to_rows = tl.zeros_like(by)
    for _ in tl.static_range(TERMS):
        term = key.to(HALF)
        to_rows = dot(d, term, acc=to_rows, PRECISION=PRECISION)
        key -= term.to(tl.float32)
        term = row.to(HALF)
        by = dot(turned, term, acc=by, PRECISION=PRECISION)
        row -= term.to(tl.float32)
    return to_rows, by


@triton.jit
def block_grads(
    dpairs, Q, X, to, back, held, rows_q, rows_k, columns,
    HALF: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the pairs that `held` selects bring to (q as rows, k as rows, k as columns): [C, W] each.

    dpairs: where the gradients of P stand, those of A behind them.
    """
    C: tl.constexpr = X.shape[0]
    by_q, by = pair_grads(dpairs, Q * to, X * back, held, tl.zeros_like(columns), HALF, TERMS, PRECISION)
    by_k, by = pair_grads(dpairs + C * C, X * to, X * back, held, by, HALF, TERMS, PRECISION)
    return rows_q + to * by_q, rows_k + to * by_k, columns + back * by


@Launcher
@triton.jit
def key_grads_kernel(
    q, k, z, A_log, dt_bias, do,
    q_norm, k_norm, residuals, states, dz_, dstates, dpairs, down, along_q, along_k,
    dq, dk, dz, dbias, drate,
    starts, lengths,
    scale, g_min, middle, H, stride,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, VW: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, FROM: tl.constexpr, TERMS: tl.constexpr,
    HALF: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The rest; one program: W channels of a chunk and head.

    dbias [chunks, H, K], drate [chunks, H, K / W]: to be summed over the chunks.
    """
    parts: tl.constexpr = K // W
    part = tl.program_id(0) % parts  # neighbours read the same values, out of the cache
    head = tl.program_id(0) // parts % H
    chunk = tl.program_id(0) // parts // H
    first = part * W
    start = tl.load(starts + chunk)
    length = tl.load(lengths + chunk)
    record = (chunk * H + head).to(tl.int64)
    rows = tl.arange(0, C)
    live = (rows < length)[:, None]
    channels = first + tl.arange(0, W)

    rows_q = tl.zeros([C, W], tl.float32)
    rows_k = tl.zeros([C, W], tl.float32)
    ends = tl.zeros([C, W], tl.float32)
    passed = tl.zeros([W], tl.float32)
    for value in range(0, V, VW):
        values = value + tl.arange(0, VW)
        vk = record * K * V + values[:, None] * K + channels[None, :]
        cv = record * C * V + rows[:, None] * V + values[None, :]
        S = tl.load(states + vk)  # [VW, W]
        dO = load_rows(do, start, length, head, stride, value, C, VW, V).to(S.dtype)
        rows_q = dot(dO, S, acc=rows_q, PRECISION=PRECISION)
        rows_k = dot(tl.load(dz_ + cv), S, acc=rows_k, PRECISION=PRECISION)
        dS = tl.load(dstates + vk)
        ends = dot(tl.load(residuals + cv), dS, acc=ends, PRECISION=PRECISION)
        passed += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)

    raw, rate, bias, g = load_decay(z, A_log, dt_bias, start, length, head, stride, first, g_min, C, W, K, GATE)
    since = tl.exp2(sums(through(C, C), g, TERMS))
    rows_q *= since
    rows_k *= since
    ends *= tl.exp2(sums(after(C, C), g, TERMS))
    passed *= tl.exp2(tl.sum(g, 0))
    q_factor = tl.load(q_norm + record * C + rows)[:, None]
    k_factor = tl.load(k_norm + record * C + rows)[:, None]
    Q = load_rows(q, start, length, head, stride, first, C, W, K).to(tl.float32) * (q_factor * scale)
    X = load_rows(k, start, length, head, stride, first, C, W, K).to(tl.float32) * k_factor
    columns = tl.zeros([C, W], tl.float32)
    pairs = dpairs + 2 * record * C * C
    if FROM > 1:
        x = sums(through(C, TILE), g, TERMS) + middle
        rows_q, rows_k, columns = block_grads(
            pairs, Q, X, tl.exp2(x), tl.exp2(-x), in_tiles(C), rows_q, rows_k, columns, HALF, SPLIT, PRECISION
        )
    for e in tl.static_range(6):
        if (FROM << e) < C:
            factor = tl.exp2(sums(to_border(C, FROM << e), g, TERMS))
            second = second_half(C, FROM << e)
            rows_q, rows_k, columns = block_grads(
                pairs, Q, X, tl.where(second, factor, 0.0), tl.where(second, 0.0, factor), in_halves(C, FROM << e),
                rows_q, rows_k, columns, HALF, SPLIT, PRECISION,
            )  # fmt: skip

    # Reads within the chunk from a row on, and writes that leave it before the row: neither sum cancels
    later = sums(from_row(C), Q * rows_q + X * (rows_k - columns), TERMS)
    earlier = sums(before(C), X * ends, TERMS)
    dg = tl.where(live, later + earlier + passed[None, :], 0.0)
    dlogit, by_rate = gate_backward(raw, rate, bias, g_min, dg, GATE)
    store_rows(dz, dlogit, start, length, head, stride, first, C, W, K)
    if GATE != 0:
        tl.store(dbias + record * K + channels, tl.sum(dlogit, 0))
        tl.store(drate + record * parts + part, tl.sum(tl.sum(by_rate, 1), 0))

    own = tl.load(down + record * C + rows)[:, None]
    dQ = rows_q + own * X
    dK = rows_k + columns + ends + own * Q
    if NORM:
        dQ = (dQ * scale - Q * (tl.load(along_q + record * C + rows) / scale)[:, None]) * q_factor
        dK = (dK - X * tl.load(along_k + record * C + rows)[:, None]) * k_factor
    else:
        dQ *= scale
    store_rows(dq, dQ, start, length, head, stride, first, C, W, K)
    store_rows(dk, dK, start, length, head, stride, first, C, W, K)

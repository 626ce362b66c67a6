"""The serial kernels: the state forward through the chunks of a segment, its gradient back.

The state is held transposed, [V, K], a slice of V rows a program: then every product has a register tensor on the left
and a [C, .] tile of the workspace on the right, and nothing but loads crosses between slices.
"""

import triton
import triton.language as tl

from perilune.ops.kda.kernels.dot import dot
from perilune.ops.kda.kernels.rows import slice_of_head
from perilune.ops.launcher import Launcher


@triton.jit
def store_tokens(x, y, start, length, head, H, D, first, C: tl.constexpr, W: tl.constexpr):
    """y [W, C] to columns first .. first + W of one head of x [tokens, H, D], but for rows from `length` on."""
    rows = tl.arange(0, C)
    at = (start + rows).to(tl.int64)[:, None] * H * D + head * D + first + tl.arange(0, W)[None, :]
    tl.store(x + at, tl.trans(y.to(x.dtype.element_ty)), mask=(rows < length)[:, None])


@Launcher
@triton.jit
def scan_kernel(
    v, q_since, k_since, k_until, solve, pairs, retained, own, strength,
    initial, final, o, residuals, states,
    starts, lengths, segments,
    H, V,
    C: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    VALUES: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: columns `first .. first + W` of V, of one segment and head.

    v [tokens, H * V], the matrices of the records, `residuals` [chunks * H * C, V] and `states` [chunks * H * V, K]
    are tensor descriptors; initial, final: float32 [segments, H, K, V]; o: [tokens, H, V].
    VALUES: without it v is zero, and what comes out is how a state passes through.  OUTPUT: write o.  KEEP: write
    the residuals, and the states that enter each chunk.
    """
    first, head, segment = slice_of_head(H, V, W)
    channels = tl.arange(0, K)
    rows = tl.arange(0, C)
    whole = (segment * H + head).to(tl.int64) * K * V + channels[None, :] * V + (first + tl.arange(0, W))[:, None]
    S = tl.load(initial + whole)  # [W, K]
    for chunk in range(tl.load(segments + segment), tl.load(segments + segment + 1)):
        record = chunk * H + head
        start = tl.load(starts + chunk)
        length = tl.load(lengths + chunk)
        b = tl.load(strength + record * C + rows)
        k_in = k_since.load([record * C, 0])
        half: tl.constexpr = k_in.dtype
        Sh = S.to(half)
        if KEEP:
            states.store([record * V + first, 0], Sh)
        Y = -dot(Sh, tl.trans(k_in), PRECISION=PRECISION)  # [W, C]
        if VALUES:
            Y += tl.trans(v.load([start.to(tl.int32), head * V + first])).to(tl.float32)
        Y = tl.where((rows < length)[None, :], Y, 0.0)  # behind the end stands the next sequence
        R = dot((Y * b[None, :]).to(half), tl.trans(solve.load([record * C, 0])), acc=Y, PRECISION=PRECISION)
        if KEEP:
            residuals.store([record * C, first], tl.trans(R.to(half)))
        U = R * b[None, :]
        Uh = U.to(half)
        if OUTPUT:
            O = U * tl.load(own + record * C + rows)[None, :]
            O = dot(Sh, tl.trans(q_since.load([record * C, 0])), acc=O, PRECISION=PRECISION)
            O = dot(Uh, tl.trans(pairs.load([record * C, 0])), acc=O, PRECISION=PRECISION)
            store_tokens(o, O, start, length, head, H, V, first, C, W)
        S *= tl.load(retained + record * K + channels)[None, :]
        S = dot(Uh, k_until.load([record * C, 0]), acc=S, PRECISION=PRECISION)
    tl.store(final + whole, S)


@Launcher
@triton.jit
def reverse_scan_kernel(
    do, q_since, k_since, k_until, solve, pairs, retained, own, strength,
    dfinal, dinitial, dz, dstates,
    starts, lengths, segments,
    H, V,
    C: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    OUTPUT: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state from the end of a segment to its start, programs as in `scan_kernel`.

    OUTPUT: there is do, descriptor [tokens, H * V]; without it, it is zero.  KEEP: write `dz`, descriptor
    [chunks * H * C, V], the gradients of Z = Diag(beta) Y, and `dstates`, descriptor [chunks * H * V, K], those of
    the states that leave each chunk.
    """
    first, head, segment = slice_of_head(H, V, W)
    channels = tl.arange(0, K)
    rows = tl.arange(0, C)
    whole = (segment * H + head).to(tl.int64) * K * V + channels[None, :] * V + (first + tl.arange(0, W))[:, None]
    dS = tl.load(dfinal + whole)  # [W, K]
    begin = tl.load(segments + segment)
    end = tl.load(segments + segment + 1)
    for back in range(end - begin):
        chunk = end - 1 - back
        record = chunk * H + head
        start = tl.load(starts + chunk)
        length = tl.load(lengths + chunk)
        b = tl.load(strength + record * C + rows)
        k_out = k_until.load([record * C, 0])
        half: tl.constexpr = k_out.dtype
        dSh = dS.to(half)
        if KEEP:
            dstates.store([record * V + first, 0], dSh)
        dU = dot(dSh, tl.trans(k_out), PRECISION=PRECISION)  # [W, C]
        if OUTPUT:
            read = tl.trans(do.load([start.to(tl.int32), head * V + first]))
            dO = tl.where((rows < length)[None, :], read, 0.0).to(half)
            dU += dO.to(tl.float32) * tl.load(own + record * C + rows)[None, :]
            dU = dot(dO, pairs.load([record * C, 0]), acc=dU, PRECISION=PRECISION)
        dZ = dot((dU * b[None, :]).to(half), solve.load([record * C, 0]), acc=dU, PRECISION=PRECISION)
        if KEEP:
            dz.store([record * C, first], tl.trans(dZ.to(half)))
        dY = dZ * b[None, :]
        dS *= tl.load(retained + record * K + channels)[None, :]
        if OUTPUT:
            dS = dot(dO, q_since.load([record * C, 0]), acc=dS, PRECISION=PRECISION)
        dS = dot((-dY).to(half), k_since.load([record * C, 0]), acc=dS, PRECISION=PRECISION)
    tl.store(dinitial + whole, dS)

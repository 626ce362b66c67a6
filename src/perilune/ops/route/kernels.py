"""Routing in Triton: a program for every token, whose scores it holds in registers."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher

NOBODY = tl.constexpr(-(1 << 63))


@Launcher
@triton.jit
def route_kernel(
    scores, stride, bias, ids, weights, E, k, scaling,
    RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """ids, weights [M, k] of scores [M, E], rows `stride` apart, and bias [E] or None.

    The k largest one after the other.  Value and index make one key: the float's pattern, as an integer that grows with
    it, above the index from the end; so of equal scores the one with the lowest index is largest.
    BLOCK, COUNT: powers of two, at least E and k.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    here = expert < E
    x = tl.load(scores + row * stride + expert, mask=here, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + expert, mask=here, other=0.0).to(tl.float32)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding 0 makes -0 and +0 equal
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = tl.where(here, order * 4294967296 + (BLOCK - expert), NOBODY)
    slot = tl.arange(0, COUNT)
    chosen = tl.zeros([COUNT], tl.int32)
    for i in range(k):
        best = tl.max(key, 0)
        place = BLOCK - (best & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(slot == i, place, chosen)
        key = tl.where(expert == place, NOBODY, key)
    there = slot < k
    w = tl.load(scores + row * stride + chosen, mask=there, other=0.0).to(tl.float32)
    if RENORMALIZE:
        w = tl.div_rn(w, tl.full([COUNT], 1e-20, tl.float32) + tl.sum(w, 0))
    tl.store(ids + row * k + slot, chosen.to(tl.int64), mask=there)
    tl.store(weights + row * k + slot, (w * scaling).to(weights.dtype.element_ty), mask=there)


@Launcher
@triton.jit
def route_grads_kernel(
    scores, stride, ids, dweights, dscores, E, scaling,
    RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dscores [M, E] of scores [M, E], rows `stride` apart, and ids, dweights [M, K]; 0 where nothing was chosen.

    With w_j = scaling s_j / S and S = sum_r s_r + 1e-20 over those chosen, or without S where RENORMALIZE is not set:

        ds_j = scaling (dw_j - sum_r dw_r s_r / S) / S
    """
    row = tl.program_id(0).to(tl.int64)
    total = 1e-20
    along = 0.0
    if RENORMALIZE:
        for i in tl.static_range(K):
            s = tl.load(scores + row * stride + tl.load(ids + row * K + i)).to(tl.float32)
            total += s
            along += s * tl.load(dweights + row * K + i).to(tl.float32)
        along = tl.div_rn(along, total)
    expert = tl.arange(0, BLOCK)
    ds = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        d = tl.load(dweights + row * K + i).to(tl.float32) * scaling
        if RENORMALIZE:
            d = tl.div_rn(d - along * scaling, total)
        ds = tl.where(expert == tl.load(ids + row * K + i), d, ds)
    tl.store(dscores + row * E + expert, ds.to(dscores.dtype.element_ty), mask=expert < E)

"""What happens to rows between the products: to and from their tokens, and through the activation's derivatives."""

import triton
import triton.language as tl


@triton.jit
def spread_kernel(x, row, occupied, rows, D, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """rows [P, D]: those of x [M, D] where `row: [M, TOP_K]` says; zeros for the empty slots, which come last."""
    token = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    here = channel < D
    total = tl.load(occupied)
    value = tl.load(x + token.to(tl.int64) * D + channel, mask=here)
    for j in range(TOP_K):
        to = tl.load(row + token.to(tl.int64) * TOP_K + j)
        tl.store(rows + to.to(tl.int64) * D + channel, tl.where(to < total, value, 0.0), mask=here)


@triton.jit
def gather_kernel(rows, row, weights, occupied, out, D, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, D]: every token's rows of [P, D] summed in the order of its slots, weighted if there are weights."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    here = channel < D
    total = tl.load(occupied)
    sums = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        at = tl.load(row + token * TOP_K + j)
        value = tl.load(rows + at.to(tl.int64) * D + channel, mask=here & (at < total), other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.where(at < total, tl.load(weights + token * TOP_K + j), 0.0)
        sums += value
    tl.store(out + token * D + channel, sums.to(out.dtype.element_ty), mask=here)


@triton.jit
def tanh(x):
    """By its series near zero, where the exponential form cancels."""
    z = x * x
    near = x * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 - z * (17.0 / 315))))
    return tl.where(z < 0.05, near, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def slopes_kernel(
    da, gates, ups, slot, weights, occupied, dinner, weighted, dweights, F, beta_gate, beta_up,
    SITU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row through the activation, backwards.

    da: [P, F] gradient of a = f(gate, up) for a routing weight of one.
    Writes dinner [P, 2 F], the gradient of gate | up; weighted [P, F], p a; dweights [P], <da, a>, by slot.
    """
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    here = (channel < F) & (row < tl.load(occupied))
    at = row.to(tl.int64) * F + channel
    to = tl.load(slot + row)
    p = tl.load(weights + to)
    p = tl.where(row < tl.load(occupied), p, 0.0)
    d = tl.load(da + at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(gates + at, mask=here, other=0.0).to(tl.float32)
    u = tl.load(ups + at, mask=here, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    if SITU:
        t = tanh(g / beta_gate)
        r = tanh(u / beta_up)
        opened = beta_gate * t * s
        raised = beta_up * r
        slope = (1.0 - t * t) * s + opened * (1.0 - s)
        raised_slope = 1.0 - r * r
        dup = opened * raised_slope
    else:
        opened = g * s
        raised = u
        slope = s + opened * (1.0 - s)
        dup = opened
    a = opened * raised
    tl.store(dweights + to, tl.sum(d * a, 0))
    d *= p
    dtype = dinner.dtype.element_ty
    inside = channel < F
    tl.store(weighted + at, (a * p).to(dtype), mask=inside)
    tl.store(dinner + at + row.to(tl.int64) * F, (d * slope * raised).to(dtype), mask=inside)
    tl.store(dinner + at + row.to(tl.int64) * F + F, (d * dup).to(dtype), mask=inside)

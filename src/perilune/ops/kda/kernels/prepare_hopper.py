"""`prepare_kernel` for Hopper's tensor cores, in Gluon: bounded decay, chunks of 64 rows, 16-bit inputs.

A chunk in two groups of 32 rows.  Pairs within a group are one product of tf32, with the decay of every pair as two
factors that refer to half the worst decay of a group; pairs across the groups are another, whose columns refer to the
border between them.  A thread holds 8 rows of two channels, so that sums over rows stay in registers and loads and
stores are whole lines.  q is above k in both products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from perilune.ops.barriers import barriers, retire
from perilune.ops.kda.kernels.hardware import LOG2E, add, exp2, exp2_minus, reciprocal, sigmoid
from perilune.ops.launcher import Launcher

# The tensor cores cut two factors to tf32 instead of rounding them: 0.72 of half a last bit each, on average
CUT = gl.constexpr(1.0 + 2 * 0.72 * 2.0**-11)


@gluon.jit
def widened(x):
    """x as float32, pairs of bfloat16 in two instructions."""
    if x.dtype == gl.bfloat16:
        code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(code, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x.to(gl.float32)


@gluon.jit
def rows_of(smem, first: gl.constexpr, ROWS: gl.constexpr):
    """[4, 8, K] of smem [64, K]: the group that starts at row `first`, as float32."""
    K: gl.constexpr = smem.shape[1]
    lines: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [4, K // 64], [1, 0])
    x = widened(smem.slice(first, 32).load(lines))
    return gl.convert_layout(gl.reshape(x, [4, 8, K]), ROWS, assert_trivial=True)


@gluon.jit
def stacked(a, b):
    """[4, 8, K] twice -> [64, K], a above b."""
    K: gl.constexpr = a.shape[2]
    return gl.reshape(gl.permute(gl.join(a, b), (3, 0, 1, 2)), [64, K])


@gluon.jit
def clear(smem, length, other, LINES: gl.constexpr):
    """Sets the rows of smem [64, K] from `length` on, which another document may have."""
    live = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None] < length
    smem.store(gl.where(live, smem.load(LINES), other).to(smem.dtype))


@gluon.jit
def offset(totals, first: gl.constexpr, octet, OCTETS: gl.constexpr):
    """([4, 1, K], [1, 1, K]): sums of totals [8, K] over the octets before each of a group, and over all of them."""
    a = totals.slice(first, 1).load(OCTETS)[:, None, :]
    b = a + totals.slice(first + 1, 1).load(OCTETS)[:, None, :]
    c = b + totals.slice(first + 2, 1).load(OCTETS)[:, None, :]
    all = c + totals.slice(first + 3, 1).load(OCTETS)[:, None, :]
    return gl.where(octet == 0, 0.0, gl.where(octet == 1, a, gl.where(octet == 2, b, c))), all


@gluon.jit
def factor(factors, which: gl.constexpr, first: gl.constexpr, ROWS: gl.constexpr):
    """[4, 8, 1] of factors [2 * 8, 8]"""
    return factors.slice(8 * which + first, 4).load(gl.SliceLayout(2, ROWS))[:, :, None]


@gluon.jit
def in_16_bits(x, upper: gl.constexpr, lower: gl.constexpr):
    """The bits of x [64, 64] with its halves in two types: the same one, or bfloat16 above float16."""
    if upper == lower:
        return x.to(upper).to(gl.int16, bitcast=True)
    else:
        gl.static_assert((upper == gl.bfloat16) and (lower == gl.float16))
        above = (gl.arange(0, 64, gl.SliceLayout(1, x.type.layout)) < 32).to(gl.int32)[:, None]
        code: gl.constexpr = """{ .reg .pred p; .reg .b32 a, b; setp.ne.s32 p, $3, 0;
            cvt.rn.bf16x2.f32 a, $2, $1; cvt.rn.f16x2.f32 b, $2, $1; selp.b32 $0, a, b, p; }"""
        return gl.inline_asm_elementwise(code, "=r,f,f,r,r", [x, above], dtype=gl.int16, is_pure=True, pack=2)


@Launcher
@gluon.jit
def prepare_hopper_kernel(
    q, k, z, beta, A_log, dt_bias,
    q_since, k_since, k_until, solve, pairs, retained, own, strength, q_norm, k_norm,
    starts, lengths,
    scale, g_min, middle, H, stride,
    K: gl.constexpr, NORM: gl.constexpr, BETA_LOGITS: gl.constexpr,
):  # fmt: skip
    """As `prepare_kernel`; q, k, z: descriptors of [64, K] out of [tokens, H K].  K / 16 warps."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, K // 64], [2, 1, 0])  # [4, 8, K] of a group
    OCTETS: gl.constexpr = gl.SliceLayout(1, ROWS)  # [4, K]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [K // 16, 1], [1, 0])  # [64, K], four threads a row
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [K // 16, 1], [1, 0])  # [32, 64], whole rows a warp
    NEAR: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, K // 64], [16, 2048 // K, 8])  # [64, 32]
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, K // 64], [16, 4096 // K, 8])  # [64, 64]

    head = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    start = gl.load(starts + chunk)
    length = gl.load(lengths + chunk)
    record = gl.program_id(0).to(gl.int64)

    q_smem = gl.allocate_shared_memory(q.dtype, [64, K], q.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [64, K], k.layout)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    operand = gl.allocate_shared_memory(gl.float32, [64, K], wide)
    column = gl.allocate_shared_memory(gl.float32, [64, K], wide)
    z_smem = column._reinterpret(z.dtype, [64, K], z.layout)  # until there are columns
    staged = operand._reinterpret(gl.int16, [128, 64], gl.NVMMASharedLayout(128, 16))  # when the products are done
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    totals = gl.allocate_shared_memory(gl.float32, [8, K], flat)
    factors = gl.allocate_shared_memory(gl.float32, [16, 8], flat)
    arrivals = barriers(2, 1)
    z_here, here = arrivals.index(0), arrivals.index(1)
    mbarrier.expect(z_here, z.block_type.nbytes)
    mbarrier.expect(here, q.block_type.nbytes + k.block_type.nbytes)
    first = start.to(gl.int32)
    tma.async_copy_global_to_shared(z, [first, head * K], z_here, z_smem)
    tma.async_copy_global_to_shared(q, [first, head * K], here, q_smem)
    tma.async_copy_global_to_shared(k, [first, head * K], here, k_smem)

    channel = gl.arange(0, K, gl.SliceLayout(0, OCTETS))
    line = gl.arange(0, 64, gl.SliceLayout(1, LINES))
    octet = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None][:, :, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :][:, :, None]
    # The gate's logits as the exponents of 2 that its sigmoid needs; the rate not 0, which times infinity were NaN
    rate = gl.minimum(gl.exp(gl.load(A_log + head).to(gl.float32)) * -LOG2E, -1e-30)
    shift = (rate * gl.load(dt_bias + head * K + channel).to(gl.float32))[None, :][:, None, :]
    b = gl.load(beta + start * stride + head + line * stride, mask=line < length, other=0.0).to(gl.float32)

    # What each row of 8 retains from their start, in log2
    mbarrier.wait(z_here, 0)
    if length < 64:
        clear(z_smem, length, float("-inf"), LINES)
    g0 = (g_min * LOG2E) * reciprocal(1.0 + exp2(rows_of(z_smem, 0, ROWS) * rate + shift))
    g1 = (g_min * LOG2E) * reciprocal(1.0 + exp2(rows_of(z_smem, 32, ROWS) * rate + shift))
    totals.slice(0, 4).store(gl.sum(g0, 1))
    totals.slice(4, 4).store(gl.sum(g1, 1))
    g0 = gl.associative_scan(g0, 1, add)
    g1 = gl.associative_scan(g1, 1, add)

    mbarrier.wait(here, 0)
    if length < 64:
        clear(q_smem, length, 0.0, LINES)
        clear(k_smem, length, 0.0, LINES)
    q_line = widened(q_smem.load(LINES))
    k_line = widened(k_smem.load(LINES))
    if NORM:
        q_factor = gl.rsqrt(gl.sum(q_line * q_line, 1) + 1e-6)
        k_factor = gl.rsqrt(gl.sum(k_line * k_line, 1) + 1e-6)
    else:
        q_factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LINES))
        k_factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LINES))
    factors.slice(0, 8).store(gl.reshape(q_factor * scale, [8, 8]))
    factors.slice(8, 8).store(gl.reshape(k_factor, [8, 8]))
    gl.store(q_norm + record * 64 + line, q_factor)
    gl.store(k_norm + record * 64 + line, k_factor)
    gl.store(own + record * 64 + line, gl.sum(q_line * k_line, 1) * q_factor * k_factor * scale)
    if BETA_LOGITS:
        b = gl.where(line < length, sigmoid(b), 0.0)
    gl.store(strength + record * 64 + line, b)

    offset0, whole0 = offset(totals, 0, octet, OCTETS)
    offset1, whole1 = offset(totals, 4, octet, OCTETS)
    gl.store(retained + record * K + channel, exp2(gl.max(gl.max(whole0 + whole1, 1), 0)))

    # First group; exponents stay within +-reach
    reach = 2 * middle
    short = exp2_minus(reach)
    at = (8 * octet + row) * K + channel[None, :][:, None, :]
    through = g0 + (offset0 + reach)
    to = exp2(through)
    Q = rows_of(q_smem, 0, ROWS) * factor(factors, 0, 0, ROWS) * to
    X = rows_of(k_smem, 0, ROWS) * factor(factors, 1, 0, ROWS)
    near = X * exp2_minus(through)
    far = near * exp2(whole0 + reach)
    X *= to
    operand.store(stacked(Q, X))
    column.store(stacked(far, near))
    fence_async_shared()
    zero0 = gl.zeros([64, 32], gl.float32, NEAR)
    pairs0 = warpgroup_mma(operand, column.slice(32, 32).permute((1, 0)), zero0, use_acc=False, is_async=True)
    gl.store(q_since + record * 64 * K + at, (Q * short).to(q_since.dtype.element_ty))
    gl.store(k_since + record * 64 * K + at, (X * short).to(k_since.dtype.element_ty))
    gl.store(k_until + record * 64 * K + at, (far * exp2(whole1)).to(k_until.dtype.element_ty))

    # Second group
    at += 32 * K
    through = g1 + (offset1 + reach)
    to = exp2(through)
    Q = rows_of(q_smem, 32, ROWS) * factor(factors, 0, 4, ROWS) * to
    X = rows_of(k_smem, 32, ROWS) * factor(factors, 1, 4, ROWS)
    near = X * exp2_minus(through)
    X *= to
    gl.store(k_until + record * 64 * K + at, (near * exp2(whole1 + reach)).to(k_until.dtype.element_ty))
    before = exp2(whole0)
    gl.store(q_since + record * 64 * K + at, (Q * short * before).to(q_since.dtype.element_ty))
    gl.store(k_since + record * 64 * K + at, (X * short * before).to(k_since.dtype.element_ty))
    pairs0 = warpgroup_mma_wait(0, deps=[pairs0])
    operand.store(stacked(Q, X))
    column.slice(32, 32).store(gl.reshape(near, [32, K]))
    fence_async_shared()
    zero1 = gl.zeros([64, 64], gl.float32, PAIRS)
    pairs1 = warpgroup_mma(operand, column.permute((1, 0)), zero1, use_acc=False, is_async=True)

    # P and A go out in whole rows
    i = gl.arange(0, 64, gl.SliceLayout(1, NEAR))[:, None]
    j = gl.arange(0, 32, gl.SliceLayout(0, NEAR))[None, :]
    pairs0 = gl.where(i % 32 > j, pairs0 * CUT, 0.0)
    pairs0 = gl.reshape(gl.permute(gl.join(pairs0, zero0), (0, 2, 1)), [64, 64])
    pairs1 = warpgroup_mma_wait(0, deps=[pairs1])
    i = gl.arange(0, 64, gl.SliceLayout(1, PAIRS))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, PAIRS))[None, :]
    pairs1 = gl.where(i % 32 + 32 > j, pairs1 * gl.where(j < 32, short * CUT, CUT), 0.0)
    P: gl.constexpr = pairs.dtype.element_ty
    A: gl.constexpr = solve.dtype.element_ty
    staged.slice(0, 64).store(in_16_bits(pairs0, P, A))
    staged.slice(64, 64).store(in_16_bits(pairs1, P, A))
    i = gl.arange(0, 32, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    at = i * 64 + j
    gl.store(pairs + record * 4096 + at, staged.slice(0, 32).load(SQUARE).to(P, bitcast=True))
    gl.store(solve + record * 4096 + at, staged.slice(32, 32).load(SQUARE).to(A, bitcast=True))
    gl.store(pairs + record * 4096 + 2048 + at, staged.slice(64, 32).load(SQUARE).to(P, bitcast=True))
    gl.store(solve + record * 4096 + 2048 + at, staged.slice(96, 32).load(SQUARE).to(A, bitcast=True))
    retire(arrivals, 2)

"""`prepare_kernel` for Hopper's tensor cores, in Gluon: bounded decay, K = 128, chunks of 64 rows, 16-bit inputs.

One thread holds the 16 rows of a tile for two channels, so that sums over the rows of a tile stay in registers and
loads and stores are whole lines; products take both operands from shared memory, with q above k, so that the pairs of
both are one product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from perilune.ops.kda.kernels.gate import LOG2E as _LOG2E

LOG2E = gl.constexpr(_LOG2E.value)
# [tiles, 16, K] over 8 warps, and [tiles, tiles, K] with all tiles in a thread
ROWS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 2], [2, 1, 0]))
TILES = gl.constexpr(gl.BlockedLayout([1, 4, 2], [1, 1, 32], [4, 1, 2], [2, 1, 0]))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # [64, K] in 16-byte pieces
PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))
PAIRS32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 8]))


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(-x * LOG2E))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def row_numbers():
    """[4, 16, 1]"""
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))
    return 16 * tile[:, None][:, :, None] + row[None, :][:, :, None]


@gluon.jit
def channel_numbers(K: gl.constexpr):
    """[1, 1, K]"""
    return gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))[None, :][:, None, :]


@gluon.jit
def over_tiles(whole, m: gl.constexpr, LATER: gl.constexpr):
    """[4, K] -> [4, 1, K]: 2 to the sum over the tiles before each (or after it), in its group of m."""
    every = gl.convert_layout(whole, gl.SliceLayout(0, TILES))[None, :, :]
    a = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))[:, None][:, :, None]
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :][:, :, None]
    if LATER:
        held = (a // m == c // m) & (c > a)
    else:
        held = (a // m == c // m) & (c < a)
    total = gl.sum(gl.where(held, every, 0.0), 1)
    return gl.exp2(gl.convert_layout(total, gl.SliceLayout(1, ROWS)))[:, None, :]


@gluon.jit
def by_row(x):
    """[64] -> [4, 16, 1]"""
    return gl.convert_layout(gl.reshape(x, [4, 16]), gl.SliceLayout(2, ROWS))[:, :, None]


@gluon.jit
def halves(smem, column_smem, Q, X, until, second, K: gl.constexpr):
    """To shared memory: q above k for the rows of second halves, and the columns of first ones."""
    smem.slice(0, 64).store(gl.reshape(gl.where(second, Q, 0.0), [64, K]).to(smem.dtype))
    smem.slice(64, 64).store(gl.reshape(gl.where(second, X, 0.0), [64, K]).to(smem.dtype))
    column_smem.store(gl.reshape(gl.where(second, 0.0, until), [64, K]).to(smem.dtype))


@gluon.jit
def prepare_hopper_kernel(
    q, k, z, beta, A_log, dt_bias,
    q_since, k_since, k_until, solve, pairs, retained, own, strength, q_norm, k_norm,
    starts, lengths,
    scale, g_min, middle, H,
    K: gl.constexpr, NORM: gl.constexpr, BETA_LOGITS: gl.constexpr,
):  # fmt: skip
    """As `prepare_kernel`."""
    head = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    start = gl.load(starts + chunk)
    length = gl.load(lengths + chunk)
    record = (chunk * H + head).to(gl.int64)
    rows = row_numbers()
    channels = channel_numbers(K)
    live = rows < length
    at = (start + rows).to(gl.int64) * H * K + head * K + channels
    rate = gl.exp(gl.load(A_log + head).to(gl.float32))
    bias = gl.load(dt_bias + head * K + channels).to(gl.float32)
    raw = gl.load(z + at, mask=live, other=0.0).to(gl.float32)
    g = gl.where(live, g_min * LOG2E * sigmoid(rate * (raw + bias)), 0.0)
    through = gl.associative_scan(g, 1, add)
    whole = gl.sum(g, 1)
    Q = gl.load(q + at, mask=live, other=0.0).to(gl.float32)
    X = gl.load(k + at, mask=live, other=0.0).to(gl.float32)

    line = gl.arange(0, 64, gl.SliceLayout(1, LINES))
    token = (start + line).to(gl.int64)
    at = token[:, None] * H * K + head * K + gl.arange(0, K, gl.SliceLayout(0, LINES))[None, :]
    q_line = gl.load(q + at, mask=(line < length)[:, None], other=0.0).to(gl.float32)
    k_line = gl.load(k + at, mask=(line < length)[:, None], other=0.0).to(gl.float32)
    if NORM:
        q_factor = gl.rsqrt(gl.sum(q_line * q_line, 1) + 1e-6)
        k_factor = gl.rsqrt(gl.sum(k_line * k_line, 1) + 1e-6)
    else:
        q_factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LINES))
        k_factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LINES))
    gl.store(q_norm + record * 64 + line, q_factor)
    gl.store(k_norm + record * 64 + line, k_factor)
    gl.store(own + record * 64 + line, gl.sum(q_line * k_line, 1) * q_factor * k_factor * scale)
    b = gl.load(beta + token * H + head, mask=line < length, other=0.0).to(gl.float32)
    if BETA_LOGITS:
        b = gl.where(line < length, sigmoid(b), 0.0)
    gl.store(strength + record * 64 + line, b)
    Q *= by_row(q_factor * scale)
    X *= by_row(k_factor)

    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    operand = gl.allocate_shared_memory(gl.float32, [128, K], wide)
    column = gl.allocate_shared_memory(gl.float32, [64, K], wide)
    column.store(gl.reshape(X * gl.exp2(-through - middle), [64, K]))
    until = X * gl.exp2(whole[:, None, :] - through)
    factor = gl.exp2(through)
    Q *= factor
    X *= factor
    # All that follows is these three, times what whole tiles retain
    ck = record * 64 * K + rows * K + channels
    before = over_tiles(whole, 4, False)
    gl.store(q_since + ck, (Q * before).to(q_since.dtype.element_ty))
    gl.store(k_since + ck, (X * before).to(k_since.dtype.element_ty))
    gl.store(k_until + ck, (until * over_tiles(whole, 4, True)).to(k_until.dtype.element_ty))
    gl.store(
        retained + record * K + gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, ROWS))),
        gl.convert_layout(gl.exp2(gl.sum(whole, 0)), gl.SliceLayout(0, gl.SliceLayout(1, ROWS))),
    )

    operand.slice(0, 64).store(gl.reshape(Q * gl.exp2(middle), [64, K]))
    operand.slice(64, 64).store(gl.reshape(X * gl.exp2(middle), [64, K]))
    fence_async_shared()
    i = gl.arange(0, 128, gl.SliceLayout(1, PAIRS))[:, None] % 64
    j = gl.arange(0, 64, gl.SliceLayout(0, PAIRS))[None, :]
    zero32 = gl.zeros([128, 64], gl.float32, PAIRS32)
    tile = warpgroup_mma(operand, column.permute((1, 0)), zero32, use_acc=False)
    both = gl.where((i // 16 == j // 16) & (i > j), gl.convert_layout(tile, PAIRS), 0.0)

    half: gl.constexpr = gl.float16 if NORM else gl.bfloat16  # keys of any length may not fit the first
    operand16 = operand._reinterpret(half, [2, 128, K], gl.NVMMASharedLayout(128, 16))
    column16 = column._reinterpret(half, [2, 64, K], gl.NVMMASharedLayout(128, 16))
    number = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None][:, :, None]
    second = number % 2 == 1
    halves(operand16.index(0), column16.index(0), Q, X, until, second, K)
    second = number // 2 == 1
    between = over_tiles(whole, 2, False)
    until *= over_tiles(whole, 2, True)
    halves(operand16.index(1), column16.index(1), Q * between, X * between, until, second, K)
    fence_async_shared()
    zero = gl.zeros([128, 64], gl.float32, PAIRS)
    near = warpgroup_mma(operand16.index(0), column16.index(0).permute((1, 0)), zero, use_acc=False)
    both += gl.where((i // 32 == j // 32) & (i // 16 > j // 16), near, 0.0)
    both = warpgroup_mma(operand16.index(1), column16.index(1).permute((1, 0)), both)

    top = gl.arange(0, 128, gl.SliceLayout(1, PAIRS))[:, None] < 64
    cc = record * 64 * 64 + i * 64 + j
    gl.store(pairs + cc, both.to(pairs.dtype.element_ty), mask=top)
    gl.store(solve + cc, both.to(solve.dtype.element_ty), mask=(top == 0) & (j < 64))

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
def stage(smem, top, bottom, column, column_smem, K: gl.constexpr):
    """q above k, and the columns, to shared memory."""
    smem.slice(0, 64).store(gl.reshape(top, [64, K]).to(smem.dtype))
    smem.slice(64, 64).store(gl.reshape(bottom, [64, K]).to(smem.dtype))
    column_smem.store(gl.reshape(column, [64, K]).to(smem.dtype))


@gluon.jit
def prepare_hopper_kernel(
    q, k, z, beta, A_log, dt_bias,
    q_since, k_since, k_until, solve, pairs, retained, own, strength, q_norm, k_norm,
    starts, lengths,
    scale, g_min, middle, H,
    K: gl.constexpr, NORM: gl.constexpr, BETA_LOGITS: gl.constexpr,
):  # fmt: skip
    """As `prepare_kernel`; solve: float16."""
    head = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    start = gl.load(starts + chunk)
    length = gl.load(lengths + chunk)
    record = (chunk * H + head).to(gl.int64)
    rows = row_numbers()
    channels = channel_numbers(K)
    live = rows < length
    at = (start + rows).to(gl.int64) * H * K + head * K + channels
    raw = gl.load(z + at, mask=live, other=0.0).to(gl.float32)
    Q = gl.load(q + at, mask=live, other=0.0).to(gl.float32)
    X = gl.load(k + at, mask=live, other=0.0).to(gl.float32)

    rate = gl.exp(gl.load(A_log + head).to(gl.float32))
    bias = gl.load(dt_bias + head * K + channels).to(gl.float32)
    g = gl.where(live, g_min * LOG2E * sigmoid(rate * (raw + bias)), 0.0)
    through = gl.associative_scan(g, 1, add)
    whole = gl.sum(g, 1)
    since = gl.exp2(through)
    until = gl.exp2(whole[:, None, :] - through)

    row16 = (
        gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None] * 16
        + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :]
    )
    if NORM:
        q_factor = gl.rsqrt(gl.sum(Q * Q, 2) + 1e-6)
        k_factor = gl.rsqrt(gl.sum(X * X, 2) + 1e-6)
    else:
        q_factor = gl.full([4, 16], 1.0, gl.float32, gl.SliceLayout(2, ROWS))
        k_factor = gl.full([4, 16], 1.0, gl.float32, gl.SliceLayout(2, ROWS))
    gl.store(q_norm + record * 64 + row16, q_factor)
    gl.store(k_norm + record * 64 + row16, k_factor)
    Q *= (q_factor * scale)[:, :, None]
    X *= k_factor[:, :, None]
    b = gl.load(beta + (start + row16).to(gl.int64) * H + head, mask=row16 < length, other=0.0).to(gl.float32)
    if BETA_LOGITS:
        b = gl.where(row16 < length, sigmoid(b), 0.0)
    gl.store(strength + record * 64 + row16, b)
    gl.store(own + record * 64 + row16, gl.sum(Q * X, 2))

    ck = record * 64 * K + rows * K + channels
    from_start = since * over_tiles(whole, 4, False)
    gl.store(q_since + ck, (Q * from_start).to(q_since.dtype.element_ty))
    gl.store(k_since + ck, (X * from_start).to(k_since.dtype.element_ty))
    gl.store(k_until + ck, (X * until * over_tiles(whole, 4, True)).to(k_until.dtype.element_ty))
    gl.store(
        retained + record * K + gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, ROWS))),
        gl.convert_layout(gl.exp2(gl.sum(whole, 0)), gl.SliceLayout(0, gl.SliceLayout(1, ROWS))),
    )

    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    operand = gl.allocate_shared_memory(gl.float32, [128, K], wide)
    column = gl.allocate_shared_memory(gl.float32, [64, K], wide)
    to = gl.exp2(through + middle)
    back = gl.exp2(-through - middle)
    stage(operand, Q * to, X * to, X * back, column, K)
    fence_async_shared()
    i = gl.arange(0, 128, gl.SliceLayout(1, PAIRS))[:, None] % 64
    j = gl.arange(0, 64, gl.SliceLayout(0, PAIRS))[None, :]
    zero32 = gl.zeros([128, 64], gl.float32, PAIRS32)
    tile = warpgroup_mma(operand, column.permute((1, 0)), zero32, use_acc=False)
    both = gl.where((i // 16 == j // 16) & (i > j), gl.convert_layout(tile, PAIRS), 0.0)

    operand16 = operand._reinterpret(gl.float16, [2, 128, K], gl.NVMMASharedLayout(128, 16))
    column16 = column._reinterpret(gl.float16, [2, 64, K], gl.NVMMASharedLayout(128, 16))
    number = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None][:, :, None]
    second = number % 2 == 1
    to = gl.where(second, since, 0.0)
    stage(operand16.index(0), Q * to, X * to, gl.where(second, 0.0, X * until), column16.index(0), K)
    second = number // 2 == 1
    to = gl.where(second, since * over_tiles(whole, 2, False), 0.0)
    back = gl.where(second, 0.0, X * until * over_tiles(whole, 2, True))
    stage(operand16.index(1), Q * to, X * to, back, column16.index(1), K)
    fence_async_shared()
    zero = gl.zeros([128, 64], gl.float32, PAIRS)
    near = warpgroup_mma(operand16.index(0), column16.index(0).permute((1, 0)), zero, use_acc=False)
    both += gl.where((i // 32 == j // 32) & (i // 16 > j // 16), near, 0.0)
    both = warpgroup_mma(operand16.index(1), column16.index(1).permute((1, 0)), both)

    top = gl.arange(0, 128, gl.SliceLayout(1, PAIRS))[:, None] < 64
    cc = record * 64 * 64 + i * 64 + j
    gl.store(pairs + cc, both.to(pairs.dtype.element_ty), mask=top)
    gl.store(solve + cc, both.to(solve.dtype.element_ty), mask=(top == 0) & (j < 64))

"""`key_grads_kernel` for Hopper's tensor cores, in Gluon: bounded decay, K = V = 128, chunks of 64 rows, 16-bit inputs.

One program a chunk and head.  What a row reads comes from the state and from the tiles before its own, nearest last; so
an accumulator starts with the state's part, is scaled by what each tile retains as the next one is added, and ends up
referring to the start of the row's tile.  The gradients of columns run the other way.  q stands above k throughout.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from perilune.ops.kda.kernels.prepare_hopper import LOG2E, add, sigmoid

FLAT = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 2], [1, 0]))  # [64, K]: a tile's rows in a thread
ROWS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 2], [2, 1, 0]))  # the same as [4, 16, K]
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # [., 128] in 16-byte pieces
SHORT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # [., 64]
STACK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16]))  # [128, 128]
SINGLE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))  # [64, 128]
HALF = gl.constexpr(gl.NVMMASharedLayout(128, 16))
WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 32))


@gluon.jit
def tiled(x):
    """[64, K] -> [4, 16, K]"""
    return gl.convert_layout(gl.reshape(x, [4, 16, x.shape[1]]), ROWS)


@gluon.jit
def flat(x):
    """[4, 16, K] -> [64, K]"""
    return gl.convert_layout(gl.reshape(x, [64, x.shape[2]]), FLAT)


@gluon.jit
def of_tile(whole, m: gl.constexpr):
    """whole [4, K] -> [K]: the sum of tile m, everywhere."""
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, ROWS)))[:, None]
    return gl.sum(gl.where(tile == m, whole, 0.0), 0)


@gluon.jit
def tile_sums(x, LATER: gl.constexpr):
    """x [4, 16, K] -> [4, 1, K]: sums over the tiles after each, or before it."""
    whole = gl.sum(x, 1)
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, ROWS)))[:, None]
    total = gl.zeros_like(whole)
    for m in gl.static_range(4):
        if LATER:
            total += gl.where(tile < m, of_tile(whole, m)[None, :], 0.0)
        else:
            total += gl.where(tile > m, of_tile(whole, m)[None, :], 0.0)
    return total[:, None, :]


@gluon.jit
def scaled(acc, retained, keep, layout: gl.constexpr):
    """acc times retained [K] where keep does not hold."""
    factor = gl.convert_layout(retained, gl.SliceLayout(0, layout))[None, :]
    return acc * gl.where(keep, 1.0, factor)


@gluon.jit
def stage_split(high, low, x):
    """x as a sum of two numbers of 16 bits: what a pair gives its row and column cancels in the decay's gradient."""
    first = x.to(high.dtype)
    high.store(first)
    low.store((x - first.to(gl.float32)).to(low.dtype))


@gluon.jit
def key_grads_hopper_kernel(
    q, k, z, A_log, dt_bias, do,
    q_norm, k_norm, residuals, states, dz_, dstates, dpairs, down, along_q, along_k,
    dq, dk, dz, dbias, drate,
    starts, lengths,
    scale, g_min, middle, H,
    K: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """As `key_grads_kernel`, with W = K."""
    head = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    start = gl.load(starts + chunk)
    length = gl.load(lengths + chunk)
    record = (chunk * H + head).to(gl.int64)

    # The rows of the chunk
    row = gl.arange(0, 64, gl.SliceLayout(1, FLAT))[:, None]
    channel = gl.arange(0, K, gl.SliceLayout(0, FLAT))[None, :]
    this = gl.arange(0, 64, gl.SliceLayout(1, FLAT))
    live = row < length
    at = (start + row).to(gl.int64) * H * K + head * K + channel
    rate = gl.exp(gl.load(A_log + head).to(gl.float32))
    bias = gl.load(dt_bias + head * K + channel).to(gl.float32)
    logit = gl.load(z + at, mask=live, other=0.0).to(gl.float32) + bias
    g = tiled(gl.where(live, g_min * LOG2E * sigmoid(rate * logit), 0.0))
    through = flat(gl.associative_scan(g, 1, add))
    whole = gl.sum(g, 1)
    border = flat(whole[:, None, :] + gl.zeros_like(g))
    retained_0 = gl.exp2(of_tile(whole, 0))
    retained_1 = gl.exp2(of_tile(whole, 1))
    retained_2 = gl.exp2(of_tile(whole, 2))
    retained_3 = gl.exp2(of_tile(whole, 3))

    # What states bring
    line = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None]
    lane = gl.arange(0, K, gl.SliceLayout(0, LINES))[None, :]
    deep = gl.arange(0, 128, gl.SliceLayout(1, LINES))[:, None]
    vk = record * K * K + deep * K + lane
    cv = record * 64 * K + line * K + lane
    S = gl.load(states + vk)
    dS = gl.load(dstates + vk)
    # Shared memory is short: the same two blocks serve three times
    block = gl.allocate_shared_memory(gl.bfloat16, [2, 128, K], HALF)
    both = gl.allocate_shared_memory(gl.float32, [128, K], WIDE)
    left = block.index(0)
    entering = block.index(1)
    leaving = both._reinterpret(gl.bfloat16, [2, 128, K], HALF).index(0)
    written = both._reinterpret(gl.bfloat16, [4, 64, K], HALF).index(2)
    entering.store(S)
    leaving.store(dS)
    passed = gl.sum(S.to(gl.float32) * dS.to(gl.float32), 0)  # [K]
    written.store(gl.load(residuals + cv))
    token = (start + line).to(gl.int64) * H * K + head * K + lane
    left.slice(0, 64).store(gl.load(do + token, mask=line < length, other=0.0).to(gl.bfloat16))
    left.slice(64, 64).store(gl.load(dz_ + cv))
    fence_async_shared()
    zero = gl.zeros([64, 128], gl.float32, SINGLE)
    single = gl.arange(0, 64, gl.SliceLayout(1, SINGLE))[:, None] // 16  # the tile of each row
    ends = warpgroup_mma(written, leaving, zero, use_acc=False)
    ends = scaled(ends, retained_3, single > 2, SINGLE)
    ends = scaled(ends, retained_2, single > 1, SINGLE)
    ends = scaled(ends, retained_1, single > 0, SINGLE)
    parked = gl.allocate_shared_memory(gl.float32, [64, K], WIDE, ends)  # registers are short
    acc = warpgroup_mma(left, entering, gl.zeros([128, 128], gl.float32, STACK), use_acc=False)

    reads = block.index(0)
    reads_low = block.index(1)
    near = both._reinterpret(gl.bfloat16, [4, 64, K], HALF).index(0)
    near_low = both._reinterpret(gl.bfloat16, [4, 64, K], HALF).index(1)
    far = both._reinterpret(gl.bfloat16, [4, 64, K], HALF).index(2)
    far_low = both._reinterpret(gl.bfloat16, [4, 64, K], HALF).index(3)
    X = gl.load(k + at, mask=live, other=0.0).to(gl.float32) * gl.load(k_norm + record * 64 + this)[:, None]
    stage_split(reads.slice(64, 64), reads_low.slice(64, 64), X * gl.exp2(through + middle))
    stage_split(near, near_low, X * gl.exp2(-through - middle))
    stage_split(far, far_low, X * gl.exp2(border - through))
    Q = gl.load(q + at, mask=live, other=0.0).to(gl.float32) * (gl.load(q_norm + record * 64 + this) * scale)[:, None]
    stage_split(reads.slice(0, 64), reads_low.slice(0, 64), Q * gl.exp2(through + middle))
    i = gl.arange(0, 128, gl.SliceLayout(1, SHORT))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SHORT))[None, :]
    pair = gl.load(dpairs + 2 * record * 64 * 64 + i * 64 + j)
    same = (i % 64) // 16 == j // 16
    within = gl.allocate_shared_memory(gl.bfloat16, [128, 64], HALF)
    within.store(gl.where(same, pair, 0.0).to(gl.bfloat16))
    across = gl.allocate_shared_memory(gl.bfloat16, [128, 64], HALF)
    across.store(gl.where(same, 0.0, pair).to(gl.bfloat16))
    fence_async_shared()

    stacked = gl.arange(0, 128, gl.SliceLayout(1, STACK))[:, None] % 64 // 16
    acc = scaled(acc, retained_0, stacked < 1, STACK)
    acc = warpgroup_mma(across.slice(0, 16, 1), far.slice(0, 16), acc)
    acc = warpgroup_mma(across.slice(0, 16, 1), far_low.slice(0, 16), acc)
    acc = scaled(acc, retained_1, stacked < 2, STACK)
    acc = warpgroup_mma(across.slice(16, 16, 1), far.slice(16, 16), acc)
    acc = warpgroup_mma(across.slice(16, 16, 1), far_low.slice(16, 16), acc)
    acc = scaled(acc, retained_2, stacked < 3, STACK)
    acc = warpgroup_mma(across.slice(32, 16, 1), far.slice(32, 16), acc)
    acc = warpgroup_mma(across.slice(32, 16, 1), far_low.slice(32, 16), acc)
    acc *= gl.exp2(-middle)
    acc = warpgroup_mma(within, near, acc)
    acc = warpgroup_mma(within, near_low, acc)
    both.store(acc)

    turned = across.permute((1, 0))
    columns = warpgroup_mma(turned.slice(48, 16, 1), reads.slice(48, 16), zero, use_acc=False)
    columns = warpgroup_mma(turned.slice(48, 16, 1), reads_low.slice(48, 16), columns)
    columns = warpgroup_mma(turned.slice(112, 16, 1), reads.slice(112, 16), columns)
    columns = warpgroup_mma(turned.slice(112, 16, 1), reads_low.slice(112, 16), columns)
    columns = scaled(columns, retained_2, single > 1, SINGLE)
    columns = warpgroup_mma(turned.slice(32, 16, 1), reads.slice(32, 16), columns)
    columns = warpgroup_mma(turned.slice(32, 16, 1), reads_low.slice(32, 16), columns)
    columns = warpgroup_mma(turned.slice(96, 16, 1), reads.slice(96, 16), columns)
    columns = warpgroup_mma(turned.slice(96, 16, 1), reads_low.slice(96, 16), columns)
    columns = scaled(columns, retained_1, single > 0, SINGLE)
    columns = warpgroup_mma(turned.slice(16, 16, 1), reads.slice(16, 16), columns)
    columns = warpgroup_mma(turned.slice(16, 16, 1), reads_low.slice(16, 16), columns)
    columns = warpgroup_mma(turned.slice(80, 16, 1), reads.slice(80, 16), columns)
    columns = warpgroup_mma(turned.slice(80, 16, 1), reads_low.slice(80, 16), columns)
    columns *= gl.exp2(-middle)
    turned = within.permute((1, 0))
    inner = warpgroup_mma(turned, reads, zero, use_acc=False)
    inner = warpgroup_mma(turned, reads_low, inner)

    back = gl.exp2(-through - middle)
    dK = gl.convert_layout(columns, FLAT) * gl.exp2(border - through) + gl.convert_layout(inner, FLAT) * back
    X = (reads.slice(64, 64).load(FLAT).to(gl.float32) + reads_low.slice(64, 64).load(FLAT).to(gl.float32)) * back
    change = -X * dK
    ends = parked.load(FLAT) * gl.exp2(border - through)
    dK += ends
    gone = X * ends
    to = gl.exp2(through + middle)
    rows_k = both.slice(64, 64).load(FLAT) * to
    dK += rows_k
    change += X * rows_k
    Q = (reads.slice(0, 64).load(FLAT).to(gl.float32) + reads_low.slice(0, 64).load(FLAT).to(gl.float32)) * back
    dQ = both.slice(0, 64).load(FLAT) * to
    change += Q * dQ
    own = gl.load(down + record * 64 + this)[:, None]
    dQ += own * X
    dK += own * Q
    if NORM:
        k_factor = gl.load(k_norm + record * 64 + this)[:, None]
        q_factor = gl.load(q_norm + record * 64 + this)[:, None]
        dQ = (dQ * scale - Q * (gl.load(along_q + record * 64 + this) / scale)[:, None]) * q_factor
        dK = (dK - X * gl.load(along_k + record * 64 + this)[:, None]) * k_factor
    else:
        dQ *= scale
    gl.store(dq + at, dQ.to(dq.dtype.element_ty), mask=live)
    gl.store(dk + at, dK.to(dk.dtype.element_ty), mask=live)

    # Reads within the chunk from a row on, and writes that leave it before the row: neither sum cancels
    passed = gl.convert_layout(passed, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    passed *= retained_0 * retained_1 * retained_2 * retained_3
    change = tiled(gl.where(live, change, 0.0))
    gone = tiled(gl.where(live, gone, 0.0))
    later = gl.associative_scan(change, 1, add, reverse=True) + tile_sums(change, True)
    earlier = gl.associative_scan(gone, 1, add) - gone + tile_sums(gone, False)
    dg = gl.where(live, flat(later + earlier + passed[None, :][:, None, :]), 0.0)
    logit = gl.load(z + at, mask=live, other=0.0).to(gl.float32) + bias
    dlogit = dg * g_min * rate * sigmoid(rate * logit) * sigmoid(-rate * logit)
    gl.store(dz + at, dlogit.to(dz.dtype.element_ty), mask=live)
    gl.store(dbias + record * K + gl.arange(0, K, gl.SliceLayout(0, FLAT)), gl.sum(dlogit, 0))
    gl.store(drate + record, gl.sum(gl.sum(dlogit * logit, 0), 0))

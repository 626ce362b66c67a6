"""`key_grads_kernel` for Hopper's tensor cores, in Gluon: bounded decay, K = V = 128, chunks of 64 rows, 16-bit inputs.

A program has 64 channels of a chunk and head, so that two fit a multiprocessor.  What a row reads comes from the state
and from the tiles up to its own: an accumulator starts with the state's part, refers to the start of a tile, and is
scaled by what the tile retains as it moves on to the next.  The gradients of columns run the other way.  Thus a row
needs two numbers only, what it reads and what it is near, whatever tile the other row of a pair is in.

Both are rounded once, to 16 bits, and serve as operands of the products and as factors of what these bring: so what a
pair gives its row and its column are the same three numbers' product, and cancels in the decay's gradient.

Outside the products a thread has the 16 rows of a tile in one channel.  q stands above k throughout.
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
from perilune.ops.kda.kernels.hardware import LOG2E, add, exp2, reciprocal
from perilune.ops.launcher import Launcher

FLAT = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [4, 2], [1, 0]))  # [64, W]: a tile's rows in a thread
ROWS = gl.constexpr(gl.BlockedLayout([1, 16, 1], [1, 1, 32], [4, 1, 2], [2, 1, 0]))  # the same as [4, 16, W]
TILES = gl.constexpr(gl.BlockedLayout([4, 1, 1], [1, 1, 32], [1, 4, 2], [2, 1, 0]))  # [4, 4, W], of any, for a tile
ROW = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))  # [64]
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # [64, W] in 16-byte pieces
STACK = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # [128, W]
SINGLE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # [64, W]
# The same with the rows of a tile apart: [2, 4, 16, W], [1, 4, 16, W]
STACK_TILES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 8, 0], [0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 0, 32]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0]],
        [],
        [2, 4, 16, 64],
    )
)
SINGLE_TILES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 8, 0], [0, 0, 0, 8], [0, 0, 0, 16]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 32]],
        [],
        [1, 4, 16, 64],
    )
)
HALF = gl.constexpr(gl.NVMMASharedLayout(128, 16))
STEPS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
LIST = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PASSED_ON = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))  # from products to threads without bank conflicts
# [W, W] of the latter, by diagonals
DIAGONALS = gl.constexpr(
    gl.SharedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0], [9, 1], [18, 2], [4, 4], [8, 8], [16, 16], [32, 32]]
    )
)


@gluon.jit
def tiled(x):
    """[64, W] -> [4, 16, W]"""
    return gl.convert_layout(gl.reshape(x, [4, 16, x.shape[1]]), ROWS, assert_trivial=True)


@gluon.jit
def flat(x):
    """[4, 16, W] -> [64, W]"""
    return gl.convert_layout(gl.reshape(x, [64, x.shape[2]]), FLAT, assert_trivial=True)


@gluon.jit
def by_tile(x):
    """[4, W] -> [64, W]"""
    return flat(x[:, None, :] + gl.zeros([4, 16, x.shape[1]], gl.float32, ROWS))


@gluon.jit
def by_channel(x):
    """[W] -> [4, W]"""
    return gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)), assert_trivial=True)[None, :]


@gluon.jit
def every_tile(x):
    """x [4, W] with all tiles in a thread."""
    return gl.convert_layout(x, gl.SliceLayout(1, TILES))


@gluon.jit
def of_tiles(held, every, other):
    """every [4, W] -> [4, 4, W]: for each tile those that `held` says of all."""
    return gl.where(held, every[:, None, :], other)


@gluon.jit
def times(x, factor, parts: gl.constexpr, apart: gl.constexpr, together: gl.constexpr):
    """x [parts * 64, W] by what each tile has in factor [1, 4, W], which is in shared memory."""
    factor = factor.load(gl.SliceLayout(2, apart))[:, :, None, :]
    x = gl.convert_layout(gl.reshape(x, [parts, 4, 16, x.shape[1]]), apart, assert_trivial=True) * factor
    return gl.convert_layout(gl.reshape(x, [parts * 64, x.shape[3]]), together, assert_trivial=True)


@gluon.jit
def sum_of_tiles(held, every):
    """[4, W] -> [4, W]: the sum over the tiles that `held` says, for each."""
    total = gl.sum(of_tiles(held, every, 0.0), 0)
    return gl.convert_layout(total, gl.SliceLayout(1, ROWS), assert_trivial=True)


@gluon.jit
def clear(smem, length):
    """Zeros in the rows from `length` on, which are another sequence's."""
    line = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None]
    x = smem.load(LINES)
    smem.store(gl.where(line < length, x, gl.zeros_like(x)))


@gluon.jit
def listed(x):
    """x [64] for threads to read."""
    return gl.allocate_shared_memory(gl.float32, [64], LIST, x)


@gluon.jit
def of_rows(x):
    """What is `listed`: [64, 1]"""
    return x.load(gl.SliceLayout(1, FLAT))[:, None]


@Launcher
@gluon.jit
def key_grads_hopper_kernel(
    q, k, z, do, residuals, dz_, states, dstates, dpairs,
    A_log, dt_bias, q_norm, k_norm, down, along_q, along_k,
    dq, dk, dz, dbias, drate,
    starts, lengths,
    scale, g_min, middle, H, stride,
    K: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """As `key_grads_kernel`, with W = 64.

    q, k, z: descriptors of tiles [64, W]; do, residuals, dz_: [64, K]; states, dstates, dpairs: [128, W].
    """
    W: gl.constexpr = 64
    parts: gl.constexpr = K // W
    part = gl.program_id(0) % parts  # neighbours read the same values, out of the cache
    head = gl.program_id(0) // parts % H
    chunk = gl.program_id(0) // parts // H
    first = part * W
    start = gl.load(starts + chunk)
    length = gl.load(lengths + chunk)
    record = chunk * H + head
    column = head * K + first

    # All copies ahead of use, in its order
    bars = barriers(5, 1)
    z_bar, states_bar, left_bar, keys_bar, pairs_bar = (
        bars.index(0), bars.index(1), bars.index(2), bars.index(3), bars.index(4)
    )  # fmt: skip
    logits = gl.allocate_shared_memory(z.dtype, [64, W], z.layout)
    entering = gl.allocate_shared_memory(gl.bfloat16, [128, W], HALF)
    leaving = gl.allocate_shared_memory(gl.bfloat16, [128, W], HALF)
    written = gl.allocate_shared_memory(gl.bfloat16, [64, K], HALF)
    left = gl.allocate_shared_memory(gl.bfloat16, [128, K], HALF)
    queries = gl.allocate_shared_memory(q.dtype, [64, W], HALF)
    keys = gl.allocate_shared_memory(k.dtype, [64, W], HALF)
    mbarrier.expect(z_bar, z.block_type.nbytes)
    mbarrier.expect(states_bar, 2 * 128 * W * 2 + 64 * K * 2)
    mbarrier.expect(left_bar, 128 * K * 2)
    mbarrier.expect(keys_bar, 128 * W * 2)
    mbarrier.expect(pairs_bar, 128 * 64 * 2)
    token = start.to(gl.int32)
    tma.async_copy_global_to_shared(z, [token, column], z_bar, logits)
    tma.async_copy_global_to_shared(states, [record * 128, first], states_bar, entering)
    tma.async_copy_global_to_shared(dstates, [record * 128, first], states_bar, leaving)
    tma.async_copy_global_to_shared(residuals, [record * 64, 0], states_bar, written)
    tma.async_copy_global_to_shared(do, [token, head * K], left_bar, left.slice(0, 64))
    tma.async_copy_global_to_shared(dz_, [record * 64, 0], left_bar, left.slice(64, 64))
    tma.async_copy_global_to_shared(q, [token, column], keys_bar, queries)
    tma.async_copy_global_to_shared(k, [token, column], keys_bar, keys)

    # Factors of rows
    row = record.to(gl.int64) * 64 + gl.arange(0, 64, ROW)
    own = gl.load(down + row)
    k_factor = gl.load(k_norm + row)
    q_factor = gl.load(q_norm + row)
    if NORM:
        parallel_q = gl.load(along_q + row)
        parallel_k = gl.load(along_k + row)

    # Decay
    channel = gl.arange(0, W, gl.SliceLayout(0, FLAT))
    live = gl.arange(0, 64, gl.SliceLayout(1, FLAT))[:, None] < length
    rate = gl.exp(gl.load(A_log + head).to(gl.float32))
    rate_2 = rate * LOG2E
    bias = gl.load(dt_bias + column + channel).to(gl.float32)[None, :]
    mbarrier.wait(z_bar, 0)
    if length < 64:
        clear(logits, length)
    x = logits.load(FLAT).to(gl.float32) * rate_2 + bias * rate_2
    e = exp2(-gl.abs(x))
    g = tiled(gl.where(live, g_min * LOG2E * gl.where(x < 0, e, 1.0) * reciprocal(1.0 + e), 0.0))
    to = exp2(flat(gl.associative_scan(g, 1, add)) + middle)
    whole = gl.sum(g, 1)
    every = every_tile(whole)
    other = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))[:, None][:, :, None]
    tile = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :][:, :, None]
    until = exp2(sum_of_tiles(other >= tile, every) + middle)  # from the middle of a tile to the end of the chunk
    to_q = listed(q_factor * scale)
    to_k = listed(k_factor)
    own_q = listed(q_factor * scale * own)
    own_k = listed(k_factor * own)
    if NORM:
        with_q = listed(q_factor * (parallel_q / scale))
        with_k = listed(k_factor * parallel_k)

    # What states bring
    mbarrier.wait(states_bar, 0)
    ends = warpgroup_mma(written, leaving, gl.zeros([64, W], gl.float32, SINGLE), use_acc=False, is_async=True)
    mbarrier.wait(left_bar, 0)
    if length < 64:
        clear(left.slice(0, 64), length)
        fence_async_shared()
        gl.thread_barrier()
    acc = warpgroup_mma(left, entering, gl.zeros([128, W], gl.float32, STACK), use_acc=False, is_async=True)
    # Only its diagonal is wanted, which threads would take longer to sum
    overlap = gl.zeros([W, W], gl.float32, SINGLE)
    overlap = warpgroup_mma(entering.permute((1, 0)), leaving, overlap, use_acc=False, is_async=True)
    ends, acc, overlap = warpgroup_mma_wait(0, [ends, acc, overlap])
    gl.thread_barrier()
    pairs = leaving  # shared memory is short
    tma.async_copy_global_to_shared(dpairs, [record * 128, 0], pairs_bar, pairs)
    parked = entering._reinterpret(gl.float32, [64, W], PASSED_ON)
    parked.store(ends)
    left._reinterpret(gl.float32, [2, 64, W], PASSED_ON).index(1).store(overlap)
    passed = left._reinterpret(gl.float32, [2, W, W], DIAGONALS).index(1).slice(0, 1).load(gl.SliceLayout(1, ROWS))
    passed *= by_channel(exp2(gl.sum(every, 0)))
    # What accumulators are scaled by as they leave a tile: rows of later ones, and columns up to it on the way back
    retained = exp2(every)
    forward = left._reinterpret(gl.float32, [4, 4, 4, W], STEPS).index(0)
    forward.store(of_tiles(tile > other, retained, 1.0))
    back = left._reinterpret(gl.float32, [4, 4, 4, W], STEPS).index(1)
    back.store(of_tiles(tile <= other, retained, 1.0))

    # What rows read and are near
    mbarrier.wait(keys_bar, 0)
    if length < 64:
        clear(queries, length)
        clear(keys, length)
    # A row of shared memory is a channel here, so that a thread stores its 16 numbers in two pieces
    near = written._reinterpret(gl.bfloat16, [2, W, 64], HALF).index(0).permute((1, 0))
    reads_q = queries._reinterpret(gl.bfloat16, [W, 64], HALF).permute((1, 0))
    reads_k = keys._reinterpret(gl.bfloat16, [W, 64], HALF).permute((1, 0))
    Q = queries.load(FLAT).to(gl.float32) * of_rows(to_q)
    X = keys.load(FLAT).to(gl.float32) * of_rows(to_k)
    near.store((X * reciprocal(to)).to(gl.bfloat16))
    reads_q.store((Q * to).to(gl.bfloat16))
    reads_k.store((X * to).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()

    # Pairs
    turned = pairs.permute((1, 0))
    acc *= gl.exp2(-middle)
    columns = gl.zeros([64, W], gl.float32, SINGLE)
    mbarrier.wait(pairs_bar, 0)
    for m in gl.static_range(4):
        acc = warpgroup_mma(pairs.slice(16 * m, 16, 1), near.slice(16 * m, 16), acc, is_async=True)
        columns = warpgroup_mma(
            turned.slice(48 - 16 * m, 16, 1), reads_q.slice(48 - 16 * m, 16), columns, is_async=True
        )
        columns = warpgroup_mma(
            turned.slice(112 - 16 * m, 16, 1), reads_k.slice(48 - 16 * m, 16), columns, is_async=True
        )
        acc, columns = warpgroup_mma_wait(0, [acc, columns])
        if m < 3:
            acc = times(acc, forward.slice(m, 1), 2, STACK_TILES, STACK)
            columns = times(columns, back.slice(2 - m, 1), 1, SINGLE_TILES, SINGLE)
    both = left._reinterpret(gl.float32, [128, W], PASSED_ON)
    both.store(acc)
    ours = pairs._reinterpret(gl.float32, [64, W], PASSED_ON)
    gl.thread_barrier()
    ours.store(columns)

    # Gradients of q and k
    RQ = reads_q.load(FLAT).to(gl.float32)
    N = near.load(FLAT).to(gl.float32)
    by_row = both.slice(0, 64).load(FLAT)
    change = RQ * by_row
    dQ = to * (of_rows(to_q) * by_row + of_rows(own_q) * N)
    if NORM:
        dQ -= reciprocal(to) * (of_rows(with_q) * RQ)
    queries.store(dQ.to(q.dtype))
    by_row = both.slice(64, 64).load(FLAT)
    change += reads_k.load(FLAT).to(gl.float32) * by_row
    by_column = ours.load(FLAT)
    change -= N * by_column
    end = parked.load(FLAT) * by_tile(until)
    gone = N * end
    dK = of_rows(to_k) * by_row
    if NORM:
        dK -= of_rows(with_k) * N
    dK = to * dK + reciprocal(to) * (of_rows(to_k) * (by_column + end) + of_rows(own_k) * RQ)
    keys.store(dK.to(k.dtype))

    # Reads within the chunk from a row on, and writes that leave it before the row
    change = tiled(change)
    gone = tiled(gone)
    base = (
        sum_of_tiles(other >= tile, every_tile(gl.sum(change, 1)))
        + sum_of_tiles(other < tile, every_tile(gl.sum(gone, 1)))
        + passed
    )
    change -= gone
    dg = flat(base[:, None, :] - gl.associative_scan(change, 1, add) + change)
    logit = logits.load(FLAT).to(gl.float32) + bias
    e = exp2(-gl.abs(logit * rate_2))
    s = reciprocal(1.0 + e)
    dx = gl.where(live, dg * (e * s * s), 0.0)
    logits.store((dx * (g_min * rate)).to(z.dtype))
    by_bias = gl.sum(every_tile(gl.sum(tiled(dx), 1)), 0) * (g_min * rate)
    by_rate = gl.sum(gl.reshape(gl.sum(tiled(dx * logit), 1), [4 * W]), 0) * (g_min * rate)
    lane = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))
    gl.store(dbias + record.to(gl.int64) * K + first + lane, by_bias)
    gl.store(drate + record.to(gl.int64) * parts + part, by_rate)

    gl.thread_barrier()
    line = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None]
    at = line * (stride * K) + gl.arange(0, W, gl.SliceLayout(0, LINES))[None, :]
    corner = start * (stride * K) + column
    gl.store(dq + corner + at, queries.load(LINES).to(dq.dtype.element_ty), mask=line < length)
    gl.store(dk + corner + at, keys.load(LINES).to(dk.dtype.element_ty), mask=line < length)
    gl.store(dz + corner + at, logits.load(LINES).to(dz.dtype.element_ty), mask=line < length)
    retire(bars, 5)

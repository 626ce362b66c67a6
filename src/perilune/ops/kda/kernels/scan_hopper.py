"""`scan_kernel` and `reverse_scan_kernel` for Hopper's tensor cores, in Gluon: K = 128, chunks of 64 rows, 16 bits.

One program: 64 or 128 columns of V, of one segment and head.  One warp copies the records of coming chunks to shared
memory; one or two warpgroups, which never wait for each other, carry 64 columns of the state each, transposed, in
registers.
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
from perilune.ops.launcher import Launcher

STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [64 of V, K]
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [64 of V, C]
LEFT = gl.constexpr(gl.DotOperandLayout(0, VALUES, 2))
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(0, STATE, 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # [C, 64] in 16-byte pieces
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
VECTOR = gl.constexpr(gl.NVMMASharedLayout(0, 32))


@gluon.jit
def place(H, columns, W: gl.constexpr):
    """(first of W columns, head, segment) of a program; neighbours share a head."""
    slices = columns // W
    program = gl.program_id(0)
    return program % slices * W, program // slices % H, program // slices // H


@gluon.jit
def run_of_chunks(starts, lengths, segments, segment):
    """(first chunk, one past the last, first token, length of the last chunk) of a segment; the others are full."""
    begin = gl.load(segments + segment)
    end = gl.load(segments + segment + 1)
    start = gl.load(starts + begin, mask=begin < end, other=0).to(gl.int32)
    return begin, end, start, gl.load(lengths + end - 1, mask=begin < end, other=0)


@gluon.jit
def state_pointers(x, segment, head, H, V, first):
    row = gl.arange(0, 64, gl.SliceLayout(1, STATE))[:, None]
    channel = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
    return x + (segment * H + head).to(gl.int64) * 128 * V + channel * V + first + row


@gluon.jit
def load_chunks(
    copied, room, bars, run, records, H, V, first,
    GROUPS: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """The copying warp of `scan_hopper_kernel`."""
    v, keys, squares, retained, scales = copied
    v_tiles, q_tiles, in_tiles, out_tiles, solve_tiles, pair_tiles, retained_rows, own_rows, strength_rows = room
    early, early_free, late, late_free = bars
    begin, end, start, head = run
    valued = first < V
    for chunk in range(begin, end):
        i = chunk - begin
        record = chunk * H + head
        s = i % EARLY
        full = early.index(s)
        mbarrier.wait(early_free.index(s), (i // EARLY + 1) & 1)
        size: gl.constexpr = 64 * 128 * 2 + 64 * 64 * 2 + 64 * 4
        mbarrier.expect(full, size + GROUPS * v.block_type.nbytes, pred=valued)
        mbarrier.expect(full, size, pred=not valued)
        tma.async_copy_global_to_shared(keys, [(records + record) * 64, 0], full, in_tiles.index(s))
        tma.async_copy_global_to_shared(scales, [records + record, 0], full, strength_rows.index(s))
        tma.async_copy_global_to_shared(squares, [record * 64, 0], full, solve_tiles.index(s))
        at = head * V + first
        for g in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(
                v, [start + 64 * i, at + 64 * g], full, v_tiles.index(GROUPS * s + g), valued
            )
        s = i % LATE
        full = late.index(s)
        mbarrier.wait(late_free.index(s), (i // LATE + 1) & 1)
        mbarrier.expect(full, 64 * 128 * 2 + 128 * 4 + (64 * 128 * 2 + 64 * 64 * 2 + 64 * 4 if OUTPUT else 0))
        if OUTPUT:
            tma.async_copy_global_to_shared(keys, [record * 64, 0], full, q_tiles.index(s))
            tma.async_copy_global_to_shared(scales, [record, 0], full, own_rows.index(s))
            tma.async_copy_global_to_shared(squares, [(records + record) * 64, 0], full, pair_tiles.index(s))
        tma.async_copy_global_to_shared(retained, [record, 0], full, retained_rows.index(s))
        tma.async_copy_global_to_shared(keys, [(2 * records + record) * 64, 0], full, out_tiles.index(s))


@gluon.jit
def carry_state(
    memory, room, staging, bars, run, segment, last, H, V, first,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    TURNED: gl.constexpr, KEPT: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `scan_hopper_kernel`: columns first .. first + 64 of V."""
    initial, final, maps, o_pointer, o, residuals, states = memory
    v_tiles, q_tiles, in_tiles, out_tiles, solve_tiles, pair_tiles, retained_rows, own_rows, strength_rows = room
    turned, kept = staging
    early, early_free, late, late_free = bars
    begin, end, start, head = run
    valued = first < V
    if MAPS:
        row = gl.arange(0, 64, gl.SliceLayout(1, STATE))[:, None]
        channel = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
        S = gl.where(first - V + row == channel, 1.0, 0.0)
    else:
        S = gl.load(state_pointers(initial, segment, head, H, V, first))
    token = gl.arange(0, 64, gl.SliceLayout(0, VALUES))[None, :]
    zero = gl.zeros([64, 64], gl.float32, VALUES)
    for chunk in range(begin, end):
        i = chunk - begin
        record = chunk * H + head
        length = gl.where(chunk + 1 < end, 64, last)
        Sh = S.to(gl.bfloat16)
        left = gl.convert_layout(Sh, LEFT)
        s = i % EARLY
        mbarrier.wait(early.index(s), i // EARLY & 1)
        Y = warpgroup_mma(left, in_tiles.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if KEEP:
            tma.store_wait(2 * KEPT - 1)
            gl.thread_barrier()
            staged = kept.index(GROUP * KEPT + i % KEPT)
            staged.store(Sh)
            fence_async_shared()
            tma.async_copy_shared_to_global(states, [record * V + first, 0], staged)
        t = i % LATE
        if OUTPUT:
            mbarrier.wait(late.index(t), i // LATE & 1)
            O = warpgroup_mma(left, q_tiles.index(t).permute((1, 0)), zero, use_acc=False, is_async=True)
        b = strength_rows.index(s).load(VALUES)  # [1, C]
        value = v_tiles.index(GROUPS * s + GROUP).permute((1, 0)).load(VALUES).to(gl.float32)
        if MAPS:
            value = gl.where(valued, value, 0.0)
        Y = warpgroup_mma_wait(1 if OUTPUT else 0, [Y])
        Y = gl.where(token < length, value - Y, 0.0)  # behind the end stands the next sequence
        Z = gl.convert_layout((Y * b).to(gl.bfloat16), LEFT)
        R = warpgroup_mma(Z, solve_tiles.index(s).permute((1, 0)), Y, is_async=True)
        if not OUTPUT:
            mbarrier.wait(late.index(t), i // LATE & 1)
        S *= retained_rows.index(t).load(STATE)
        if OUTPUT:
            O, R = warpgroup_mma_wait(0, [O, R])
        else:
            R = warpgroup_mma_wait(0, [R])
        mbarrier.arrive(early_free.index(s))
        U = R * b
        Uh = U.to(gl.bfloat16)
        if OUTPUT:
            O += U * own_rows.index(t).load(VALUES)
            O = warpgroup_mma(gl.convert_layout(Uh, LEFT), pair_tiles.index(t).permute((1, 0)), O, is_async=True)
        S = warpgroup_mma(gl.convert_layout(Uh, LEFT_STATE), out_tiles.index(t), S, is_async=True)
        if OUTPUT:
            O = warpgroup_mma_wait(1, [O])
        if OUTPUT or KEEP:
            tma.store_wait((2 if KEEP else 1) * TURNED - 1)
            gl.thread_barrier()
            staged = turned.index(GROUP * TURNED + i % TURNED)  # [C, 64]
            staged.permute((1, 0)).store((O if OUTPUT else R).to(turned.dtype))
            fence_async_shared()
        if KEEP:
            tma.async_copy_shared_to_global(residuals, [record * 64, first], staged)
        if OUTPUT:
            if length == 64:
                tma.async_copy_shared_to_global(o, [start + 64 * i, head * V + first], staged)
            else:
                row = gl.arange(0, 64, gl.SliceLayout(1, LINES))[:, None]
                at = (start + 64 * i + row).to(gl.int64) * H * V + head * V + first
                at += gl.arange(0, 64, gl.SliceLayout(0, LINES))[None, :]
                gl.store(o_pointer + at, staged.load(LINES), mask=row < length)
        S = warpgroup_mma_wait(0, [S])
        mbarrier.arrive(late_free.index(t))
    tma.store_wait(0)
    if not MAPS or valued:
        gl.store(state_pointers(final, segment, head, H, V, first), S)
    else:
        gl.store(state_pointers(maps, segment, head, H, 128, first - V), S)


@Launcher
@gluon.jit(do_not_specialize=["H", "records"])
def scan_hopper_kernel(
    v, keys, squares, retained, scales,
    initial, final, maps, o_pointer, o, residuals, states,
    starts, lengths, segments,
    H, V, records,
    GROUPS: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    TURNED: gl.constexpr, KEPT: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """As `scan_kernel`; v, the four kinds of a record, o, residuals and states are descriptors of blocks of 64 rows.

    keys [3 * records * C, K]: q_since, k_since, k_until.  squares [2 * records * C, C]: solve, pairs.  retained
    [records, K].  scales [2 * records, C]: own, strength.  records: of all chunks and heads.
    GROUPS: of 64 columns.  EARLY, LATE: how many chunks there is room for, of what a step begins with and of what it
    ends with.  TURNED, KEPT: on their way to memory, o or residuals and states.  OUTPUT or KEEP or neither.
    MAPS: states start at zero, and K columns more carry what becomes of the identity without values, to `maps`.
    """
    C: gl.constexpr = 64
    K: gl.constexpr = 128
    W: gl.constexpr = 64 * GROUPS
    first, head, segment = place(H, V + (K if MAPS else 0), W)
    begin, end, start, last = run_of_chunks(starts, lengths, segments, segment)
    early = barriers(EARLY, 1)
    early_free = barriers(EARLY, GROUPS)
    late = barriers(LATE, 1)
    late_free = barriers(LATE, GROUPS)
    in_tiles = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, K], TILE)
    solve_tiles = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, C], TILE)
    strength_rows = gl.allocate_shared_memory(gl.float32, [EARLY, 1, C], VECTOR)
    out_tiles = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE)
    retained_rows = gl.allocate_shared_memory(gl.float32, [LATE, 1, K], VECTOR)
    v_tiles = gl.allocate_shared_memory(v.dtype, [GROUPS * EARLY, C, 64], TILE)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE) if OUTPUT else in_tiles
    pair_tiles = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, C], TILE) if OUTPUT else in_tiles
    own_rows = gl.allocate_shared_memory(gl.float32, [LATE, 1, C], VECTOR) if OUTPUT else strength_rows
    out: gl.constexpr = o.dtype if OUTPUT else gl.bfloat16
    turned = gl.allocate_shared_memory(out, [GROUPS * TURNED, C, 64], TILE) if TURNED else out_tiles
    kept = gl.allocate_shared_memory(gl.bfloat16, [GROUPS * KEPT, 64, K], TILE) if KEEP else turned
    fence_async_shared()
    room = (v_tiles, q_tiles, in_tiles, out_tiles, solve_tiles, pair_tiles, retained_rows, own_rows, strength_rows)
    staging = (turned, kept)
    bars = (early, early_free, late, late_free)
    run = (begin, end, start, head)
    memory = (initial, final, maps, o_pointer, o, residuals, states)
    copied = (v, keys, squares, retained, scales)
    if GROUPS == 1:
        gl.warp_specialize([
            (carry_state, (memory, room, staging, bars, run, segment, last, H, V, first, 0, 1,
                EARLY, LATE, TURNED, KEPT, OUTPUT, KEEP, MAPS)),
            (load_chunks, (copied, room, bars, run, records, H, V, first, 1, EARLY, LATE, OUTPUT)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry_state, (memory, room, staging, bars, run, segment, last, H, V, first, 0, 2,
                EARLY, LATE, TURNED, KEPT, OUTPUT, KEEP, MAPS)),
            (carry_state, (memory, room, staging, bars, run, segment, last, H, V, first + 64, 1, 2,
                EARLY, LATE, TURNED, KEPT, OUTPUT, KEEP, MAPS)),
            (load_chunks, (copied, room, bars, run, records, H, V, first, 2, EARLY, LATE, OUTPUT)),
        ], [4, 1], [240, 24])  # fmt: skip
    retire(early, EARLY)
    retire(early_free, EARLY)
    retire(late, LATE)
    retire(late_free, LATE)


@gluon.jit
def load_chunks_back(
    copied, room, bars, run, records, H, V, first,
    GROUPS: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """The copying warp of `reverse_scan_hopper_kernel`."""
    do, keys, squares, retained, scales = copied
    do_tiles, q_tiles, in_tiles, out_tiles, solve_tiles, pair_tiles, retained_rows, own_rows, strength_rows = room
    early, early_free, late, late_free = bars
    begin, end, start, head = run
    for i in range(end - begin):
        chunk = end - 1 - i
        record = chunk * H + head
        token = start + 64 * (chunk - begin)
        s = i % EARLY
        full = early.index(s)
        mbarrier.wait(early_free.index(s), (i // EARLY + 1) & 1)
        mbarrier.expect(full, 64 * 128 * 2 + 2 * 64 * 64 * 2 + GROUPS * do.block_type.nbytes + 2 * 64 * 4)
        tma.async_copy_global_to_shared(keys, [(2 * records + record) * 64, 0], full, out_tiles.index(s))
        for g in gl.static_range(GROUPS):
            at = head * V + first + 64 * g
            tma.async_copy_global_to_shared(do, [token, at], full, do_tiles.index(GROUPS * s + g))
        tma.async_copy_global_to_shared(squares, [(records + record) * 64, 0], full, pair_tiles.index(s))
        tma.async_copy_global_to_shared(scales, [record, 0], full, own_rows.index(s))
        tma.async_copy_global_to_shared(scales, [records + record, 0], full, strength_rows.index(s))
        tma.async_copy_global_to_shared(squares, [record * 64, 0], full, solve_tiles.index(s))
        s = i % LATE
        full = late.index(s)
        mbarrier.wait(late_free.index(s), (i // LATE + 1) & 1)
        mbarrier.expect(full, 2 * 64 * 128 * 2 + 128 * 4)
        tma.async_copy_global_to_shared(retained, [record, 0], full, retained_rows.index(s))
        tma.async_copy_global_to_shared(keys, [record * 64, 0], full, q_tiles.index(s))
        tma.async_copy_global_to_shared(keys, [(records + record) * 64, 0], full, in_tiles.index(s))


@gluon.jit
def carry_gradient(
    memory, room, staging, bars, run, segment, last, H, V, first,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    TURNED: gl.constexpr, KEPT: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `reverse_scan_hopper_kernel`: columns first .. first + 64 of V."""
    dfinal, dinitial, dz, dstates = memory
    do_tiles, q_tiles, in_tiles, out_tiles, solve_tiles, pair_tiles, retained_rows, own_rows, strength_rows = room
    turned, kept = staging
    early, early_free, late, late_free = bars
    begin, end, _start, head = run
    if dfinal is None:
        dS = gl.zeros([64, 128], gl.float32, STATE)
    else:
        dS = gl.load(state_pointers(dfinal, segment, head, H, V, first))
    row = gl.arange(0, 64, gl.SliceLayout(0, VALUES))[None, :]
    zero = gl.zeros([64, 64], gl.float32, VALUES)
    for i in range(end - begin):
        chunk = end - 1 - i
        record = chunk * H + head
        length = gl.where(i > 0, 64, last)
        dSh = dS.to(gl.bfloat16)
        s = i % EARLY
        mbarrier.wait(early.index(s), i // EARLY & 1)
        left = gl.convert_layout(dSh, LEFT)
        dU = warpgroup_mma(left, out_tiles.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if KEEP:
            tma.store_wait(2 * KEPT - 1)
            gl.thread_barrier()
            staged = kept.index(GROUP * KEPT + i % KEPT)
            staged.store(dSh)
            fence_async_shared()
            tma.async_copy_shared_to_global(dstates, [record * V + first, 0], staged)
        read = do_tiles.index(GROUPS * s + GROUP).permute((1, 0)).load(VALUES)
        dO = gl.where(row < length, read, 0.0).to(gl.bfloat16)  # behind the end stands the next sequence
        dU = warpgroup_mma(gl.convert_layout(dO, LEFT), pair_tiles.index(s), dU, is_async=True)
        b = strength_rows.index(s).load(VALUES)  # [1, C]
        own = own_rows.index(s).load(VALUES)
        dU = warpgroup_mma_wait(0, [dU])
        dU += dO.to(gl.float32) * own
        dZ = gl.convert_layout((dU * b).to(gl.bfloat16), LEFT)
        dZ = warpgroup_mma(dZ, solve_tiles.index(s), dU, is_async=True)
        t = i % LATE
        mbarrier.wait(late.index(t), i // LATE & 1)
        dS *= retained_rows.index(t).load(STATE)
        dS = warpgroup_mma(gl.convert_layout(dO, LEFT_STATE), q_tiles.index(t), dS, is_async=True)
        dZ = warpgroup_mma_wait(1, [dZ])
        dY = gl.convert_layout((dZ * -b).to(gl.bfloat16), LEFT_STATE)
        dS = warpgroup_mma(dY, in_tiles.index(t), dS, is_async=True)
        mbarrier.arrive(early_free.index(s))
        if KEEP:
            tma.store_wait(2 * TURNED - 1)
            gl.thread_barrier()
            staged = turned.index(GROUP * TURNED + i % TURNED)
            staged.permute((1, 0)).store(dZ.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(dz, [record * 64, first], staged)
        dS = warpgroup_mma_wait(0, [dS])
        mbarrier.arrive(late_free.index(t))
    tma.store_wait(0)
    gl.store(state_pointers(dinitial, segment, head, H, V, first), dS)


@Launcher
@gluon.jit(do_not_specialize=["H", "records"])
def reverse_scan_hopper_kernel(
    do, keys, squares, retained, scales,
    dfinal, dinitial, dz, dstates,
    starts, lengths, segments,
    H, V, records,
    GROUPS: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    TURNED: gl.constexpr, KEPT: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """As `reverse_scan_kernel`, its arguments as those of `scan_hopper_kernel`; dfinal None: zero."""
    C: gl.constexpr = 64
    K: gl.constexpr = 128
    W: gl.constexpr = 64 * GROUPS
    first, head, segment = place(H, V, W)
    begin, end, start, last = run_of_chunks(starts, lengths, segments, segment)
    early = barriers(EARLY, 1)
    early_free = barriers(EARLY, GROUPS)
    late = barriers(LATE, 1)
    late_free = barriers(LATE, GROUPS)
    out_tiles = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, K], TILE)
    do_tiles = gl.allocate_shared_memory(do.dtype, [GROUPS * EARLY, C, 64], TILE)
    pair_tiles = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, C], TILE)
    own_rows = gl.allocate_shared_memory(gl.float32, [EARLY, 1, C], VECTOR)
    strength_rows = gl.allocate_shared_memory(gl.float32, [EARLY, 1, C], VECTOR)
    solve_tiles = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, C], TILE)
    retained_rows = gl.allocate_shared_memory(gl.float32, [LATE, 1, K], VECTOR)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE)
    in_tiles = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE)
    turned = gl.allocate_shared_memory(gl.bfloat16, [GROUPS * TURNED, C, 64], TILE) if KEEP else do_tiles
    kept = gl.allocate_shared_memory(gl.bfloat16, [GROUPS * KEPT, 64, K], TILE) if KEEP else q_tiles
    fence_async_shared()
    room = (do_tiles, q_tiles, in_tiles, out_tiles, solve_tiles, pair_tiles, retained_rows, own_rows, strength_rows)
    staging = (turned, kept)
    bars = (early, early_free, late, late_free)
    run = (begin, end, start, head)
    memory = (dfinal, dinitial, dz, dstates)
    copied = (do, keys, squares, retained, scales)
    if GROUPS == 1:
        gl.warp_specialize([
            (carry_gradient, (memory, room, staging, bars, run, segment, last, H, V, first, 0, 1,
                EARLY, LATE, TURNED, KEPT, KEEP)),
            (load_chunks_back, (copied, room, bars, run, records, H, V, first, 1, EARLY, LATE)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (carry_gradient, (memory, room, staging, bars, run, segment, last, H, V, first, 0, 2,
                EARLY, LATE, TURNED, KEPT, KEEP)),
            (carry_gradient, (memory, room, staging, bars, run, segment, last, H, V, first + 64, 1, 2,
                EARLY, LATE, TURNED, KEPT, KEEP)),
            (load_chunks_back, (copied, room, bars, run, records, H, V, first, 2, EARLY, LATE)),
        ], [4, 1], [240, 24])  # fmt: skip
    retire(early, EARLY)
    retire(early_free, EARLY)
    retire(late, LATE)
    retire(late_free, LATE)

"""`scan_kernel` and `reverse_scan_kernel` for Hopper's tensor cores, in Gluon: K = 128, chunks of 64 rows, 16 bits.

One program: 128 columns of V, of one segment and head.  One warp copies the records of coming chunks to shared memory;
two warpgroups, which never wait for each other, carry 64 columns of the state each, transposed, in registers.
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

STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [64 of V, K]
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [64 of V, C]
LEFT = gl.constexpr(gl.DotOperandLayout(0, VALUES, 2))
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(0, STATE, 2))
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # [C, 64] in 16-byte pieces
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
VECTOR = gl.constexpr(gl.NVMMASharedLayout(0, 32))


@gluon.jit
def place(H, V, extra: gl.constexpr):
    """(first of 128 columns of V, head, segment) of a program; the columns go `extra` slices beyond V."""
    slices = V // 128 + extra
    program = gl.program_id(0)
    return program % slices * 128, program // slices % H, program // slices // H


@gluon.jit
def run_of_chunks(starts, lengths, segments, segment):
    """(first chunk, one past the last, first token, length of the last chunk) of a segment; the others are full."""
    begin = gl.load(segments + segment)
    end = gl.load(segments + segment + 1)
    start = gl.load(starts + begin, mask=begin < end, other=0).to(gl.int32)
    return begin, end, start, gl.load(lengths + end - 1, mask=begin < end, other=0)


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def state_pointers(x, segment, head, H, V, first):
    row = gl.arange(0, 64, gl.SliceLayout(1, STATE))[:, None]
    channel = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
    return x + (segment * H + head).to(gl.int64) * 128 * V + channel * V + first + row


@gluon.jit
def load_chunks(
    v, q_since, k_since, k_until, solve, pairs, retained, own, strength,
    vs, qs, ins, outs, solves, pairss, retaineds, owns, strengths,
    early, early_free, late, late_free,
    begin, end, start, head, H, V, first,
    EARLY: gl.constexpr, LATE: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """The copying warp of `scan_hopper_kernel`."""
    valued = first < V
    for chunk in range(begin, end):
        i = chunk - begin
        record = chunk * H + head
        s = i % EARLY
        full = early.index(s)
        mbarrier.wait(early_free.index(s), (i // EARLY + 1) & 1)
        mbarrier.expect(full, 2 * 64 * 128 * 2 + 64 * 64 * 2 + 64 * 4, pred=valued)
        mbarrier.expect(full, 64 * 128 * 2 + 64 * 64 * 2 + 64 * 4, pred=not valued)
        tma.async_copy_global_to_shared(k_since, [record * 64, 0], full, ins.index(s))
        tma.async_copy_global_to_shared(strength, [record, 0], full, strengths.index(s))
        tma.async_copy_global_to_shared(solve, [record * 64, 0], full, solves.index(s))
        at = head * V + first
        tma.async_copy_global_to_shared(v, [start + 64 * i, at], full, vs.index(2 * s), valued)
        tma.async_copy_global_to_shared(v, [start + 64 * i, at + 64], full, vs.index(2 * s + 1), valued)
        s = i % LATE
        full = late.index(s)
        mbarrier.wait(late_free.index(s), (i // LATE + 1) & 1)
        mbarrier.expect(full, 64 * 128 * 2 + 128 * 4 + (64 * 128 * 2 + 64 * 64 * 2 + 64 * 4 if OUTPUT else 0))
        if OUTPUT:
            tma.async_copy_global_to_shared(q_since, [record * 64, 0], full, qs.index(s))
            tma.async_copy_global_to_shared(own, [record, 0], full, owns.index(s))
            tma.async_copy_global_to_shared(pairs, [record * 64, 0], full, pairss.index(s))
        tma.async_copy_global_to_shared(retained, [record, 0], full, retaineds.index(s))
        tma.async_copy_global_to_shared(k_until, [record * 64, 0], full, outs.index(s))


@gluon.jit
def carry_state(
    initial, final, maps, o_pointer, o, residuals, states,
    vs, qs, ins, outs, solves, pairss, retaineds, owns, strengths, turned, kept,
    early, early_free, late, late_free,
    begin, end, start, last, segment, head, H, V, first,
    HALF: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr, STAGED: gl.constexpr,
    OUTPUT: gl.constexpr, KEEP: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `scan_hopper_kernel`: columns first .. first + 64 of V."""
    valued = first < V
    if MAPS:
        row = gl.arange(0, 64, gl.SliceLayout(1, STATE))[:, None] + 64 * HALF
        channel = gl.arange(0, 128, gl.SliceLayout(0, STATE))[None, :]
        S = gl.where((row == channel) & (first >= V), 1.0, 0.0)
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
        Y = warpgroup_mma(left, ins.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if KEEP:
            tma.store_wait(2 * STAGED - 1)
            gl.thread_barrier()
            staged = kept.index(HALF * STAGED + i % STAGED)
            staged.store(Sh)
            fence_async_shared()
            tma.async_copy_shared_to_global(states, [record * V + first, 0], staged)
        t = i % LATE
        if OUTPUT:
            mbarrier.wait(late.index(t), i // LATE & 1)
            O = warpgroup_mma(left, qs.index(t).permute((1, 0)), zero, use_acc=False, is_async=True)
        b = strengths.index(s).load(VALUES)  # [1, C]
        value = vs.index(2 * s + HALF).permute((1, 0)).load(VALUES).to(gl.float32)
        if MAPS:
            value = gl.where(valued, value, 0.0)
        Y = warpgroup_mma_wait(1 if OUTPUT else 0, [Y])
        Y = gl.where(token < length, value - Y, 0.0)  # behind the end stands the next sequence
        Z = gl.convert_layout((Y * b).to(gl.bfloat16), LEFT)
        R = warpgroup_mma(Z, solves.index(s).permute((1, 0)), Y, is_async=True)
        if not OUTPUT:
            mbarrier.wait(late.index(t), i // LATE & 1)
        S *= retaineds.index(t).load(STATE)
        if OUTPUT:
            O, R = warpgroup_mma_wait(0, [O, R])
        else:
            R = warpgroup_mma_wait(0, [R])
        mbarrier.arrive(early_free.index(s))
        U = R * b
        Uh = U.to(gl.bfloat16)
        if OUTPUT:
            O += U * owns.index(t).load(VALUES)
            O = warpgroup_mma(gl.convert_layout(Uh, LEFT), pairss.index(t).permute((1, 0)), O, is_async=True)
        S = warpgroup_mma(gl.convert_layout(Uh, LEFT_STATE), outs.index(t), S, is_async=True)
        if OUTPUT:
            O = warpgroup_mma_wait(1, [O])
        if OUTPUT or KEEP:
            tma.store_wait((2 if KEEP else 1) * STAGED - 1)
            gl.thread_barrier()
            staged = turned.index(HALF * STAGED + i % STAGED)  # [C, 64]
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
    if valued:
        gl.store(state_pointers(final, segment, head, H, V, first), S)
    if MAPS:
        if not valued:
            gl.store(state_pointers(maps, segment, head, H, 128, first - V), S)


@gluon.jit(do_not_specialize=["H"])
def scan_hopper_kernel(
    v, q_since, k_since, k_until, solve, pairs, retained, own, strength,
    initial, final, maps, o_pointer, o, residuals, states,
    starts, lengths, segments,
    H, V,
    EARLY: gl.constexpr, LATE: gl.constexpr, STAGED: gl.constexpr,
    OUTPUT: gl.constexpr, KEEP: gl.constexpr, MAPS: gl.constexpr,
):  # fmt: skip
    """As `scan_kernel`, all but initial, final, o_pointer and the tables descriptors; OUTPUT or KEEP or neither.

    EARLY, LATE: how many chunks there is room for, of what a step begins with and of what it ends with.
    """
    C: gl.constexpr = 64
    K: gl.constexpr = 128
    first, head, segment = place(H, V, 1 if MAPS else 0)
    begin, end, start, last = run_of_chunks(starts, lengths, segments, segment)
    early = barriers(EARLY, 1)
    early_free = barriers(EARLY, 2)
    late = barriers(LATE, 1)
    late_free = barriers(LATE, 2)
    ins = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, K], TILE)
    solves = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, C], TILE)
    strengths = gl.allocate_shared_memory(gl.float32, [EARLY, 1, C], VECTOR)
    outs = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE)
    retaineds = gl.allocate_shared_memory(gl.float32, [LATE, 1, K], VECTOR)
    vs = gl.allocate_shared_memory(v.dtype, [2 * EARLY, C, 64], TILE)
    qs = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE) if OUTPUT else ins
    pairss = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, C], TILE) if OUTPUT else ins
    owns = gl.allocate_shared_memory(gl.float32, [LATE, 1, C], VECTOR) if OUTPUT else strengths
    turned = gl.allocate_shared_memory(o.dtype if OUTPUT else gl.bfloat16, [2 * STAGED, C, 64], TILE)
    kept = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGED, 64, K], TILE) if KEEP else turned
    fence_async_shared()
    gl.warp_specialize(
        [
            (carry_state, (
                initial, final, maps, o_pointer, o, residuals, states,
                vs, qs, ins, outs, solves, pairss, retaineds, owns, strengths, turned, kept,
                early, early_free, late, late_free,
                begin, end, start, last, segment, head, H, V, first, 0, EARLY, LATE, STAGED, OUTPUT, KEEP, MAPS,
            )),
            (carry_state, (
                initial, final, maps, o_pointer, o, residuals, states,
                vs, qs, ins, outs, solves, pairss, retaineds, owns, strengths, turned, kept,
                early, early_free, late, late_free,
                begin, end, start, last, segment, head, H, V, first + 64, 1, EARLY, LATE, STAGED, OUTPUT, KEEP, MAPS,
            )),
            (load_chunks, (
                v, q_since, k_since, k_until, solve, pairs, retained, own, strength,
                vs, qs, ins, outs, solves, pairss, retaineds, owns, strengths,
                early, early_free, late, late_free,
                begin, end, start, head, H, V, first, EARLY, LATE, OUTPUT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def load_chunks_back(
    do, q_since, k_since, k_until, solve, pairs, retained, own, strength,
    dos, qs, ins, outs, solves, pairss, retaineds, owns, strengths,
    early, early_free, late, late_free,
    begin, end, start, head, H, V, first,
    EARLY: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """The copying warp of `reverse_scan_hopper_kernel`."""
    for i in range(end - begin):
        chunk = end - 1 - i
        record = chunk * H + head
        token = start + 64 * (chunk - begin)
        s = i % EARLY
        full = early.index(s)
        mbarrier.wait(early_free.index(s), (i // EARLY + 1) & 1)
        mbarrier.expect(full, 2 * 64 * 128 * 2 + 2 * 64 * 64 * 2 + 2 * 64 * 4)
        tma.async_copy_global_to_shared(k_until, [record * 64, 0], full, outs.index(s))
        tma.async_copy_global_to_shared(do, [token, head * V + first], full, dos.index(2 * s))
        tma.async_copy_global_to_shared(do, [token, head * V + first + 64], full, dos.index(2 * s + 1))
        tma.async_copy_global_to_shared(pairs, [record * 64, 0], full, pairss.index(s))
        tma.async_copy_global_to_shared(own, [record, 0], full, owns.index(s))
        tma.async_copy_global_to_shared(strength, [record, 0], full, strengths.index(s))
        tma.async_copy_global_to_shared(solve, [record * 64, 0], full, solves.index(s))
        s = i % LATE
        full = late.index(s)
        mbarrier.wait(late_free.index(s), (i // LATE + 1) & 1)
        mbarrier.expect(full, 2 * 64 * 128 * 2 + 128 * 4)
        tma.async_copy_global_to_shared(retained, [record, 0], full, retaineds.index(s))
        tma.async_copy_global_to_shared(q_since, [record * 64, 0], full, qs.index(s))
        tma.async_copy_global_to_shared(k_since, [record * 64, 0], full, ins.index(s))


@gluon.jit
def carry_gradient(
    dfinal, dinitial, dz, dstates,
    dos, qs, ins, outs, solves, pairss, retaineds, owns, strengths, turned, kept,
    early, early_free, late, late_free,
    begin, end, last, segment, head, H, V, first,
    HALF: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr, STAGED: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `reverse_scan_hopper_kernel`: columns first .. first + 64 of V."""
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
        dU = warpgroup_mma(left, outs.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if KEEP:
            tma.store_wait(2 * STAGED - 1)
            gl.thread_barrier()
            staged = kept.index(HALF * STAGED + i % STAGED)
            staged.store(dSh)
            fence_async_shared()
            tma.async_copy_shared_to_global(dstates, [record * V + first, 0], staged)
        read = dos.index(2 * s + HALF).permute((1, 0)).load(VALUES)
        dO = gl.where(row < length, read, 0.0).to(gl.bfloat16)  # behind the end stands the next sequence
        dU = warpgroup_mma(gl.convert_layout(dO, LEFT), pairss.index(s), dU, is_async=True)
        b = strengths.index(s).load(VALUES)  # [1, C]
        own = owns.index(s).load(VALUES)
        dU = warpgroup_mma_wait(0, [dU])
        dU += dO.to(gl.float32) * own
        dZ = gl.convert_layout((dU * b).to(gl.bfloat16), LEFT)
        dZ = warpgroup_mma(dZ, solves.index(s), dU, is_async=True)
        t = i % LATE
        mbarrier.wait(late.index(t), i // LATE & 1)
        dS *= retaineds.index(t).load(STATE)
        dS = warpgroup_mma(gl.convert_layout(dO, LEFT_STATE), qs.index(t), dS, is_async=True)
        dZ = warpgroup_mma_wait(1, [dZ])
        dY = gl.convert_layout((dZ * -b).to(gl.bfloat16), LEFT_STATE)
        dS = warpgroup_mma(dY, ins.index(t), dS, is_async=True)
        mbarrier.arrive(early_free.index(s))
        if KEEP:
            tma.store_wait(2 * STAGED - 1)
            gl.thread_barrier()
            staged = turned.index(HALF * STAGED + i % STAGED)
            staged.permute((1, 0)).store(dZ.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(dz, [record * 64, first], staged)
        dS = warpgroup_mma_wait(0, [dS])
        mbarrier.arrive(late_free.index(t))
    tma.store_wait(0)
    gl.store(state_pointers(dinitial, segment, head, H, V, first), dS)


@gluon.jit(do_not_specialize=["H"])
def reverse_scan_hopper_kernel(
    do, q_since, k_since, k_until, solve, pairs, retained, own, strength,
    dfinal, dinitial, dz, dstates,
    starts, lengths, segments,
    H, V,
    EARLY: gl.constexpr, LATE: gl.constexpr, STAGED: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """As `reverse_scan_kernel`, with what `scan_hopper_kernel` says of arguments."""
    C: gl.constexpr = 64
    K: gl.constexpr = 128
    first, head, segment = place(H, V, 0)
    begin, end, start, last = run_of_chunks(starts, lengths, segments, segment)
    early = barriers(EARLY, 1)
    early_free = barriers(EARLY, 2)
    late = barriers(LATE, 1)
    late_free = barriers(LATE, 2)
    outs = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, K], TILE)
    dos = gl.allocate_shared_memory(do.dtype, [2 * EARLY, C, 64], TILE)
    pairss = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, C], TILE)
    owns = gl.allocate_shared_memory(gl.float32, [EARLY, 1, C], VECTOR)
    strengths = gl.allocate_shared_memory(gl.float32, [EARLY, 1, C], VECTOR)
    solves = gl.allocate_shared_memory(gl.bfloat16, [EARLY, C, C], TILE)
    retaineds = gl.allocate_shared_memory(gl.float32, [LATE, 1, K], VECTOR)
    qs = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE)
    ins = gl.allocate_shared_memory(gl.bfloat16, [LATE, C, K], TILE)
    turned = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGED, C, 64], TILE) if KEEP else dos
    kept = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGED, 64, K], TILE) if KEEP else qs
    fence_async_shared()
    gl.warp_specialize(
        [
            (carry_gradient, (
                dfinal, dinitial, dz, dstates,
                dos, qs, ins, outs, solves, pairss, retaineds, owns, strengths, turned, kept,
                early, early_free, late, late_free,
                begin, end, last, segment, head, H, V, first, 0, EARLY, LATE, STAGED, KEEP,
            )),
            (carry_gradient, (
                dfinal, dinitial, dz, dstates,
                dos, qs, ins, outs, solves, pairss, retaineds, owns, strengths, turned, kept,
                early, early_free, late, late_free,
                begin, end, last, segment, head, H, V, first + 64, 1, EARLY, LATE, STAGED, KEEP,
            )),
            (load_chunks_back, (
                do, q_since, k_since, k_until, solve, pairs, retained, own, strength,
                dos, qs, ins, outs, solves, pairss, retaineds, owns, strengths,
                early, early_free, late, late_free,
                begin, end, start, head, H, V, first, EARLY, LATE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

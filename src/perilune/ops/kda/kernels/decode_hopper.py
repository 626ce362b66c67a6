"""`decode_kernel` with the state in shared memory, in Gluon: K = V = 128.

A state in registers leaves room for two programs a multiprocessor, and each of them waits for its inputs, its state and
its norms in turn.  Here three fit, and each goes from head to head with what comes next on its way: the inputs of the
next token while this one's are worked in, and, as the last token's update reads a part of the state, the same part of
the next head's, to where that lay.  A thread copies, reads and writes its own part of a state and of a window, so that
neither is guarded by a barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from perilune.ops.kda.kernels.gate import log2_decay, sigmoid
from perilune.ops.kda.kernels.hardware import LOG2E
from perilune.ops.launcher import Launcher

ROWS = gl.constexpr(32)  # of a state at once
WARPS = gl.constexpr(4)
TILE = gl.constexpr(gl.BlockedLayout([8, 4], [1, 32], [4, 1], [1, 0]))  # [ROWS, V]; a warp has whole rows
TAPS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))  # [channels, W]; a thread has a channel
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def add2(a, b, c, d):
    return a + c, b + d


@gluon.jit
def add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def silu_conv(rows, taps):
    """silu(conv), [channels], of the last W rows: [channels, BW]."""
    y = gl.sum(rows.to(gl.float32) * taps, 1)
    return y * sigmoid(y)


@gluon.jit
def line(K: gl.constexpr):
    """Room for a vector [K], an allocation of its own: between accesses to the same one the compiler puts barriers."""
    return gl.allocate_shared_memory(gl.float32, [K], LINE)


@gluon.jit
def column(vector, c: gl.constexpr):
    """[ROWS, 1]: part c of a vector [K]."""
    return vector.slice(c * ROWS, ROWS).load(gl.SliceLayout(1, TILE))[:, None]


@gluon.jit
def in_warps(part, by_q, by_k, c: gl.constexpr, V: gl.constexpr):
    """[warps, V] each: what every warp's rows of part c give q and k."""
    of_q = gl.reshape(part * column(by_q, c), [WARPS, ROWS // WARPS, V])
    of_k = gl.reshape(part * column(by_k, c), [WARPS, ROWS // WARPS, V])
    return gl.reduce((of_q, of_k), 1, add2)


@gluon.jit
def part_of(base, c: gl.constexpr, V: gl.constexpr):
    """[ROWS, V]: where part c of the state at base lies."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))[:, None]
    return base + r * V + gl.arange(0, V, gl.SliceLayout(0, TILE))[None, :] + c * ROWS * V


@gluon.jit
def fetch(memory, base, c: gl.constexpr, V: gl.constexpr):
    """Sets part c of the state at base on its way, as a group of its own to wait for."""
    async_copy.async_copy_global_to_shared(memory, part_of(base, c, V), eviction_policy="evict_first")
    async_copy.commit_group()


@gluon.jit
def rows_of(
    first, replayed, window, drafts, fresh, fresh_stride, WIDTH: gl.constexpr, W: gl.constexpr, BW: gl.constexpr
):
    """[1, BW]: where rows first + j begin, numbered as in `decode_kernel`."""
    row = first + gl.arange(0, BW, gl.SliceLayout(0, TAPS))[None, :]
    since = (row - replayed).to(gl.int64) * fresh_stride
    late = gl.where(row < replayed, drafts + row * WIDTH, fresh + since)
    return gl.where(row < 0, window + (W - 1 + row) * WIDTH, late)


@gluon.jit
def inputs_of(
    i, live, n, h, slot, replayed, T, D,
    qkv, z, beta, out_gate, window, draft_qkv, draft_z, draft_beta, qkv_row, z_row, beta_row, gate_row,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """Of token i, the first replayed one being 0: the last rows of q, k, v: [channels, BW]; logits; output gate."""
    WIDTH: gl.constexpr = H * (2 * K + V)
    ks = gl.arange(0, K, gl.SliceLayout(1, TAPS))
    vs = gl.arange(0, V, gl.SliceLayout(0, TILE))
    first = n.to(gl.int64) * T
    past, drafts, fresh = window + slot * (W - 1) * WIDTH, draft_qkv + slot * D * WIDTH, qkv + first * qkv_row
    rows = rows_of(i - (W - 1), replayed, past, drafts, fresh, qkv_row, WIDTH, W, BW)
    mask = live & (gl.arange(0, BW, gl.SliceLayout(0, TAPS))[None, :] < W)
    q_rows = gl.load(rows + (h * K + ks)[:, None], mask=mask, other=0.0)
    k_rows = gl.load(rows + (H * K + h * K + ks)[:, None], mask=mask, other=0.0)
    v_rows = gl.load(rows + (2 * H * K + h * V + ks)[:, None], mask=mask, other=0.0)
    t = first + i - replayed
    at_z, at_beta = z + t * z_row + h * K, beta + t * beta_row + h
    if i < replayed:
        at_z, at_beta = draft_z + ((slot * D + i) * H + h) * K, draft_beta + (slot * D + i) * H + h
    logit = gl.load(at_z + ks, mask=live & (ks >= 0), other=0.0)
    strength = gl.load(at_beta, mask=live, other=0.0)
    opening = gl.load(out_gate + t * gate_row + h * V + vs, mask=live & (i >= replayed) & (vs >= 0), other=0.0)
    return q_rows, k_rows, v_rows, logit, strength, opening


@Launcher
@gluon.jit(  # as for `decode_kernel`
    do_not_specialize=["qkv_row", "z_row", "beta_row", "gate_row", "N", "S", "T", "D", "held", "draft"],
    do_not_specialize_on_alignment=["qkv", "z", "beta", "out_gate", "o"],
)
def decode_hopper_kernel(
    qkv, z, beta, out_gate, o, state, window, draft_qkv, draft_z, draft_beta, slots, accepted,
    conv, A_log, dt_bias, norm, scale, g_min, eps, qkv_row, z_row, beta_row, gate_row, N, S, T, D, held, draft,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, GATE: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """As `decode_kernel`, for every num_programs/H-th sequence and one head; H divides num_programs."""
    WIDTH: gl.constexpr = H * (2 * K + V)
    ks = gl.arange(0, K, gl.SliceLayout(1, TAPS))
    vs = gl.arange(0, V, gl.SliceLayout(0, TILE))
    j = gl.arange(0, BW, gl.SliceLayout(0, TAPS))[None, :]
    h, n, stride = gl.program_id(0) % H, gl.program_id(0) // H, gl.num_programs(0) // H
    of_q, of_k, of_v = (h * K + ks)[:, None], ((H + h) * K + ks)[:, None], (2 * H * K + h * V + ks)[:, None]
    slot = gl.load(slots + n).to(gl.int64)
    replayed = gl.maximum(gl.minimum(gl.load(accepted + n).to(gl.int32), held), 0)
    next_slot = gl.load(slots + n + stride, mask=n + stride < N, other=-1)
    next_accepted = gl.load(accepted + n + stride, mask=n + stride < N, other=0)
    memory = (
        gl.allocate_shared_memory(gl.float32, [ROWS, V], PLAIN),
        gl.allocate_shared_memory(gl.float32, [ROWS, V], PLAIN),
        gl.allocate_shared_memory(gl.float32, [ROWS, V], PLAIN),
        gl.allocate_shared_memory(gl.float32, [ROWS, V], PLAIN),
    )
    valid = (slot >= 0) & (slot < S)
    if valid:
        for c in gl.static_range(K // ROWS):
            fetch(memory[c], state + (slot * H + h) * K * V, c, V)
    q_rows, k_rows, v_rows, logit, strength, opening = inputs_of(
        0, valid & (replayed + T > 0), n, h, slot, replayed, T, D,
        qkv, z, beta, out_gate, window, draft_qkv, draft_z, draft_beta, qkv_row, z_row, beta_row, gate_row,
        H, K, V, W, BW,
    )  # fmt: skip
    q_taps = gl.load(conv + of_q * W + j, mask=j < W, other=0.0).to(gl.float32)
    k_taps = gl.load(conv + of_k * W + j, mask=j < W, other=0.0).to(gl.float32)
    v_taps = gl.load(conv + of_v * W + j, mask=j < W, other=0.0).to(gl.float32)
    rate = gl.exp2(gl.load(A_log + h).to(gl.float32) * LOG2E)
    bias = gl.load(dt_bias + h * K + ks).to(gl.float32)
    gain = gl.load(norm + vs).to(gl.float32)
    q_line, k_line, v_line, decay_line, decayed_q, decayed_k = line(K), line(K), line(V), line(K), line(K), line(K)

    while n < N:
        following, valid = n + stride, (slot >= 0) & (slot < S)
        following_slot = next_slot.to(gl.int64)
        following_replayed = gl.maximum(gl.minimum(next_accepted.to(gl.int32), held), 0)
        following_valid = (following_slot >= 0) & (following_slot < S)
        next_slot = gl.load(slots + following + stride, mask=following + stride < N, other=-1)
        next_accepted = gl.load(accepted + following + stride, mask=following + stride < N, other=0)
        at_state = state + (slot * H + h) * K * V
        at_following = state + (following_slot * H + h) * K * V
        total = gl.where(valid, replayed + T, 0)
        kept = gl.where(valid, replayed + T - draft * T, 0)  # tokens that go into the pool's state
        first = n.to(gl.int64) * T  # row of the sequence's first new token
        at_o = o + (first * H + h) * V + vs
        past = window + slot * (W - 1) * WIDTH
        if valid == 0:
            for t in range(T):
                y = gl.where(slot < 0, gl.zeros([V], gl.float32, gl.SliceLayout(0, TILE)), float("nan"))
                gl.store(at_o + t * H * V, y.to(o.dtype.element_ty))

        for i in range(gl.maximum(total, 1)):  # where there is no token, to fetch the next state all the same
            more = i + 1 < total
            q_now, k_now, v_now, logit_now, strength_now, opening_now = q_rows, k_rows, v_rows, logit, strength, opening
            q_rows, k_rows, v_rows, logit, strength, opening = inputs_of(  # ahead of the states, which take long
                gl.where(more, i + 1, 0), more | (following_valid & (following_replayed + T > 0)),
                gl.where(more, n, following), h, gl.where(more, slot, following_slot),
                gl.where(more, replayed, following_replayed), T, D,
                qkv, z, beta, out_gate, window, draft_qkv, draft_z, draft_beta, qkv_row, z_row, beta_row, gate_row,
                H, K, V, W, BW,
            )  # fmt: skip
            if (i + 1 == total) & (kept == total):  # the window is the rows at hand but the first
                to, late = past + (j - 1) * WIDTH, (j > 0) & (j < W)
                gl.store(to + of_q, q_now, mask=late)
                gl.store(to + of_k, k_now, mask=late)
                gl.store(to + of_v, v_now, mask=late)
            decay = gl.exp2(log2_decay(logit_now.to(gl.float32), rate, bias, g_min, GATE))
            q, k = silu_conv(q_now, q_taps), silu_conv(k_now, k_taps)
            q_line.store(q)
            k_line.store(k)
            v_line.store(silu_conv(v_now, v_taps))
            decay_line.store(decay)
            decayed_q.store(q * decay)
            decayed_k.store(k * decay)

            async_copy.wait_group(K // ROWS - 1)
            by_q, by_k = in_warps(memory[0].load(TILE), decayed_q, decayed_k, 0, V)
            for c in gl.static_range(1, K // ROWS):
                async_copy.wait_group(K // ROWS - 1 - c)
                more_q, more_k = in_warps(memory[c].load(TILE), decayed_q, decayed_k, c, V)
                by_q, by_k = by_q + more_q, by_k + more_k
            q, k = q_line.load(gl.SliceLayout(0, TILE)), k_line.load(gl.SliceLayout(0, TILE))
            qq, kk, qk = gl.reduce((q * q, k * k, q * k), 0, add3)
            q_factor, k_factor = gl.rsqrt(qq + 1e-6), gl.rsqrt(kk + 1e-6)
            read, known = gl.reduce((by_q, by_k), 0, add2)  # what the decayed state gives q and k
            read = gl.convert_layout(read, gl.SliceLayout(0, TILE))
            known = gl.convert_layout(known, gl.SliceLayout(0, TILE))
            error = v_line.load(gl.SliceLayout(0, TILE)) - known * k_factor
            write = sigmoid(strength_now.to(gl.float32)) * k_factor * error
            for c in gl.static_range(K // ROWS):
                part = memory[c].load(TILE) * column(decay_line, c) + column(k_line, c) * write[None, :]
                if i + 1 == kept:
                    gl.store(part_of(at_state, c, V), part, eviction_policy="evict_first")
                if more:
                    memory[c].store(part)
                elif following_valid:
                    fetch(memory[c], at_following, c, V)
            if (i >= replayed) & (i < total):
                read = scale * q_factor * (read + qk * write)
                opened = gain * sigmoid(opening_now.to(gl.float32))
                y = read * gl.rsqrt(gl.sum(read * read, 0) / V + eps) * opened
                gl.store(at_o + (i - replayed).to(gl.int64) * H * V, y.to(o.dtype.element_ty))

        if kept < total:  # drafts: keep their inputs, and of the window what was accepted before them
            fresh, drafts = qkv + first * qkv_row, draft_qkv + slot * D * WIDTH
            if kept > 0:
                rows = rows_of(kept - (W - 1), replayed, past, drafts, fresh, qkv_row, WIDTH, W, BW)
                q_kept = gl.load(rows + of_q, mask=j < W - 1)
                k_kept = gl.load(rows + of_k, mask=j < W - 1)
                v_kept = gl.load(rows + of_v, mask=j < W - 1)
                gl.store(past + j * WIDTH + of_q, q_kept, mask=j < W - 1)
                gl.store(past + j * WIDTH + of_k, k_kept, mask=j < W - 1)
                gl.store(past + j * WIDTH + of_v, v_kept, mask=j < W - 1)
            for t in range(T):
                token, draft_token = first + t, slot * D + t
                row, to = qkv + token * qkv_row + 0 * j, draft_qkv + draft_token * WIDTH + 0 * j
                gl.store(to + of_q, gl.load(row + of_q, mask=j == 0), mask=j == 0)
                gl.store(to + of_k, gl.load(row + of_k, mask=j == 0), mask=j == 0)
                gl.store(to + of_v, gl.load(row + of_v, mask=j == 0), mask=j == 0)
                gl.store(draft_z + (draft_token * H + h) * K + ks, gl.load(z + token * z_row + h * K + ks))
                gl.store(draft_beta + draft_token * H + h, gl.load(beta + token * beta_row + h))
        n, slot, replayed = following, following_slot, following_replayed
    async_copy.wait_group(0)

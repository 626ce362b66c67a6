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
def convolved(rows, channels, taps, W: gl.constexpr, BW: gl.constexpr):
    """silu(conv), [channels], of the last W rows: [channels, BW]."""
    j = gl.arange(0, BW, gl.SliceLayout(0, TAPS))[None, :]
    weight = gl.load(taps + channels[:, None] * W + j, mask=j < W, other=0.0).to(gl.float32)
    y = gl.sum(rows.to(gl.float32) * weight, 1)
    return y * sigmoid(y)


@gluon.jit
def column(vectors, number: gl.constexpr, c: gl.constexpr):
    """[ROWS, 1]: part c of a vector [K]."""
    return vectors.index(number).slice(c * ROWS, ROWS).load(gl.SliceLayout(1, TILE))[:, None]


@gluon.jit
def part_of(base, c: gl.constexpr, V: gl.constexpr):
    """[ROWS, V]: where part c of the state at base lies."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))[:, None]
    return base + r * V + gl.arange(0, V, gl.SliceLayout(0, TILE))[None, :] + c * ROWS * V


@gluon.jit
def fetch(memory, base, c: gl.constexpr, V: gl.constexpr):
    """Sets part c of the state at base on its way; what is not committed as a group is not waited for."""
    async_copy.async_copy_global_to_shared(memory.index(c), part_of(base, c, V), eviction_policy="evict_first")
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
    """As `decode_kernel`, for every num_programs-th of the N*H heads."""
    WIDTH: gl.constexpr = H * (2 * K + V)
    PARTS: gl.constexpr = K // ROWS
    ks = gl.arange(0, K, gl.SliceLayout(1, TAPS))
    vs = gl.arange(0, V, gl.SliceLayout(0, TILE))
    j = gl.arange(0, BW, gl.SliceLayout(0, TAPS))[None, :]
    gain = gl.load(norm + vs).to(gl.float32)
    memory = gl.allocate_shared_memory(gl.float32, [PARTS, ROWS, V], PLAIN)
    vectors = gl.allocate_shared_memory(gl.float32, [5, K], LINE)

    item, stride = gl.program_id(0), gl.num_programs(0)
    slot = gl.load(slots + item // H).to(gl.int64)
    replayed = gl.maximum(gl.minimum(gl.load(accepted + item // H).to(gl.int32), held), 0)
    ahead = item + stride
    next_slot = gl.load(slots + ahead // H, mask=ahead < N * H, other=-1)
    next_accepted = gl.load(accepted + ahead // H, mask=ahead < N * H, other=0)
    valid = (slot >= 0) & (slot < S)
    if valid:
        for c in gl.static_range(PARTS):
            fetch(memory, state + (slot * H + item % H) * K * V, c, V)
    q_rows, k_rows, v_rows, logit, strength, opening = inputs_of(
        0, valid & (replayed + T > 0), item // H, item % H, slot, replayed, T, D,
        qkv, z, beta, out_gate, window, draft_qkv, draft_z, draft_beta, qkv_row, z_row, beta_row, gate_row,
        H, K, V, W, BW,
    )  # fmt: skip
    while item < N * H:
        n, h, valid = item // H, item % H, (slot >= 0) & (slot < S)
        following = item + stride
        following_slot = next_slot.to(gl.int64)
        following_replayed = gl.maximum(gl.minimum(next_accepted.to(gl.int32), held), 0)
        following_valid = (following_slot >= 0) & (following_slot < S)
        ahead = following + stride
        next_slot = gl.load(slots + ahead // H, mask=ahead < N * H, other=-1)
        next_accepted = gl.load(accepted + ahead // H, mask=ahead < N * H, other=0)
        at_state = state + (slot * H + h) * K * V
        at_following = state + (following_slot * H + following % H) * K * V
        total = gl.where(valid, replayed + T, 0)
        kept = gl.where(valid, replayed + T - draft * T, 0)  # tokens that go into the pool's state
        first = n.to(gl.int64) * T  # row of the sequence's first new token
        at_o = o + (first * H + h) * V + vs
        if valid == 0:
            for t in range(T):
                y = gl.where(slot < 0, gl.zeros([V], gl.float32, gl.SliceLayout(0, TILE)), float("nan"))
                gl.store(at_o + t * H * V, y.to(o.dtype.element_ty))
        past = window + slot * (W - 1) * WIDTH
        of_q, of_k, of_v = h * K + ks, (H + h) * K + ks, 2 * H * K + h * V + ks
        rate = gl.exp2(gl.load(A_log + h).to(gl.float32) * LOG2E)
        bias = gl.load(dt_bias + h * K + ks).to(gl.float32)

        for i in range(gl.maximum(total, 1)):  # where there is no token, to fetch the next head's all the same
            if (i + 1 == total) & (kept == total):  # the window is the rows at hand but the first
                to, late = past + (j - 1) * WIDTH, (j > 0) & (j < W)
                gl.store(to + of_q[:, None], q_rows, mask=late)
                gl.store(to + of_k[:, None], k_rows, mask=late)
                gl.store(to + of_v[:, None], v_rows, mask=late)
            decay = gl.exp2(log2_decay(logit.to(gl.float32), rate, bias, g_min, GATE))
            q, k = convolved(q_rows, of_q, conv, W, BW), convolved(k_rows, of_k, conv, W, BW)
            vectors.index(0).store(q * decay)
            vectors.index(1).store(k * decay)
            vectors.index(2).store(decay)
            vectors.index(3).store(k)
            vectors.index(4).store(convolved(v_rows, of_v, conv, W, BW))
            qq, kk, qk = gl.reduce((q * q, k * k, q * k), 0, add3)
            q_factor, k_factor = gl.rsqrt(qq + 1e-6), gl.rsqrt(kk + 1e-6)
            write_strength, openness = sigmoid(strength.to(gl.float32)), sigmoid(opening.to(gl.float32))
            more = i + 1 < total
            after = gl.where(more, item, following)
            q_rows, k_rows, v_rows, logit, strength, opening = inputs_of(
                gl.where(more, i + 1, 0), more | (following_valid & (following_replayed + T > 0)),
                after // H, after % H, gl.where(more, slot, following_slot),
                gl.where(more, replayed, following_replayed), T, D,
                qkv, z, beta, out_gate, window, draft_qkv, draft_z, draft_beta, qkv_row, z_row, beta_row, gate_row,
                H, K, V, W, BW,
            )  # fmt: skip

            async_copy.wait_group(0)
            by_q = gl.zeros([ROWS, V], gl.float32, TILE)
            by_k = gl.zeros([ROWS, V], gl.float32, TILE)
            for c in gl.static_range(PARTS):
                part = memory.index(c).load(TILE)
                by_q += part * column(vectors, 0, c)
                by_k += part * column(vectors, 1, c)
            read, known = gl.reduce((by_q, by_k), 0, add2)  # what the decayed state gives q and k
            error = vectors.index(4).load(gl.SliceLayout(0, TILE)) - known * k_factor
            write = write_strength * k_factor * error
            for c in gl.static_range(PARTS):
                part = memory.index(c).load(TILE) * column(vectors, 2, c) + column(vectors, 3, c) * write[None, :]
                if i + 1 == kept:
                    gl.store(part_of(at_state, c, V), part, eviction_policy="evict_first")
                if more:
                    memory.index(c).store(part)
                elif following_valid:
                    fetch(memory, at_following, c, V)
            if (i >= replayed) & (i < total):
                read = scale * q_factor * (read + qk * write)
                y = read * gl.rsqrt(gl.sum(read * read, 0) / V + eps) * gain * openness
                gl.store(at_o + (i - replayed).to(gl.int64) * H * V, y.to(o.dtype.element_ty))

        if kept < total:  # drafts: keep their inputs, and of the window what was accepted before them
            fresh, drafts = qkv + first * qkv_row, draft_qkv + slot * D * WIDTH
            if kept > 0:
                rows = rows_of(kept - (W - 1), replayed, past, drafts, fresh, qkv_row, WIDTH, W, BW)
                q_kept = gl.load(rows + of_q[:, None], mask=j < W - 1)
                k_kept = gl.load(rows + of_k[:, None], mask=j < W - 1)
                v_kept = gl.load(rows + of_v[:, None], mask=j < W - 1)
                gl.store(past + j * WIDTH + of_q[:, None], q_kept, mask=j < W - 1)
                gl.store(past + j * WIDTH + of_k[:, None], k_kept, mask=j < W - 1)
                gl.store(past + j * WIDTH + of_v[:, None], v_kept, mask=j < W - 1)
            for i in range(T):
                token = first + i
                row = qkv + token * qkv_row
                gl.store(drafts + i * WIDTH + of_q, gl.load(row + of_q))
                gl.store(drafts + i * WIDTH + of_k, gl.load(row + of_k))
                gl.store(drafts + i * WIDTH + of_v, gl.load(row + of_v))
                at = (slot * D + i) * H + h
                gl.store(draft_z + at * K + ks, gl.load(z + token * z_row + h * K + ks))
                gl.store(draft_beta + at, gl.load(beta + token * beta_row + h))
        item, slot, replayed = following, following_slot, following_replayed
    async_copy.wait_group(0)

"""A decoding step in one kernel: convolution, norm, gate, recurrence, output norm.

One program a sequence and head.  It holds the head's state in registers, works through the tokens one by one, and is
alone in reading and writing its part of the pool, so that nothing is exchanged between programs.  Replayed, drafted and
ordinary tokens run through the same loop of the same compiled kernel: their counts are run-time numbers, and equal
inputs give equal bits.

A warp has whole rows of the state [K, V]: the sums over K are sums within a thread, then one exchange among warps.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.ops.kda.gate import BoundedGate
from perilune.ops.kda.kernels.decode_hopper import decode_hopper_kernel
from perilune.ops.kda.kernels.gate import BOUNDED, LOG2E, SOFTPLUS, log2_decay, sigmoid
from perilune.ops.launcher import Launcher

if TYPE_CHECKING:
    from perilune.ops.kda.decode import KdaPool, KdaWeights

# Elements of the state in a thread.  Two heads of 128 x 128 then share a multiprocessor, and the vectors of a head have
# an element for every thread: with fewer, the compiler computes them anew in the layout of the state, and spills.
ELEMENTS = 128

RESIDENT = 3  # programs of the kernel for Hopper that share a multiprocessor: 168 registers, 72 KB
HOPPER = {"num_warps": 4, "maxnreg": 168}

# Rows of a sequence, numbered from its first token that is not in the state: W-1 in the window before it, then the
# replayed drafts, then the new tokens.


@triton.jit
def row_of(i, replayed, window, drafts, fresh, fresh_stride, WIDTH: tl.constexpr, W: tl.constexpr):
    """Where row i begins."""
    if i < 0:
        row = window + (W - 1 + i) * WIDTH
    elif i < replayed:
        row = drafts + i * WIDTH
    else:
        row = fresh + (i - replayed).to(tl.int64) * fresh_stride
    return row


@triton.jit
def convolved(
    i, of_q, of_k, of_v, in_k, in_v, taps, replayed, window, drafts, fresh, fresh_stride,
    WIDTH: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """silu(conv) at row i: the channels of_q, of_k, of_v."""
    q, k, v = tl.zeros(of_q.shape, tl.float32), tl.zeros(of_k.shape, tl.float32), tl.zeros(of_v.shape, tl.float32)
    for j in tl.static_range(W):
        row = row_of(i - (W - 1) + j, replayed, window, drafts, fresh, fresh_stride, WIDTH, W)
        q += tap(row, of_q, in_k, taps, j, W)
        k += tap(row, of_k, in_k, taps, j, W)
        v += tap(row, of_v, in_v, taps, j, W)
    return q * sigmoid(q), k * sigmoid(k), v * sigmoid(v)


@triton.jit
def tap(row, channels, mask, taps, j, W: tl.constexpr):
    x = tl.load(row + channels, mask, other=0.0).to(tl.float32)
    return x * tl.load(taps + channels * W + j, mask, other=0.0).to(tl.float32)


@triton.jit
def unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def copy_row(source, target, of_q, of_k, of_v, in_k, in_v):
    """The part of one head."""
    tl.store(target + of_q, tl.load(source + of_q, in_k), in_k)
    tl.store(target + of_k, tl.load(source + of_k, in_k), in_k)
    tl.store(target + of_v, tl.load(source + of_v, in_v), in_v)


@Launcher
@triton.jit(  # one compiled kernel, however many tokens there are and wherever they lie
    do_not_specialize=["qkv_row", "z_row", "beta_row", "gate_row", "N", "S", "T", "D", "held", "draft"],
    do_not_specialize_on_alignment=["qkv", "z", "beta", "out_gate", "o"],
)
def decode_kernel(
    qkv, z, beta, out_gate, o, state, window, draft_qkv, draft_z, draft_beta, slots, accepted,
    conv, A_log, dt_bias, norm, scale, g_min, eps, qkv_row, z_row, beta_row, gate_row, N, S, T, D, held, draft,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, GATE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Tensors as in `kda_decode`; *_row: their strides from token to token.  N: sequences, of which this kernel needs
    no count.  held: D where drafts may be replayed, else 0.  draft: 1 where the new tokens are guesses, else 0."""
    WIDTH: tl.constexpr = H * (2 * K + V)
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    slot = tl.load(slots + n).to(tl.int64)
    first = n.to(tl.int64) * T  # row of the sequence's first new token
    ks, vs = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = ks < K, vs < V
    o += (first * H + h) * V + vs
    if (slot < 0) | (slot >= S):
        for t in range(T):
            y = tl.where(slot < 0, tl.zeros([BV], tl.float32), float("nan"))
            tl.store(o + t * H * V, y.to(o.dtype.element_ty), in_v)
    else:
        replayed = tl.maximum(tl.minimum(tl.load(accepted + n).to(tl.int32), held), 0)
        total = replayed + T
        kept = total - draft * T  # tokens that go into the pool's state
        at_state = state + (slot * H + h) * K * V + ks[:, None] * V + vs[None, :]
        in_state = in_k[:, None] & in_v[None, :]

        past = window + slot * (W - 1) * WIDTH
        drafts = draft_qkv + slot * D * WIDTH
        drafts_z = draft_z + slot * D * H * K + h * K + ks
        drafts_beta = draft_beta + slot * D * H + h
        fresh = qkv + first * qkv_row
        fresh_z = z + first * z_row + h * K + ks
        fresh_beta = beta + first * beta_row + h
        gates = out_gate + first * gate_row + h * V + vs
        of_q, of_k, of_v = h * K + ks, (H + h) * K + ks, 2 * H * K + h * V + vs
        rate = tl.exp2(tl.load(A_log + h).to(tl.float32) * LOG2E)
        bias = tl.load(dt_bias + h * K + ks, in_k, other=0.0).to(tl.float32)
        gain = tl.load(norm + vs, in_v, other=0.0).to(tl.float32)
        memory = tl.load(at_state, in_state, other=0.0)  # on its way while q, k, v and decay are computed

        for i in range(total):
            if (i == kept) & (kept > 0):
                tl.store(at_state, memory, in_state)
            t = (i - replayed).to(tl.int64)
            q, k, v = convolved(i, of_q, of_k, of_v, in_k, in_v, conv, replayed, past, drafts, fresh, qkv_row, WIDTH, W)
            if t < 0:
                logit = tl.load(drafts_z + i * H * K, in_k, other=0.0).to(tl.float32)
                strength = tl.load(drafts_beta + i * H).to(tl.float32)
                opening = tl.zeros([BV], tl.float32)
            else:
                logit = tl.load(fresh_z + t * z_row, in_k, other=0.0).to(tl.float32)
                strength = tl.load(fresh_beta + t * beta_row).to(tl.float32)
                opening = tl.load(gates + t * gate_row, in_v, other=0.0).to(tl.float32)
            q, k = unit(q), unit(k)
            memory *= tl.exp2(log2_decay(logit, rate, bias, g_min, GATE))[:, None]
            error = v - tl.sum(memory * k[:, None], 0)
            memory += k[:, None] * (sigmoid(strength) * error)[None, :]
            if t >= 0:
                read = scale * tl.sum(memory * q[:, None], 0)
                y = read * tl.rsqrt(tl.sum(read * read, 0) / V + eps) * gain * sigmoid(opening)
                tl.store(o + t * H * V, y.to(o.dtype.element_ty), in_v)
        if (kept == total) & (kept > 0):
            tl.store(at_state, memory, in_state)

        tl.debug_barrier()  # every thread has read the window and the drafts
        if kept > 0:
            for j in tl.static_range(W - 1):
                row = row_of(kept - (W - 1) + j, replayed, past, drafts, fresh, qkv_row, WIDTH, W)
                copy_row(row, past + j * WIDTH, of_q, of_k, of_v, in_k, in_v)
        tl.debug_barrier()
        for i in range(kept, total):
            t = (i - replayed).to(tl.int64)
            copy_row(fresh + t * qkv_row, drafts + t * WIDTH, of_q, of_k, of_v, in_k, in_v)
            tl.store(drafts_z + t * H * K, tl.load(fresh_z + t * z_row, in_k), in_k)
            tl.store(drafts_beta + t * H, tl.load(fresh_beta + t * beta_row))


def decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    pool: "KdaPool",
    slots: Tensor,
    weights: "KdaWeights",
    draft: bool,
    accepted: Tensor | None,
    *,
    hopper: bool = False,
) -> Tensor:
    """`perilune.ops.kda.kda_decode`, its arguments checked.  hopper: by the kernel written for it."""
    N, T = qkv.shape[:2]
    S, H, K, V = pool.state.shape
    o = torch.empty(N, T, H, V, dtype=out_gate.dtype, device=out_gate.device)
    if N == 0 or H == 0:
        return o
    D = pool.draft_qkv.shape[1]
    qkv, z, beta, out_gate = (rows_of(x) for x in (qkv, z, beta, out_gate))
    gate = weights.gate
    BK, BV, BW = (triton.next_power_of_2(x) for x in (max(16, K), max(16, V), weights.conv.shape[-1]))
    if hopper:
        kernel, programs, how = decode_hopper_kernel, H * turns(N, H, o.device), {"BW": BW, **HOPPER}
    else:
        kernel, programs, how = decode_kernel, N * H, {"BK": BK, "BV": BV, "num_warps": BK * BV // (32 * ELEMENTS) or 1}
    with torch.cuda.device_of(o):  # kernels are launched on the current device
        kernel[(programs,)](
            qkv, z, beta, out_gate, o, pool.state, pool.window, pool.draft_qkv, pool.draft_z, pool.draft_beta,
            slots.contiguous(), (slots if accepted is None else accepted.to(slots.dtype)).contiguous(),
            weights.conv.contiguous(), gate.A_log.contiguous(), gate.dt_bias.contiguous(), weights.norm.contiguous(),
            K**-0.5 if weights.scale is None else weights.scale,
            gate.g_min if isinstance(gate, BoundedGate) else 0.0,
            weights.norm_eps, qkv.stride(0), z.stride(0), beta.stride(0), out_gate.stride(0),
            N, S, T, D, 0 if accepted is None else D, int(draft), H, K, V, weights.conv.shape[-1],
            GATE=BOUNDED if isinstance(gate, BoundedGate) else SOFTPLUS, **how,
        )  # fmt: skip
    return o


def turns(N: int, H: int, device: torch.device) -> int:
    """Programs a head: as many as there is room for, then no more than pass as few sequences each."""
    most = max(1, RESIDENT * multiprocessors(device) // H)
    return triton.cdiv(N, triton.cdiv(N, most))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of(x: Tensor) -> Tensor:
    """[N, T, ...] as [N*T, channels], each row without gaps; a copy only where need be."""
    rows = x.reshape(x.shape[0] * x.shape[1], -1) if x.numel() else x.new_empty(0, 1)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()

"""Decoding with KDA: one fused step for many sequences, whose states lie in a pool, and drafts that leave no trace.

A step takes a token from its projections to the input of the layer's last projection:

    q, k, v = silu(conv(qkv)),   q, k /= sqrt(|.|^2 + 1e-6),   g = gate(z),   b = sigmoid(beta)
    S = (I - b k k^T) Diag(exp g) S + b k v^T,   o = scale * S^T q                 (Kimi Linear paper; K3 report)
    y = sigmoid(out_gate) * norm_weight * o / sqrt(mean(o^2) + norm_eps)

Everything between inputs and y is float32 (float64 where the pool is); y is rounded once.

A state written over cannot be taken back.  So drafted tokens are worked through on top of a state that stays as it is,
and the pool keeps their inputs, sixty times smaller.  Once it is known how many were right, those are worked through
again, by the same instructions in the same order, and the state is what it would be had no other token been seen.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.autocast import without_autocast
from perilune.ops.fused import DTYPES, out_of_reach
from perilune.ops.hopper import not_hopper
from perilune.ops.kda.api import L2_EPS
from perilune.ops.kda.gate import BoundedGate, Gate

MAX_STATE = 1 << 14  # elements of a head's state that the kernel holds in registers, sides rounded up to powers of two


@dataclass(frozen=True, eq=False)
class KdaPool:
    """What decoding remembers of S sequences of one layer, a slot each; written in place, K-first like every state.

    Hand a slot to a sequence by writing `state[slot]` and `window[slot]`: zeros, or what a prompt left behind, as
    `kda` and `short_conv` return it.
    """

    state: Tensor
    """[S, H, K, V], float32."""
    window: Tensor
    """[S, W-1, H*(2K+V)], the last rows of q | k | v before the convolution, oldest first."""
    draft_qkv: Tensor
    """[S, D, H*(2K+V)], the inputs of up to D drafted tokens."""
    draft_z: Tensor
    """[S, D, H, K]."""
    draft_beta: Tensor
    """[S, D, H]."""

    @classmethod
    def zeros(
        cls,
        slots: int,
        heads: int,
        K: int,
        V: int,
        *,
        width: int = 4,
        drafts: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "KdaPool":
        """For convolutions of `width` taps, up to `drafts` drafted tokens and projections of `dtype`."""
        rows, state_dtype = heads * (2 * K + V), torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(slots, heads, K, V, dtype=state_dtype, device=device),
            torch.zeros(slots, width - 1, rows, dtype=dtype, device=device),
            torch.zeros(slots, drafts, rows, dtype=dtype, device=device),
            torch.zeros(slots, drafts, heads, K, dtype=dtype, device=device),
            torch.zeros(slots, drafts, heads, dtype=dtype, device=device),
        )


@dataclass(frozen=True, eq=False)
class KdaWeights:
    """The parameters between a layer's projections."""

    conv: Tensor
    """[H*(2K+V), W] or [H*(2K+V), 1, W], the filters of q, k and v one below the other."""
    gate: Gate
    """BoundedGate or SoftplusGate."""
    norm: Tensor
    """[V], one scale of the output norm for all heads."""
    norm_eps: float = 1e-5
    scale: float | None = None
    """Of the output before its norm; K**-0.5 if None."""


@torch.no_grad()
def kda_decode(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    pool: KdaPool,
    slots: Tensor,
    weights: KdaWeights,
    *,
    draft: bool = False,
    accepted: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The next T tokens of N sequences: the step at the head of this file for each, on states in `pool`.

    Args:
        qkv: [N, T, H*(2K+V)] projections before the convolution, all heads' q, then k, then v; in the pool's dtype.
        z: [N, T, H, K] logits of the decay, before the gate's bias; in the pool's dtype.
        beta: [N, T, H] logits of the write strength; in the pool's dtype.
        out_gate: [N, T, H, V] logits of the output gate.
        pool: is written to.
        slots: [N] int32 or int64, the sequences' places in the pool, each at most once.  A negative one is padding:
            nothing is read or written for it, and its outputs are zero.
        weights: of the layer.
        draft: the tokens are guesses.  States and windows stay as they are; the tokens' inputs are kept in the pool,
            in place of earlier drafts.
        accepted: [N] int32 or int64, how many of the drafts kept by the call before were right, the first ones.  They
            become part of state and window first, at no further pass over the state; all others are forgotten.
            None is zero.  The pool does not count them: more than were kept then would be what an older call left.
        backend: "auto", "gluon", "triton" or "reference".

    Returns:
        [N, T, H, V] in out_gate's dtype.

    Shapes alone decide what is launched, and nothing is read back, so a call can be captured in a CUDA graph.  The
    price: values of `slots` and `accepted` are checked on the CPU only.  On a device a slot past the pool gives NaN and
    writes nothing, and `accepted` is clamped to what the pool has room for.  There are no gradients.

    Raises ShapeError for tensors that do not fit together, BackendError for a backend that cannot serve the call.
    """
    _check(qkv, z, beta, out_gate, pool, slots, weights, draft, accepted)
    arguments = qkv, z, beta, out_gate, pool, slots, weights, draft, accepted
    with without_autocast(qkv):
        return BACKENDS.pick(backend, *arguments)(*arguments)


def kda_accept(pool: KdaPool, slots: Tensor, accepted: Tensor, weights: KdaWeights, *, backend: str = "auto") -> None:
    """Makes the first `accepted: [N]` drafts of the last `kda_decode` part of state and window; no new token.

    For the end of a drafted stretch: in the midst of one, give `accepted` to the next `kda_decode` instead.
    Arguments and errors are as there.
    """
    H, V = pool.state.shape[1], pool.state.shape[3]
    N = len(slots)
    qkv, z, beta = (x.new_empty(N, 0, *x.shape[2:]) for x in (pool.draft_qkv, pool.draft_z, pool.draft_beta))
    kda_decode(qkv, z, beta, qkv.new_empty(N, 0, H, V), pool, slots, weights, accepted=accepted, backend=backend)


def reference(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    pool: KdaPool,
    slots: Tensor,
    weights: KdaWeights,
    draft: bool,
    accepted: Tensor | None,
) -> Tensor:
    """One token after another, of all sequences at once; the accepted drafts before the new tokens."""
    padding = slots < 0
    if bool(padding.any()):
        held = ~padding
        o = out_gate.new_zeros(out_gate.shape)
        accepted = None if accepted is None else accepted[held]
        o[held] = reference(qkv[held], z[held], beta[held], out_gate[held], pool, slots[held], weights, draft, accepted)
        return o
    if accepted is not None:
        for d in range(pool.draft_qkv.shape[1]):
            right = slots[accepted > d]
            drafted = pool.draft_qkv[right, d], pool.draft_z[right, d], pool.draft_beta[right, d]
            state = pool.state[right]
            _, pool.window[right] = _token(*drafted, state, pool.window[right], weights)
            pool.state[right] = state
    state, window = pool.state.index_select(0, slots), pool.window.index_select(0, slots)
    o = out_gate.new_empty(out_gate.shape)
    for t in range(qkv.shape[1]):
        read, window = _token(qkv[:, t], z[:, t], beta[:, t], state, window, weights)
        normal = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + weights.norm_eps)
        o[:, t] = normal * weights.norm.to(read.dtype) * _sigmoid(out_gate[:, t].to(read.dtype))
    if draft:
        for drafts, new in ((pool.draft_qkv, qkv), (pool.draft_z, z), (pool.draft_beta, beta)):
            drafts[slots, : qkv.shape[1]] = new
    else:
        pool.state[slots], pool.window[slots] = state, window
    return o


def _token(
    qkv: Tensor, z: Tensor, beta: Tensor, state: Tensor, window: Tensor, weights: KdaWeights
) -> tuple[Tensor, Tensor]:
    """One token of each sequence, tensors as in `kda_decode` without T: what it reads [N, H, V], and the next window.

    `state` is written over: on a CPU, a new one for every term costs more than the arithmetic.
    """
    (_, H, K, V), dtype = state.shape, state.dtype
    rows = torch.cat([window, qkv[:, None]], 1)  # [N, W, H*(2K+V)]
    u = (rows.to(dtype) * weights.conv.flatten(1).T.to(dtype)).sum(1)
    q, k, v = (x.unflatten(1, (H, -1)) for x in (u * _sigmoid(u)).split((H * K, H * K, H * V), 1))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    state.mul_(weights.gate(z.to(dtype)).exp()[..., None])
    error = v - (k[..., None, :] @ state)[..., 0, :]
    state.addcmul_(k[..., None], (_sigmoid(beta.to(dtype))[..., None] * error)[..., None, :])
    return (K**-0.5 if weights.scale is None else weights.scale) * (q[..., None, :] @ state)[..., 0, :], rows[:, 1:]


def _sigmoid(x: Tensor) -> Tensor:
    """On a CPU `torch.sigmoid` rounds the last few elements of a tensor, which fill no vector, unlike the others.

    With it a sequence's bits would depend on how many others there are.
    """
    return 1 / (1 + (-x).exp())


@torch.compiler.disable  # as in `fused`
def _kernel(*arguments: Any, hopper: bool) -> Tensor:
    from perilune.ops.kda.kernels.decode import decode  # Triton is not everywhere, and not quick to load

    return decode(*arguments, hopper=hopper)


def _triton_refuses(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    pool: KdaPool,
    slots: Tensor,
    weights: KdaWeights,
    draft: bool,
    accepted: Tensor | None,
) -> str | None:
    K, V = pool.state.shape[2:]
    if (reason := out_of_reach(qkv)) is not None:
        return reason
    if any(x.dtype not in DTYPES for x in (qkv, out_gate)):
        return f"it takes float32, bfloat16 and float16, not {qkv.dtype} and {out_gate.dtype}"
    if pool.state.dtype != torch.float32:
        return f"it keeps states in float32, not {pool.state.dtype}"
    if not all(x.is_contiguous() for x in (pool.state, pool.window, pool.draft_qkv, pool.draft_z, pool.draft_beta)):
        return "the pool is not contiguous"
    if (1 << (K - 1).bit_length()) * (1 << (V - 1).bit_length()) > MAX_STATE:
        return f"a head's state of {K} x {V} does not fit into registers"
    return None


def _gluon_refuses(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    pool: KdaPool,
    slots: Tensor,
    weights: KdaWeights,
    draft: bool,
    accepted: Tensor | None,
) -> str | None:
    refused = _triton_refuses(qkv, z, beta, out_gate, pool, slots, weights, draft, accepted)
    if (reason := refused or not_hopper(qkv)) is not None:
        return reason
    K, V, W = *pool.state.shape[2:], weights.conv.shape[-1]
    if qkv.dtype != torch.bfloat16 or out_gate.dtype != torch.bfloat16:
        return f"it is verified for bfloat16 alone so far, and inputs are {qkv.dtype} and {out_gate.dtype}"
    if (K, V, W) != (128, 128, 4) or not isinstance(weights.gate, BoundedGate):
        return (
            f"it is verified for the bounded gate, K = V = 128 and 4 taps alone so far, and K, V, W are {K}, {V}, {W}"
        )
    return None


BACKENDS = Backends("kda_decode")  # best first
BACKENDS.register("gluon", partial(_kernel, hopper=True), _gluon_refuses)
BACKENDS.register("triton", partial(_kernel, hopper=False), _triton_refuses)
BACKENDS.register("reference", reference)


def _check(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    out_gate: Tensor,
    pool: KdaPool,
    slots: Tensor,
    weights: KdaWeights,
    draft: bool,
    accepted: Tensor | None,
) -> None:
    if pool.state.dim() != 4 or qkv.dim() != 3:
        raise ShapeError(
            f"pool, qkv: expected a state [S, H, K, V] and [N, T, H*(2K+V)], got {list(pool.state.shape)} and "
            f"{list(qkv.shape)}; make the pool with KdaPool.zeros"
        )
    S, H, K, V = pool.state.shape
    N, T = qkv.shape[:2]
    D, W, width = pool.draft_qkv.shape[1], weights.conv.shape[-1], H * (2 * K + V)
    conv = [width, 1, W] if weights.conv.dim() == 3 else [width, W]
    for name, x, shape in (
        ("qkv", qkv, [N, T, width]),
        ("z", z, [N, T, H, K]),
        ("beta", beta, [N, T, H]),
        ("out_gate", out_gate, [N, T, H, V]),
        ("slots", slots, [N]),
        ("accepted", accepted, [N]),
        ("pool.window", pool.window, [S, W - 1, width]),
        ("pool.draft_qkv", pool.draft_qkv, [S, D, width]),
        ("pool.draft_z", pool.draft_z, [S, D, H, K]),
        ("pool.draft_beta", pool.draft_beta, [S, D, H]),
        ("weights.conv", weights.conv, conv),
        ("weights.gate.A_log", weights.gate.A_log, [H]),
        ("weights.gate", weights.gate.dt_bias, [H, K]),
        ("weights.norm", weights.norm, [V]),
    ):
        if x is not None and list(x.shape) != shape:
            raise ShapeError(f"{name}: expected {shape}, got {list(x.shape)}; pool {[S, H, K, V]} is [S, H, K, V]")
        if x is not None and x.device != pool.state.device:
            raise ShapeError(f"{name}: expected a tensor on {pool.state.device}, got {x.device}; move it to the pool's")
    if pool.state.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            f"pool.state: expected float32, or float64, got {pool.state.dtype}; it is added to at every token, so keep "
            "states as KdaPool.zeros makes them"
        )
    for name, x in (("qkv", qkv), ("out_gate", out_gate)):
        if not x.is_floating_point():
            raise ShapeError(f"{name}: expected real numbers in floating point, got {x.dtype}; convert it")
    for name, x, held in (
        ("qkv", qkv, pool.window),
        ("qkv", qkv, pool.draft_qkv),
        ("z", z, pool.draft_z),
        ("beta", beta, pool.draft_beta),
    ):
        if x.dtype != held.dtype:
            raise ShapeError(f"{name}: expected the pool's {held.dtype}, got {x.dtype}; make the pool with that dtype")
    for name, x in (("slots", slots), ("accepted", accepted)):
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            raise ShapeError(f"{name}: expected int32 or int64, got {x.dtype}; give one integer a sequence")
    if draft and T > D:
        raise ShapeError(f"qkv: expected at most {D} drafted tokens, got {T}; make the pool with drafts={T}")
    if slots.device.type == "cpu":  # elsewhere a look at the values would wait for the device
        _check_values(slots.tolist(), [0] * N if accepted is None else accepted.tolist(), S, D)


def _check_values(slots: list[int], accepted: list[int], S: int, D: int) -> None:
    used = [slot for slot in slots if slot >= 0]
    if len(set(used)) < len(used) or any(slot >= S for slot in used):
        raise ShapeError(f"slots: expected different ones below {S}, got {slots}; two sequences cannot share a state")
    if any(not 0 <= count <= D for count, slot in zip(accepted, slots) if slot >= 0):
        raise ShapeError(f"accepted: expected 0 to {D}, got {accepted}; the pool holds no more drafts")

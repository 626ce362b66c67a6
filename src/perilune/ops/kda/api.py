"""The public face of Kimi Delta Attention: checks, activations, the choice of backend."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.autocast import without_autocast
from perilune.ops.kda.chunked import chunked
from perilune.ops.kda.fused import fused, refuses_gluon, refuses_triton
from perilune.ops.kda.gate import Gate
from perilune.ops.kda.reference import recurrence, step, working_dtype
from perilune.ops.packing import boundaries

L2_EPS = 1e-6  # under the root, added to the sum of squares

Whole = Callable[..., tuple[Tensor, Tensor]]


def _activated(run: Whole) -> Whole:
    """`run`, which takes what the recurrence reads, as a backend that takes the arguments of `kda`."""

    def backend(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
        gate: Gate | None, normalize_qk: bool, beta_logits: bool, **options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, g, beta = _activate(q, k, v, g, beta, gate, normalize_qk, beta_logits)
        return run(q, k, v, g, beta, floor=gate.floor if gate is not None else None, **options)

    return backend


BACKENDS = Backends("kda")  # best first
BACKENDS.register("gluon", partial(fused, hopper=True), refuses_gluon)
BACKENDS.register("triton", partial(fused, hopper=False), refuses_triton)
BACKENDS.register("chunked", _activated(chunked))
BACKENDS.register("reference", _activated(recurrence))


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | list[int] | None = None,
    backend: str = "auto",
    gate: Gate | None = None,
    normalize_qk: bool = False,
    beta_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences: a delta rule whose memory forgets by channel.

        S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        (Kimi Linear paper; K3 report)
        o_t = scale * S_t^T q_t

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H; each q and k head then serves HV/H neighbouring value heads.
        g: [B, T, H or HV, K] natural-log decay <= 0, of any size; with `gate` the raw logits before its bias.
        beta: [B, T, H or HV] write strength in [0, 1]; with `beta_logits` before the sigmoid.
        scale: of the output; K**-0.5 if None.
        initial_state: [N, HV, K, V], zeros if None.
        output_final_state: whether to return the states after the last token.
        cu_seqlens: [N+1] integers, the boundaries of N documents laid end to end in one row (B = 1); without it
            N = B.  An empty document passes its state through.
        backend: "auto", "gluon" (Hopper), "triton", "chunked" or "reference".
        gate: BoundedGate or SoftplusGate.
        normalize_qk: divide q and k of each token and head by sqrt(sum of squares + 1e-6).
        beta_logits: take the sigmoid of beta.

    Returns:
        (o [B, T, HV, V] in v's dtype, states [N, HV, K, V] or None).  Everything inside, and the states, is float32,
        or float64 where an input is.

    Raises ShapeError for inputs that do not fit together, BackendError for a backend that cannot serve the call.
    """
    _check(q, k, v, g, beta, ("B", "T"), gate)
    scale = _scale(scale, q.shape[-1])
    cu = boundaries(cu_seqlens, q.shape[0], q.shape[1])
    _check_state(initial_state, "initial_state", q.shape[0] if cu is None else len(cu) - 1, q, v)
    with without_autocast(q):
        q, k, g, beta, gate = _repeat(q, k, v, g, beta, gate)
        options = {
            "scale": scale,
            "initial_state": initial_state,
            "cu": cu,
            "gate": gate,
            "normalize_qk": normalize_qk,
            "beta_logits": beta_logits,
        }
        o, state = BACKENDS.pick(backend, q, k, v, g, beta, **options)(q, k, v, g, beta, **options)
    return o, state if output_final_state else None


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    gate: Gate | None = None,
    normalize_qk: bool = False,
    beta_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `kda`, for decoding: the same arguments without the time axis.

    q, k: [B, H, K]; v: [B, HV, V]; g: [B, H or HV, K]; beta: [B, H or HV]; state: [B, HV, K, V].  Returns
    (o [B, HV, V] in v's dtype, new state in float32, or float64 where an input is); `state` is not written to.
    Raises ShapeError.
    """
    _check(q, k, v, g, beta, ("B",), gate)
    scale = _scale(scale, q.shape[-1])
    _check_state(state, "state", q.shape[0], q, v)
    with without_autocast(q):
        q, k, g, beta, gate = _repeat(q, k, v, g, beta, gate)
        q, k, g, beta = _activate(q, k, v, g, beta, gate, normalize_qk, beta_logits)
        dtype = working_dtype(q, k, v, g, beta, state)
        q, k, wide_v, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
        o, state = step(q, k, wide_v, g, beta, state, scale)
    return o.to(v.dtype), state


def _activate(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate: Gate | None, normalize_qk: bool, beta_logits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the recurrence reads: q, k, log decay, write strength in [0, 1]."""
    if gate is not None:
        g = gate(g)
    if normalize_qk:
        q, k = _l2_normalize(q), _l2_normalize(k)
    if beta_logits:
        beta = beta.to(working_dtype(beta)).sigmoid()  # stays wide: rounding it would add an error a token
    return q, k, g, beta


def _repeat(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate: Gate | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Gate | None]:
    """All with as many heads as v."""
    heads = v.shape[-2]
    if gate is not None:
        A_log, dt_bias = _repeat_heads(gate.A_log, heads, 0), _repeat_heads(gate.dt_bias, heads, 0)
        gate = replace(gate, A_log=A_log, dt_bias=dt_bias)
    q, k, g = (_repeat_heads(x, heads, -2) for x in (q, k, g))
    return q, k, g, _repeat_heads(beta, heads, -1), gate


def _l2_normalize(x: Tensor) -> Tensor:
    wide = x.to(working_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def _repeat_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    """Head order h0, h0, h1, h1, ..."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def _scale(scale: float | None, K: int) -> float:
    if isinstance(scale, Tensor):  # some backends would lose its gradient
        raise ShapeError("scale: expected a number, got a tensor; multiply the output by it")
    return K**-0.5 if scale is None else scale


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lead: tuple[str, ...], gate: Gate | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        _check_kind(name, x, q.device)
    if gate is not None:
        _check_kind("gate.A_log", gate.A_log, q.device)
        _check_kind("gate.dt_bias", gate.dt_bias, q.device)
    for name, x, letters in (("q", q, (*lead, "H", "K")), ("v", v, (*lead, "HV", "V"))):
        if x.dim() != len(letters):
            raise ShapeError(f"{name}: expected [{', '.join(letters)}], got {list(x.shape)}; add or drop dimensions")
    if k.shape != q.shape:
        raise ShapeError(f"k: expected the shape of q {list(q.shape)}, got {list(k.shape)}; q and k share K and heads")
    *rows, H, K = q.shape
    if not H or not K:
        raise ShapeError(f"q: expected a head and a channel at least, got {list(q.shape)}; leave out what has none")
    HV = v.shape[-2]
    if list(v.shape[:-2]) != rows or HV % H:
        expected = ", ".join(map(str, rows))
        raise ShapeError(
            f"v: expected [{expected}, n*{H}, V], got {list(v.shape)}; value heads are a multiple of q's heads"
        )
    for name, x, tail in (("g", g, [K]), ("beta", beta, [])):
        if list(x.shape) not in ([*rows, H, *tail], [*rows, HV, *tail]):
            raise ShapeError(
                f"{name}: expected {[*rows, HV, *tail]}, got {list(x.shape)}; "
                f"give one {'decay a channel' if tail else 'strength'} for every token and head"
            )
    if gate is not None and list(gate.dt_bias.shape) != list(g.shape[-2:]):
        raise ShapeError(
            f"gate: expected dt_bias {list(g.shape[-2:])}, got {list(gate.dt_bias.shape)}; its heads are those of g"
        )


def _check_kind(name: str, x: Tensor, device: torch.device) -> None:
    """Kernels are given addresses: on another device those are of something else."""
    if x.device != device:
        raise ShapeError(f"{name}: expected a tensor on {device}, got {x.device}; move it to where q is")
    if not x.dtype.is_floating_point:
        raise ShapeError(f"{name}: expected real numbers in floating point, got {x.dtype}; convert it")


def _check_state(state: Tensor | None, name: str, sequences: int, q: Tensor, v: Tensor) -> None:
    if state is None:
        return
    _check_kind(name, state, q.device)
    expected = [sequences, v.shape[-2], q.shape[-1], v.shape[-1]]
    if list(state.shape) != expected:
        raise ShapeError(
            f"{name}: expected {expected} (sequences, heads, K, V), got {list(state.shape)}; "
            "states are K-first, one a sequence"
        )

"""Kimi Delta Attention, one token at a time: the equation as it is read, and the oracle of every faster form.

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        (Kimi Linear paper, KDA recurrence)
    o_t = scale * S_t^T q_t

Computes in the widest dtype among its inputs, float32 at least.  Autograd differentiates it.
"""

from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The widest dtype among the tensors that are there, float32 at least."""
    return reduce(torch.promote_types, (x.dtype for x in tensors if x is not None), torch.float32)


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token: decay, write the prediction error, read.

    q, k, g: [B, H, K]; v: [B, H, V]; beta: [B, H]; state: [B, H, K, V].  Returns (o [B, H, V], state), both new.
    """
    state = state * g.exp()[..., None]
    error = v - (k[..., None, :] @ state)[..., 0, :]  # of the decayed memory's prediction
    state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
    return scale * (q[..., None, :] @ state)[..., 0, :], state


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu: list[int] | None = None,
    floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """KDA of whole sequences by `step`.

    q, k, g: [B, T, H, K]; v: [B, T, H, V]; beta: [B, T, H]; initial_state: [N, H, K, V] or None for zeros.
    `cu`: boundaries of N documents in one row (B = 1), else N = B.  `floor`, a lower bound on g, is of no use here.
    Returns (o in v's dtype, final states in the working dtype).
    """
    dtype, out_dtype = working_dtype(q, k, v, g, beta, initial_state), v.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    B, T, H, K = q.shape
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, a, z) for a, z in pairwise(cu)]
    outputs, states = [v.flatten(0, 1)[:0]], []
    for n, (b, start, stop) in enumerate(spans):
        if initial_state is None:
            state = q.new_zeros(1, H, K, v.shape[-1])
        else:
            state = initial_state[n : n + 1].to(dtype)
        # Unbound once: indexing token by token would give each a gradient as large as the sequence.
        rows = (x[b : b + 1, start:stop].unbind(1) for x in (q, k, v, g, beta))
        for q_t, k_t, v_t, g_t, beta_t in zip(*rows):
            o, state = step(q_t, k_t, v_t, g_t, beta_t, state, scale)
            outputs.append(o)
        states.append(state)
    o = torch.cat(outputs).view(v.shape)
    return o.to(out_dtype), torch.cat(states) if states else q.new_zeros(0, H, K, v.shape[-1])

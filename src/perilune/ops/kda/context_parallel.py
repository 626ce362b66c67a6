"""KDA of a row whose tokens lie on several ranks, a contiguous shard on each (K3 report, section 5.1.2).

Whatever enters a run of tokens, they make an affine map of it.  From an entering state S they read and leave

    o + R S    and    S~ + M S        o, S~: from a zero state;   R, M: from the identity, with v = 0

So a rank sends the map (S~, M) of its last document, K (V + K) numbers a head however long the shard, composes those
of the ranks before it, and runs the ordinary operation from the state that this gives.  Backward the same the other
way around, by the adjoint of the map: with do the gradient of what was read and dS_out that of the state left,

    dS_in = dS~ + M^T dS_out,    dS~ = R^T do

so the gradient of the state that goes on is known before the ordinary backward pass starts from it.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from perilune.ops.autocast import without_autocast
from perilune.ops.first_order import first_order
from perilune.ops.kda.api import _check, kda
from perilune.ops.kda.gate import Gate
from perilune.ops.kda.reference import working_dtype
from perilune.ops.shards import Shard, gather, shard_of


def kda_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    group: "dist.ProcessGroup | None",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | list[int] | None = None,
    backend: str = "auto",
    gate: Gate | None = None,
    normalize_qk: bool = False,
    beta_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`kda` of a row cut over the P ranks of `group`, in their order: rank r holds tokens r T/P to (r+1) T/P.

    Tensors are this rank's: q, k, g [B, T/P, H, K], v [B, T/P, HV, V], beta [B, T/P, HV], and so is the output.  What
    is not said here is as in `kda`.

    Args:
        group: the ranks; None for all there are.
        cu_seqlens: [N+1] boundaries of documents in the whole row of T tokens, the same on every rank; then B is 1.
        initial_state: [n, HV, K, V], of the n documents that begin on this rank (all B rows on the first rank, without
            `cu_seqlens`).  A document begins on the rank of its first token and ends on that of its last, one without
            tokens does both where it stands: `shard_of(...).begins` and `.ends` say which ones.

    Returns:
        (o [B, T/P, HV, V], states [n, HV, K, V] of the n documents that end on this rank, or None).

    Collective: every rank makes the same calls with the same options, and runs their backward passes, or none does; a
    rank without loss multiplies its output by 0.  Gradients of a gate's parameters are those of the local tokens; sum
    them over the group as for any parameter.

    Raises ShapeError for inputs that do not fit together, BackendError for a backend that cannot serve the call.
    """
    _check(q, k, v, g, beta, ("B", "T"), gate)
    shard = shard_of(cu_seqlens, q.shape[0], q.shape[1], group)
    state_shape = v.shape[2], q.shape[3], v.shape[3]
    shard.check_states(initial_state, state_shape)
    options: dict[str, Any] = {
        "scale": scale,
        "backend": backend,
        "gate": gate,
        "normalize_qk": normalize_qk,
        "beta_logits": beta_logits,
    }
    tokens = q, k, v, g, beta
    if not shard.linked:
        return kda(
            *tokens,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=shard.cu,
            **options,
        )
    parameters = () if gate is None else (gate.A_log, gate.dt_bias)
    dtype = working_dtype(*tokens, *parameters)
    if initial_state is None:
        initial_state = q.new_zeros(shard.begun, *state_shape)
    initial = initial_state.to(dtype)
    with torch.no_grad(), without_autocast(q):  # the way back is `_Border`'s
        maps = gather(_leaving(*tokens, initial, shard, options), group)
        entering = [_compose(maps[shard.origin : shard.rank], v.shape[3])] if shard.continued else []
    o, states = kda(
        *tokens,
        initial_state=torch.cat([*entering, initial]),
        output_final_state=True,
        cu_seqlens=shard.cu,
        **options,
    )
    saved = (x.detach() for x in (q, k, g, beta, *parameters))
    o, final = _Border.apply(o, states, shard, group, options, *saved)
    return o, final if output_final_state else None


def _affine(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The map that the tokens of each row are: [o | R] [B, T, HV, V+K] and [S~ | M] [B, HV, K, V+K]."""
    K, V = q.shape[3], v.shape[3]
    identity = torch.eye(K, dtype=dtype, device=q.device).expand(v.shape[0], v.shape[2], K, K)
    start = pad(identity, (V, 0))
    reads, state = kda(q, k, pad(v, (0, K)), g, beta, initial_state=start, output_final_state=True, **options)
    assert state is not None
    return reads, state


def _leaving(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, shard: Shard, options: dict[str, Any]
) -> Tensor:
    """[S~ | M] of what goes on on the next rank: [B, HV, K, V+K].

    M is zero where that began here, since no state enters, and everything where nothing goes on; nobody reads those.
    """
    if shard.passes:
        return _affine(q, k, v, g, beta, options, initial.dtype)[1]
    B, _, HV, V = v.shape
    K = q.shape[3]
    leaving = initial.new_zeros(B, HV, K, V + K)
    if shard.goes_on:
        last = (x[:, shard.last] for x in (q, k, v, g, beta))
        _, state = kda(*last, initial_state=initial[-B:], output_final_state=True, **options)
        assert state is not None
        leaving[..., :V] = state
    return leaving


def _compose(maps: Tensor, V: int) -> Tensor:
    """Maps [S~ | M] [n, B, HV, K, V+K], one after another from a zero state: [B, HV, K, V]."""
    state = maps[0, ..., :V]
    for step in maps[1:]:
        state = step[..., :V] + step[..., V:] @ state
    return state


class _Border(torch.autograd.Function):
    """o as it is and the states of the documents that end here.

    Everything passes through, so that the backward pass has do before the operation's own starts, and so that every
    rank takes part in the exchange.
    """

    @staticmethod
    def forward(
        ctx: Any,
        o: Tensor,
        states: Tensor,
        shard: Shard,
        group: "dist.ProcessGroup | None",
        options: dict[str, Any],
        *saved: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*saved)
        ctx.shard, ctx.group, ctx.options, ctx.state_shape = shard, group, options, states.shape
        return o.view_as(o), states[: shard.ended].clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        shard, options = ctx.shard, ctx.options
        saved = ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        q, k, g, beta, *parameters = saved
        if parameters:
            options = {**options, "gate": replace(options["gate"], A_log=parameters[0], dt_bias=parameters[1])}
        B, V = do.shape[0], do.shape[3]
        with without_autocast(do):
            if shard.continued:
                q, k, g, beta, do_first = (x[:, shard.first] for x in (q, k, g, beta, do))
                reads, kept = _affine(q, k, do_first[..., :0], g, beta, options, dfinal.dtype)
                dstate = torch.einsum("bthk,bthv->bhkv", reads.to(dfinal.dtype), do_first.to(dfinal.dtype))
                if not shard.passes:  # it ends here, and its final state may be in use
                    dstate += kept.mT @ dfinal[:B]
                back = torch.cat([dstate, kept.mT], -1)
            else:  # nobody reads it
                back = dfinal.new_zeros(B, *ctx.state_shape[1:3], V + ctx.state_shape[2])
            maps = gather(back, ctx.group)
            behind = maps[shard.rank + 1 : shard.target + 1].flip(0)
            dleaving = [_compose(behind, V)] if shard.goes_on else []
        return do, torch.cat([dfinal, *dleaving]), None, None, None, *(None for _ in saved)

"""KDA in Triton and Gluon, forward and backward, the transforms of its inputs included.

Forward: `prepare` makes a record of every chunk and head, all at once; `scan` carries the state through the records of
a sequence, one program a head (and slice of V), or, where those would leave processors idle, one for each of the
segments it is cut into (`kernels.border`).  Backward: the same records and the states between chunks are made again,
`reverse_scan` carries the state's gradient back, and `grads` turns what both left at every chunk into the gradients of
the inputs, all at once.  Where what the scans leave is large, both passes go along the sequences in a few stretches, or
backward takes some of the heads after the others (`turns`).  The kernels are imported when they are first needed.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from perilune.ops.first_order import first_order
from perilune.ops.fused import INTERPRETED, unfit
from perilune.ops.hopper import not_hopper
from perilune.ops.kda.gate import BoundedGate, Gate

if TYPE_CHECKING:
    from perilune.ops.kda.kernels.chunks import Chunks
    from perilune.ops.kda.kernels.plan import Plan

NARROWEST = 16 if INTERPRETED else 64  # a GPU's kernels have not proved right at less
WIDEST = {"K": 128, "V": 512}


@torch.compiler.disable  # a compiled function calls the kernels as they are, between its graphs
def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    hopper: bool,
    scale: float,
    initial_state: Tensor | None,
    cu: list[int] | None,
    gate: Gate | None,
    normalize_qk: bool,
    beta_logits: bool,
) -> tuple[Tensor, Tensor]:
    """KDA of whole sequences: the arguments of `perilune.ops.kda.kda`, every head given.

    hopper: with the kernels that `refuses_gluon` is about.
    """
    from perilune.ops.kda.kernels.chunks import chunks_of
    from perilune.ops.kda.kernels.launch import kept, programs
    from perilune.ops.kda.kernels.plan import Plan

    K, V = q.shape[3], v.shape[3]
    narrow = (served(K), served(V)) != (K, V)
    if narrow:
        q, k, g, v = (*(_widened(x, served(K)) for x in (q, k, g)), _widened(v, served(V)))
    plan = Plan.of(q, scale, gate, normalize_qk, beta_logits, hopper)
    size = kept(q.shape[2], q.shape[3], v.shape[3], plan)
    chunks = chunks_of(q.shape[0], q.shape[1], cu, plan.chunk, programs(*v.shape[2:]), q.device, size)
    if initial_state is None:
        sequences = len(chunks.sequences) - 1
        initial_state = q.new_zeros(sequences, *q.shape[2:], v.shape[3], dtype=torch.float32)
    elif narrow:
        initial_state = _widened(initial_state, served(V), served(K) - K)
    gates: tuple[Tensor | None, Tensor | None] = (None, None)
    if gate is not None:
        gates = (gate.A_log.contiguous(), _widened(gate.dt_bias, served(K)).contiguous())
    with torch.cuda.device_of(q):  # kernels are launched on the current device
        o, state = _Fused.apply(q, k, v, g, beta, *gates, initial_state, plan, chunks)
    return (o[..., :V], state[..., :K, :V]) if narrow else (o, state)


def served(width: int) -> int:
    """The power of two that the kernels work with for so many channels: zeros beyond them change nothing."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def _widened(x: Tensor, width: int, rows: int = 0) -> Tensor:
    """x [..., r, c] with zeros up to `width` columns, and so many more rows."""
    return pad(x, (0, width - x.shape[-1], 0, rows)) if width > x.shape[-1] or rows else x


def refuses_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None, **options: Any
) -> str | None:
    """Why the kernels cannot serve a call, or None."""
    if (reason := unfit(q, k, v, g, beta, initial_state)) is not None:
        return reason
    K, V = q.shape[3], v.shape[3]
    if not (1 <= K <= WIDEST["K"] and 1 <= V <= WIDEST["V"]):
        return f"its kernels serve K from 1 to {WIDEST['K']} and V from 1 to {WIDEST['V']}, and K is {K}, V is {V}"
    if q.numel() // K * max(192, served(V)) >= 2**31 * 64:  # three rows of keys a token, and states
        return "there are too many tokens times heads for 32-bit rows of its workspace"
    return None


def refuses_gluon(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    initial_state: Tensor | None, gate: Gate | None, normalize_qk: bool, **options: Any,
) -> str | None:  # fmt: skip
    """Why the kernels written for Hopper's tensor cores cannot serve a call, or None."""
    if (reason := refuses_triton(q, k, v, g, beta, initial_state=initial_state) or not_hopper(q)) is not None:
        return reason
    lowest = -5.25 if normalize_qk else -5.0  # keys of any size have to fit beside what decay makes of them
    if not isinstance(gate, BoundedGate) or gate.g_min < lowest:
        return f"it needs the bounded gate, of {lowest:g} or above"
    K, V, dtypes = q.shape[3], v.shape[3], (q.dtype, k.dtype, v.dtype)
    if torch.float32 in dtypes or served(K) != 128 or served(V) != 128:
        found = f"they are {', '.join(map(str, dtypes))} with K = {K}, V = {V}"
        return f"it serves 16-bit q, k and v with K and V from 65 to 128, and {found}"
    return None


class _Fused(torch.autograd.Function):
    """Keeps its inputs and its output."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        z: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        initial: Tensor,
        plan: "Plan",
        chunks: "Chunks",
    ) -> tuple[Tensor, Tensor]:
        from perilune.ops.kda.kernels.launch import at_borders, prepare, scan, through_segments

        q, k, v, z, beta = (_laid_out(x) for x in (q, k, v, z, beta))
        o, states, maps = torch.empty_like(v), [initial.float().contiguous()], None
        for part in chunks.stretches:
            records = prepare(q, k, z, beta, (A_log, dt_bias), plan, part)
            if chunks.split:
                made, maps = through_segments(records, v, plan, part)
                states = [at_borders(maps, made, states[0], part)]
            states.append(scan(records, v, states[-1], plan, part, o))
            del records
        *entering, final = states
        ctx.save_for_backward(q, k, v, z, beta, A_log, dt_bias, maps, o, *entering)
        ctx.plan, ctx.chunks, ctx.state_dtype = plan, chunks, initial.dtype
        return o, _at(final, chunks.lasts, -1, chunks)

    @staticmethod
    @first_order
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        from perilune.ops.kda.kernels.launch import at_borders, grads, prepare, reverse_scan, scan, turns_of
        from perilune.ops.kda.kernels.workspace import Flow

        q, k, v, z, beta, A_log, dt_bias, maps, o, *states = ctx.saved_tensors
        plan, chunks, gates, do = ctx.plan, ctx.chunks, (A_log, dt_bias), _laid_out(do)
        dinputs: tuple[Tensor, ...] = ()
        dstate, summands = dfinal.float(), []
        for part, entering in zip(reversed(chunks.stretches), reversed(states)):
            parts = []
            turns = turns_of(v, q.shape[3], plan, part)
            for heads in turns:
                of_heads = partial(_of_heads, heads=heads if len(turns) > 1 else None)
                records = prepare(q, k, z, beta, gates, plan, part, heads)
                n, H, C, K = records.k_since.shape
                flow = Flow.empty(n, H, C, K, v.shape[3], plan.dtype, q.device)
                scan(records, v, of_heads(entering), plan, part, flow=flow, heads=heads)
                leaving = of_heads(dstate)
                if chunks.split:
                    made = reverse_scan(records, do, None, plan, part, heads=heads)
                    leaving = at_borders(of_heads(maps), made, leaving, part, reverse=True)
                leaving = reverse_scan(records, do, leaving, plan, part, flow, heads)
                rows = records.strength, records.q_norm, records.k_norm
                del records  # a third of the memory, as the gradients are about to take theirs
                dinputs = dinputs or tuple(torch.empty_like(x) for x in (q, k, v, z, beta))
                sums = grads(q, k, v, z, beta, gates, o, do, *rows, flow, dinputs, plan, part, heads)
                parts.append((leaving, *sums))
                del flow
            dstate, *joined = (_joined(x, 1) for x in zip(*parts))
            summands.append(joined)
        dinitial = _at(dstate, chunks.firsts, 0, chunks)
        dbias, drate = (_joined(x[::-1], 0) for x in zip(*summands))
        dgates = (None, None)
        if A_log is not None and dt_bias is not None:
            dgates = (drate.sum((0, 2)).to(A_log.dtype), dbias.sum(0).to(dt_bias.dtype))  # type: ignore[assignment]
        return *dinputs, *dgates, dinitial.to(ctx.state_dtype), None, None


def _of_heads(states: Tensor, heads: slice | None) -> Tensor:
    """[N, H, K, V] of some heads, or all, in one piece."""
    return (states if heads is None else states[:, heads]).contiguous()


def _at(states: Tensor, segments: Tensor, only: int, chunks: "Chunks") -> Tensor:
    """Of states [segments, H, K, V] those at one segment of every sequence; `only`: where there is a single one."""
    if not chunks.split:
        return states
    return states[segments] if len(segments) > 1 else states[only].clone()[None]  # which takes the host less time


def _joined(tensors: tuple[Tensor, ...], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _laid_out(x: Tensor) -> Tensor:
    """x in one piece that starts where the copy engine can start."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()

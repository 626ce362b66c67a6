"""Kimi Delta Attention by chunks: matrix products inside a chunk, a serial scan over the states between chunks.

Per head and chunk of C rows, with S its entering state and c_i the product of the retentions exp(g) of its rows up to
and with i, per key channel (the UT transform of the Kimi Linear paper, in an order that subtracts before it solves):

    A_ij = k_i . (c_i / c_j * k_j) for j < i, else 0;   P the same with q_i, and q_i . k_i on its diagonal
    X = (I + Diag(beta) A)^-1;   Y = V - (c * K) S;   U = X Diag(beta) Y
    O = (c * Q) S + P U;         S' = c_n * S + (c_n / c * K)^T U

c_i / c_j spans orders of magnitude, so it is never formed as a quotient: `blocks` factors it, and P and A are matrix
products block by block.  X comes from substitution, because a power series of A cancels when keys are alike.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.ops.autocast import without_autocast
from perilune.ops.first_order import first_order
from perilune.ops.kda.blocks import cover, sum_from_, sum_through_
from perilune.ops.kda.layout import Layout, Part, lay_out
from perilune.ops.kda.reference import working_dtype

CHUNK = 32


def chunked(
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
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """KDA of whole sequences by chunks of `chunk` tokens, a power of two: the arguments and results of `recurrence`."""
    run = _run if q.shape[1] == 1 else _run_between_graphs
    return run(q, k, v, g, beta, initial_state, scale, floor, cu, chunk)


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    scale: float, floor: float | None, cu: list[int] | None, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _Chunked.apply(q, k, v, g, beta, initial, scale, floor, lay_out(q, cu, chunk))


# A compiler unrolls the steps of every length anew, for half a minute, and is left with the same products.
_run_between_graphs = torch.compiler.disable(_run)


class _Chunked(torch.autograd.Function):
    """Keeps the inputs and the state that enters each part of the layout; everything else is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        scale: float,
        floor: float | None,
        layout: Layout,
    ) -> tuple[Tensor, Tensor]:
        dtype = working_dtype(q, k, v, g, beta, initial)
        if initial is None:
            initial = q.new_zeros(layout.sequences, q.shape[2], q.shape[3], v.shape[3], dtype=dtype)
        tokens = Tokens.of(layout, q, k, v, g, beta)
        state = layout.sort(initial, dtype)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        kept = []
        for part in layout.parts:
            kept.append(state.clone())
            part.pour(layout.view(o), forward_part(part, tokens, scale, floor, state))
        ctx.save_for_backward(q, k, v, g, beta, *kept)
        ctx.scale, ctx.floor, ctx.layout, ctx.state_dtype = scale, floor, layout, initial.dtype
        return o, layout.unsort(state, q.shape[2])

    @staticmethod
    @first_order
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        layout, saved = ctx.layout, ctx.saved_tensors  # read once: activation checkpointing refuses a second time
        inputs, kept = saved[:5], saved[5:]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        tokens, dtokens = Tokens.of(layout, *inputs), Tokens.of(layout, *grads)
        do, dstate = layout.view(do), layout.sort(dfinal, dfinal.dtype)
        with without_autocast(do):
            for part, state in zip(reversed(layout.parts), reversed(kept)):
                rows = backward_part(part, tokens, ctx.scale, ctx.floor, state.clone(), do, dstate)
                for x, grad in zip(dtokens, rows):
                    part.pour(x, grad)
        dinitial = layout.unsort(dstate, do.shape[2]).to(ctx.state_dtype) if ctx.needs_input_grad[5] else None
        return *grads, dinitial, None, None, None


class Tokens(NamedTuple):
    """The inputs as the layout sees them, or their gradients, or those of a part's rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor  # with a last dimension of 1

    @classmethod
    def of(cls, layout: Layout, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> "Tokens":
        return cls(*(layout.view(x) for x in (q, k, v, g, beta[..., None])))


def forward_part(part: Part, tokens: Tokens, scale: float, floor: float | None, state: Tensor) -> Tensor:
    """O of a part's chunks, [R, C, V]; carries `state` [N * H, K, V] through them in place."""
    c = prepare(part, tokens, scale, floor, state.dtype)
    _, u, entering = scan(c, state)
    return torch.bmm(c.qk_since[:, :, 0], entering).baddbmm_(c.pa[:, :, 0], u)


def backward_part(
    part: Part, tokens: Tokens, scale: float, floor: float | None, state: Tensor, do: Tensor, dstate: Tensor
) -> Tokens:
    """The gradients of a part's rows, [R, C, ...]; carries `dstate` [N * H, K, V] back in place.

    `state` entered the part and is overwritten.  Nothing is differentiated through the inverse: U = Z - L U gives
    the gradient of L = Diag(beta) A at once.
    """
    c = prepare(part, tokens, scale, floor, state.dtype)
    y, u, entering = scan(c, state)
    out = y.new_empty(*y.shape[:2], 2, y.shape[2])  # gradients of O beside those of -Z, then of -Y
    part.fill(out[:, :, 0], do)
    dz, leaving = reverse_scan(c, out[:, :, 0], dstate)

    torch.neg(dz, out=out[:, :, 1])
    dpa = torch.bmm(out.flatten(1, 2), u.mT).view_as(c.pa)  # of P beside that of L, then of A
    dp = dpa[:, :, 0].diagonal(dim1=1, dim2=2)[..., None]
    dbeta = (dz * y).sum(-1, keepdim=True).add_((dpa[:, :, 1] * c.pa[:, :, 1]).sum(-1, keepdim=True))
    dpa[:, :, 1] *= c.beta
    out[:, :, 1] *= c.beta

    rows = torch.bmm(out.flatten(1, 2), entering.mT).view_as(c.qk).mul_(c.since[:, :, None])
    end = torch.bmm(u, leaving.mT).mul_(c.until)
    cols = torch.zeros_like(end)
    for block in cover(c.retention, torch.ones_like(c.until), floor):
        qk, k, to = block.rows(c.qk), block.cols(c.k), block.to[..., None, :]
        pairs = block.cut(block.of(dpa)).reshape(-1, 2 * block.b, block.b)
        by_row = torch.bmm(pairs, (k * block.since).view(len(pairs), block.b, -1))
        by_col = torch.bmm(pairs.mT, (qk * to).view(len(pairs), 2 * block.b, -1))
        block.rows(rows).addcmul_(by_row.view(qk.shape), to)
        block.cols(cols).addcmul_(by_col.view(k.shape), block.since)

    # g_t takes part in what a row from t on reads of rows before t.  Reads within the chunk: sums from t on, in which
    # pairs beyond t cancel; writes that leave it: sums before t.  The diagonal of P carries no decay and stays out.
    dg = (c.qk[:, :, 0] * rows[:, :, 0]).addcmul_(c.k, rows[:, :, 1]).addcmul_(c.k, cols, value=-1)
    dg[:, -1] += c.kept[..., 0] * (entering * leaving).sum(-1)
    sum_from_(dg)
    dg[:, 1:] += sum_through_(c.k * end)[:, :-1]
    dk = cols.add_(end).add_(rows[:, :, 1]).addcmul_(dp, c.qk[:, :, 0])
    dq = rows[:, :, 0].addcmul_(dp, c.k).mul_(scale)
    return Tokens(dq, dk, -out[:, :, 1], dg, dbeta)


class Chunks(NamedTuple):
    """What the rows of a chunk determine alone.  R = chunks * heads, C rows a chunk."""

    steps: list[int]  # how many of R each step of the scan reads
    qk: Tensor  # [R, C, 2, K]: scale * q beside k
    v: Tensor  # [R, C, V]
    beta: Tensor  # [R, C, 1]
    retention: Tensor  # [R, C, K]: exp(g)
    since: Tensor  # [R, C, K]: what is retained since the chunk's start, the row included
    until: Tensor  # [R, C, K]: and after the row until the chunk's end
    pa: Tensor  # [R, C, 2, C]: P beside A
    inverse: Tensor  # [R, C, C]: X
    qk_since: Tensor  # [R, C, 2, K]
    k_until: Tensor  # [R, C, K]

    @property
    def k(self) -> Tensor:
        return self.qk[:, :, 1]

    @property
    def kept(self) -> Tensor:
        """[R, K, 1]: what is retained over the whole chunk."""
        return self.since[:, -1, :, None]


def prepare(part: Part, tokens: Tokens, scale: float, floor: float | None, dtype: torch.dtype) -> Chunks:
    """All that needs no state, for every chunk of a part at once."""
    H, K, V = *tokens.q.shape[2:], tokens.v.shape[3]
    steps, C = part.steps(H), part.size

    def new(*widths: int) -> Tensor:
        return torch.empty(sum(steps), C, *widths, dtype=dtype, device=tokens.q.device)

    qk, v, retention, beta = new(2, K), new(V), new(K), new(1)
    q, k = qk.unbind(2)
    for x, filled in zip(tokens, (q, k, v, retention, beta)):
        part.fill(filled, x)
    q *= scale
    since, until = retention.exp_().clone(), torch.ones_like(retention)

    pa = qk.new_zeros(len(qk), C, 2, C)
    for block in cover(since, until, floor):
        row = block.rows(qk) * block.to[..., None, :]
        col = block.cols(k) * block.since
        product = torch.bmm(row.view(-1, 2 * block.b, K), col.view(-1, block.b, K).mT)
        target = block.of(pa)
        target.copy_(block.cut(product.view(target.shape)))
    identity = torch.eye(C, dtype=dtype, device=pa.device).expand(len(pa), C, C)
    inverse = torch.linalg.solve_triangular(beta * pa[:, :, 1], identity, upper=False, unitriangular=True)
    pa[:, :, 0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    return Chunks(steps, qk, v, beta, retention, since, until, pa, inverse, qk * since[:, :, None], k * until)


def scan(c: Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carries `state` [N * H, K, V] through the chunks in place.

    Returns the residuals Y and the writes U [R, C, V], and the states [R, K, V] that enter the chunks.
    """
    y, u = torch.empty_like(c.v), torch.empty_like(c.v)
    entering = state.new_empty(len(c.v), *state.shape[1:])
    operands = (c.v, c.qk_since[:, :, 1], c.inverse * c.beta.mT, c.kept, c.k_until.mT, y, u, entering)
    for vs, k_since, solve, kept, k_until, ys, us, enter in zip(*(x.split(c.steps) for x in operands)):
        s = state[: len(vs)]
        enter.copy_(s)
        torch.baddbmm(vs, k_since, s, alpha=-1, out=ys)
        torch.bmm(solve, ys, out=us)
        s.mul_(kept).baddbmm_(k_until, us)
    return y, u, entering


def reverse_scan(c: Chunks, do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
    """Carries the gradient `dstate` [N * H, K, V] of the states back through the chunks in place.

    do: [R, C, V].  Returns the gradients of Z = Diag(beta) Y [R, C, V] and of the states that leave the chunks
    [R, K, V].
    """
    dz, du = torch.empty_like(c.v), torch.bmm(c.pa[:, :, 0].mT, do)
    leaving = dstate.new_empty(len(do), *dstate.shape[1:])
    q_since, k_since = c.qk_since.unbind(2)
    inflow = torch.bmm(q_since.mT, do)
    operands = (du, dz, c.inverse.mT, (c.beta * k_since).mT, c.kept, c.k_until, inflow, leaving)
    steps = list(zip(*(x.split(c.steps) for x in operands)))
    for dus, dzs, solve, write, kept, k_until, ins, leave in reversed(steps):
        ds = dstate[: len(dus)]
        leave.copy_(ds)
        torch.bmm(solve, dus.baddbmm_(k_until, ds), out=dzs)
        ds.mul_(kept).add_(ins).baddbmm_(write, dzs, alpha=-1)
    return dz, leaving

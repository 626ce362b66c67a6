"""Kimi Delta Attention by chunks: matrix products inside a chunk, a serial scan over the states between chunks.

With c_i the product of the retentions exp(g) of a chunk's rows up to and with i, per key channel, and S its entering
state (the UT transform of the Kimi Linear paper, written so that nothing overflows):

    A_ij = k_i . (c_i / c_j * k_j) for j < i, else 0;   P the same with q_i, and q_i . k_i on its diagonal
    X = (I + Diag(beta) A)^-1;   Y = V - (c * K) S;   U = X Diag(beta) Y
    O = (c * Q) S + P U;         S' = c_n * S + (c_n / c * K)^T U

c_i / c_j spans orders of magnitude, so it is never formed as a quotient.  The lower triangle is halved again and again:
the block that joins the two halves of 2b rows takes the products from the middle to row i and from row j to the
middle.  Both are products of retentions, at most 1; what underflows is truly that small.  So any decay is safe, with
one exponential an element and matrix products only.  The same blocks build X, by doubling:
X_2b = [[X_1, 0], [-X_2 L_21 X_1, X_2]]; each block is a true inverse, where a power series would cancel.

The backward pass keeps the inputs alone and recomputes the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.ops.kda.layout import Layout, Part, lay_out
from perilune.ops.kda.reference import working_dtype

CHUNK = 64


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
    return _Chunked.apply(q, k, v, g, beta, initial_state, scale, lay_out(q, cu, chunk))


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
        layout: Layout,
    ) -> tuple[Tensor, Tensor]:
        dtype = working_dtype(q, k, v, g, beta, initial)
        if initial is None:
            initial = q.new_zeros(layout.sequences, q.shape[2], q.shape[3], v.shape[3], dtype=dtype)
        state = layout.sort(initial, dtype)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        kept = []
        for part in layout.parts:
            kept.append(state.clone())
            part.pour(o, forward_part(part, q, k, v, g, beta, scale, state))
        ctx.save_for_backward(q, k, v, g, beta, *kept)
        ctx.scale, ctx.layout, ctx.state_dtype = scale, layout, initial.dtype
        return o, layout.unsort(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing makes them again, and refuses to do so twice
        inputs, kept = saved[:5], saved[5:]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        dstate = ctx.layout.sort(dfinal, dfinal.dtype)
        with torch.autocast(do.device.type, enabled=False):
            for part, state in zip(reversed(ctx.layout.parts), reversed(kept)):
                rows = backward_part(part, *inputs, ctx.scale, state.clone(), do, dstate)
                for grad, x in zip(grads[:4], rows[:4]):
                    part.pour(grad, x)
                part.pour(grads[4][..., None], rows[4])
        dinitial = ctx.layout.unsort(dstate).to(ctx.state_dtype) if ctx.needs_input_grad[5] else None
        return *grads, dinitial, None, None


def forward_part(
    part: Part, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> Tensor:
    """O of a part's chunks, [R, C, V]; carries `state` [N * H, K, V] through them in place."""
    c = prepare(part, q, k, v, g, beta, scale, state.dtype)
    _, u, entering = scan(c, part.steps(q.shape[2]), state)
    return torch.bmm(c.qk_since[:, :, 0], entering).baddbmm_(c.pa[:, :, 0], u)


def backward_part(
    part: Part,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor,
    do: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a part's q, k, v, g and beta, [R, C, ...]; carries `dstate` [N * H, K, V] back in place.

    `state` entered the part and is overwritten.  Nothing is differentiated through the inverse: U = Z - L U gives
    the gradient of L = Diag(beta) A at once.
    """
    c = prepare(part, q, k, v, g, beta, scale, state.dtype)
    steps = part.steps(q.shape[2])
    y, u, entering = scan(c, steps, state)
    out = y.new_empty(*y.shape[:2], 2, y.shape[2])  # gradients of O beside those of -Z, then of -Y
    part.fill(out[:, :, 0], do)
    dz, leaving = reverse_scan(c, steps, out[:, :, 0], dstate)
    dv = c.beta * dz

    torch.neg(dz, out=out[:, :, 1])
    dpa = torch.bmm(out.flatten(1, 2), u.mT).view_as(c.pa)  # of P beside that of L, then of A
    dp = dpa[:, :, 0].diagonal(dim1=1, dim2=2)[..., None]
    dbeta = (dz * y).sum(-1, keepdim=True).add_((dpa[:, :, 1] * c.pa[:, :, 1]).sum(-1, keepdim=True))
    dpa[:, :, 1] *= c.beta
    torch.neg(dv, out=out[:, :, 1])

    rows = torch.bmm(out.flatten(1, 2), entering.mT).view_as(c.qk).mul_(c.since[:, :, None])
    end = torch.bmm(u, leaving.mT).mul_(c.until)
    cols = end.clone()
    for b, since, until in halvings(c.retention):
        if b == part.size:
            break
        since, until = half(since, b, 1)[..., None, :], half(until, b, 0)
        block = lower_left(dpa, b).reshape(-1, 2 * b, b)
        row = (half(c.qk, b, 1) * since).view(len(block), 2 * b, -1)
        col = (half(c.k, b, 0) * until).view(len(block), b, -1)
        row_half, col_half = half(rows, b, 1), half(cols, b, 0)
        row_half.addcmul_(torch.bmm(block, col).view(row_half.shape), since)
        col_half.addcmul_(torch.bmm(block.mT, row).view(col_half.shape), until)

    # the diagonal of P carries no decay: it enters after dg, where it would have to cancel
    dg = (c.qk[:, :, 0] * rows[:, :, 0]).addcmul_(c.k, rows[:, :, 1]).addcmul_(c.k, cols, value=-1)
    dg[:, -1] += (c.k * end).sum(1).add_(c.kept[..., 0] * (entering * leaving).sum(-1))
    reverse_cumsum_(dg)
    dk = cols.add_(rows[:, :, 1]).addcmul_(dp, c.qk[:, :, 0])
    dq = rows[:, :, 0].addcmul_(dp, c.k).mul_(scale)
    return dq, dk, dv, dg, dbeta


@dataclass
class Chunks:
    """What the rows of a chunk determine alone.  R = chunks * heads, C rows a chunk."""

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


def prepare(
    part: Part, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, dtype: torch.dtype
) -> Chunks:
    H, K = q.shape[2:]
    R, C = part.chunks * H, part.size

    def rows(*widths: int) -> Tensor:
        return torch.empty(R, C, *widths, dtype=dtype, device=q.device)

    qk, wide_v, retention, wide_beta = rows(2, K), rows(v.shape[3]), rows(K), rows(1)
    part.fill(qk[:, :, 0], q)
    part.fill(qk[:, :, 1], k)
    part.fill(wide_v, v)
    part.fill(retention, g)
    part.fill(wide_beta, beta[..., None])
    qk[:, :, 0] *= scale
    retention.exp_()

    pa = qk.new_zeros(R, C, 2, C)
    inverse = qk.new_ones(R * C, 1, 1)
    for b, since, until in halvings(retention.clone()):
        if b == C:
            break
        row = (half(qk, b, 1) * half(since, b, 1)[..., None, :]).view(-1, 2 * b, K)
        col = (half(qk[:, :, 1], b, 0) * half(until, b, 0)).view(-1, b, K)
        block = torch.bmm(row, col.mT).view(R, -1, b, 2, b)
        lower_left(pa, b).copy_(block)
        inverse = doubled(inverse, (block[:, :, :, 1] * half(wide_beta, b, 1)).view(-1, b, b))
    pa[:, :, 0].diagonal(dim1=1, dim2=2).copy_((qk[:, :, 0] * qk[:, :, 1]).sum(-1))
    return Chunks(
        qk,
        wide_v,
        wide_beta,
        retention,
        since,
        until,
        pa,
        inverse,
        qk_since=qk * since[:, :, None],
        k_until=qk[:, :, 1] * until,
    )


def scan(c: Chunks, steps: list[slice], state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carries `state` [N * H, K, V] through the chunks in place.

    Returns the residuals Y and the writes U [R, C, V], and the states [R, K, V] that enter the chunks.
    """
    y, u = torch.empty_like(c.v), torch.empty_like(c.v)
    entering = state.new_empty(len(c.v), *state.shape[1:])
    solve, k_since = c.inverse * c.beta.mT, c.qk_since[:, :, 1]
    for rows in steps:
        s = state[: rows.stop - rows.start]
        entering[rows] = s
        torch.baddbmm(c.v[rows], k_since[rows], s, alpha=-1, out=y[rows])
        torch.bmm(solve[rows], y[rows], out=u[rows])
        s.mul_(c.kept[rows]).baddbmm_(c.k_until[rows].mT, u[rows])
    return y, u, entering


def reverse_scan(c: Chunks, steps: list[slice], do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
    """Carries the gradient `dstate` [N * H, K, V] of the states back through the chunks in place.

    do: [R, C, V].  Returns the gradients of Z = Diag(beta) Y [R, C, V] and of the states that leave the chunks
    [R, K, V].
    """
    dz, du = torch.empty_like(c.v), torch.bmm(c.pa[:, :, 0].mT, do)
    leaving = dstate.new_empty(len(do), *dstate.shape[1:])
    inflow, k_since = torch.bmm(c.qk_since[:, :, 0].mT, do), c.qk_since[:, :, 1]
    for rows in reversed(steps):
        ds = dstate[: rows.stop - rows.start]
        leaving[rows] = ds
        du[rows].baddbmm_(c.k_until[rows], ds)
        torch.bmm(c.inverse[rows].mT, du[rows], out=dz[rows])
        dy = c.beta[rows] * dz[rows]
        ds.mul_(c.kept[rows]).add_(inflow[rows]).baddbmm_(k_since[rows].mT, dy, alpha=-1)
    return dz, leaving


def halvings(retention: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """What is retained from the start and to the end of ever larger blocks of rows.

    retention: [R, C, K], overwritten.  Yields for b = 1, 2, .. C two tensors [R, C, K], good until the next: the
    products of the retentions from the start of a row's b-block through the row, and after the row to its end.
    """
    since, until, b = retention, torch.ones_like(retention), 1
    while True:
        yield b, since, until
        if b == retention.shape[1]:
            return
        first, second = half(since, b, 0), half(since, b, 1)
        half(until, b, 0).mul_(second[:, :, -1:])
        second *= first[:, :, -1:]
        b *= 2


def half(x: Tensor, b: int, which: int) -> Tensor:
    """The first (0) or second (1) half of every 2b rows: a view [R, C/2b, b, ...] of x [R, C, ...]."""
    return x.unflatten(1, (-1, 2, b))[:, :, which]


def lower_left(x: Tensor, b: int) -> Tensor:
    """Where the second halves of every 2b rows meet the first halves as columns: a view [R, C/2b, b, 2, b] of
    x [R, C, 2, C].
    """
    n = x.shape[1] // (2 * b)
    x = x.unflatten(3, (n, 2, b)).unflatten(1, (n, 2, b))[:, :, 1, :, :, :, 0]
    return x.diagonal(dim1=1, dim2=4).movedim(-1, 1)


def doubled(inverse: Tensor, below: Tensor) -> Tensor:
    """Inverses [n, 2b, 2b] of unit lower triangular blocks, from those of their halves.

    inverse: [2n, b, b], neighbours in pairs; below: [n, b, b], the block that joins a pair.
    """
    n, b = below.shape[:2]
    first, second = inverse.view(n, 2, b, b).unbind(1)
    out = inverse.new_zeros(n, 2 * b, 2 * b)
    out[:, :b, :b] = first
    out[:, b:, b:] = second
    torch.neg(torch.bmm(second, torch.bmm(below, first)), out=out[:, b:, :b])
    return out


def reverse_cumsum_(x: Tensor) -> None:
    """Sums over the rows from each to the last, in place and by halves: x [R, C, K]."""
    b = 1
    while b < x.shape[1]:
        half(x, b, 0).add_(half(x, b, 1)[:, :, :1])
        b *= 2

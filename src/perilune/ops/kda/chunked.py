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
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from perilune.ops.kda.reference import working_dtype

CHUNK = 64


@dataclass(frozen=True)
class Layout:
    """Where the tokens of N sequences lie among chunks of `size` rows.

    Step s holds chunk s of every sequence that has one, longest sequence first, so the sequences alive at a step are
    always the first ones.  Rows that no token fills are zero: zero k and beta write nothing, zero g forgets nothing.
    """

    size: int
    live: list[int]  # sequences alive at each step
    batch: tuple[int, int]  # B, T of a plain batch
    order: Tensor | None = None  # packed: the sequence at each place, longest first
    slots: Tensor | None = None  # packed: the row of each token among all chunks' rows

    @classmethod
    def of(cls, shape: torch.Size, cu: list[int] | None, size: int, device: torch.device) -> "Layout":
        B, T = shape[:2]
        lengths = [T] * B if cu is None else [z - a for a, z in zip(cu, cu[1:])]
        longest = max(lengths, default=0)
        size = min(size, 1 << max(longest - 1, 0).bit_length())
        if min(lengths, default=0) == longest:
            return cls(size, [len(lengths)] * -(-longest // size), (len(lengths), longest))
        assert cu is not None
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        chunks = [-(-lengths[n] // size) for n in order]
        live = [sum(c > s for c in chunks) for s in range(chunks[0])]
        first = torch.tensor([0, *live[:-1]]).cumsum(0)  # chunk that opens each step
        place = torch.empty(len(order), dtype=torch.long)
        place[order] = torch.arange(len(order))
        lens = torch.tensor(lengths)
        offset = torch.arange(T) - torch.tensor(cu[:-1]).repeat_interleave(lens)
        slots = (first[offset // size] + place.repeat_interleave(lens)) * size + offset % size
        return cls(size, live, (B, T), torch.tensor(order, device=device), slots.to(device))

    @cached_property
    def chunks(self) -> int:
        return sum(self.live)

    def steps(self, heads: int) -> Iterator[slice]:
        """The rows of the chunk-major tensors that each step reads."""
        start = 0
        for n in self.live:
            yield slice(start, start + n * heads)
            start += n * heads

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, D] -> [chunks * H, size, D], copied."""
        H, D = x.shape[2:]
        if self.slots is None:
            x = x.reshape(*self.batch, H, D)
            steps = len(self.live)
            if pad := steps * self.size - self.batch[1]:
                x = F.pad(x, (0, 0, 0, 0, 0, pad))
            x = x.unflatten(1, (steps, self.size)).permute(1, 0, 3, 2, 4)
        else:
            rows = x.new_zeros(self.chunks * self.size, H, D).index_copy_(0, self.slots, x[0])
            x = rows.view(-1, self.size, H, D).transpose(1, 2)
        out = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
        return out.view(self.chunks * H, self.size, D)

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """[chunks * H, size, D] -> the shape and dtype of `like`, [B, T, H, D]."""
        H, D = like.shape[2:]
        if self.slots is None:
            B, T = self.batch
            x = x.unflatten(0, (len(self.live), B, H)).permute(1, 0, 3, 2, 4)
            out = torch.empty(x.shape, dtype=like.dtype, device=x.device).copy_(x)
            return out.view(B, -1, H, D)[:, :T].reshape(like.shape)
        x = x.unflatten(0, (self.chunks, H)).transpose(1, 2)
        return x.reshape(-1, H, D).index_select(0, self.slots)[None].to(like.dtype)

    def sort(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, H, K, V] -> [N * H, K, V], longest sequence first, copied."""
        states = states.to(dtype, copy=True) if self.order is None else states[self.order].to(dtype)
        return states.flatten(0, 1).contiguous()

    def unsort(self, states: Tensor, heads: int) -> Tensor:
        states = states.unflatten(0, (-1, heads))
        return states if self.order is None else torch.empty_like(states).index_copy_(0, self.order, states)


def halvings(retention: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """How much is retained on the way to and from the middle of ever larger blocks.

    retention: [R, C, K], overwritten.  Yields for b = 1, 2, .. C: (b, since, until), views of [R, C, K] good until the
    next: the product of the retentions from the start of a row's b-block through the row, and from after the row to
    the block's end.
    """
    R, C, K = retention.shape
    since, until, b = retention, torch.ones_like(retention), 1
    yield b, since, until
    while b < C:
        first, second = (x.view(R, -1, 2, b, K) for x in (since, until))
        second[:, :, 0] *= first[:, :, 1, -1:]
        first[:, :, 1] *= first[:, :, 0, -1:]
        b *= 2
        yield b, since, until


def lower_left(x: Tensor, b: int) -> Tensor:
    """Rows of the upper, columns of the lower half of each 2b-block on the diagonal: [R, C, 2, C] -> [R, C/2b, b, 2, b].

    A view.
    """
    n = x.shape[1] // (2 * b)
    x = x.unflatten(3, (n, 2, b)).unflatten(1, (n, 2, b))
    return x[:, :, 1, :, :, :, 0].diagonal(dim1=1, dim2=4).movedim(-1, 1)


def half(x: Tensor, b: int, which: int) -> Tensor:
    """The first (0) or second (1) half of each 2b-block of rows: [R, C, ...] -> [R, C/2b, b, ...], a view."""
    return x.unflatten(1, (-1, 2, b))[:, :, which]


@dataclass
class Chunks:
    """What a chunk's rows alone determine.  R = chunks * heads, C rows a chunk."""

    qk: Tensor  # [R, C, 2, K]: scale * q beside k
    v: Tensor  # [R, C, V]
    beta: Tensor  # [R, C, 1]
    retention: Tensor  # [R, C, K]: exp(g)
    pa: Tensor  # [R, C, 2, C]: P beside A
    inverse: Tensor  # [R, C, C]: X
    qk_since: Tensor  # [R, C, 2, K]: with what is retained since the chunk's start
    since: Tensor  # [R, C, K]
    until: Tensor  # [R, C, K]

    @property
    def k(self) -> Tensor:
        return self.qk[:, :, 1]

    @property
    def p(self) -> Tensor:
        return self.pa[:, :, 0]

    @property
    def k_since(self) -> Tensor:
        return self.qk_since[:, :, 1]

    @cached_property
    def k_until(self) -> Tensor:
        return self.k * self.until

    @cached_property
    def kept(self) -> Tensor:
        """[R, K, 1]: what a whole chunk retains."""
        return self.since[:, -1, :, None]


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, layout: Layout) -> Chunks:
    dtype = working_dtype(q, k, v, g, beta)
    q, k, v, g, beta = (layout.split(x, dtype) for x in (q, k, v, g, beta[..., None]))
    R, C, K = k.shape
    qk = torch.stack((scale * q, k), 2)
    retention = g.exp()
    pa = qk.new_zeros(R, C, 2, C)
    inverse = qk.new_ones(R * C, 1, 1)
    for b, since, until in halvings(retention.clone()):
        if b == C:
            break
        rows = (half(qk, b, 1) * half(since, b, 1)[..., None, :]).flatten(0, 1).flatten(1, 2)
        cols = (half(k, b, 0) * half(until, b, 0)).flatten(0, 1)
        block = torch.bmm(rows, cols.mT).view(R, -1, b, 2, b)
        lower_left(pa, b).copy_(block)
        below = (block[:, :, :, 1] * half(beta, b, 1)).flatten(0, 1)
        inverse = doubled(inverse, below)
    pa[:, :, 0].diagonal(dim1=1, dim2=2).copy_((qk[:, :, 0] * k).sum(-1))
    return Chunks(qk, v, beta, retention, pa, inverse, qk * since[:, :, None], since, until)


def doubled(inverse: Tensor, below: Tensor) -> Tensor:
    """Inverses of unit lower triangular blocks from those of their halves.

    inverse: [2n, b, b], pairs of neighbours; below: [n, b, b], the block that joins a pair.  Returns [n, 2b, 2b].
    """
    n, b = below.shape[:2]
    first, second = inverse.view(n, 2, b, b).unbind(1)
    out = inverse.new_zeros(n, 2 * b, 2 * b)
    out[:, :b, :b] = first
    out[:, b:, b:] = second
    out[:, b:, :b] = torch.bmm(second, torch.bmm(below, first)).neg_()
    return out


def scan(c: Chunks, state: Tensor, layout: Layout, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Carries `state` [N * H, K, V] (overwritten by the final one) through the chunks.

    Returns the residuals Y and writes U [R, C, V], and the states [R, K, V] that enter the chunks.
    """
    y, u = torch.empty_like(c.v), torch.empty_like(c.v)
    entering = state.new_empty(len(c.v), *state.shape[1:])
    solve, k_until, kept = c.inverse * c.beta.mT, c.k_until, c.kept
    for rows in layout.steps(heads):
        s = state[: rows.stop - rows.start]
        entering[rows] = s
        torch.baddbmm(c.v[rows], c.k_since[rows], s, alpha=-1, out=y[rows])
        torch.bmm(solve[rows], y[rows], out=u[rows])
        s.mul_(kept[rows]).baddbmm_(k_until[rows].mT, u[rows])
    return y, u, entering


def reverse_scan(c: Chunks, do: Tensor, dstate: Tensor, layout: Layout, heads: int) -> tuple[Tensor, Tensor]:
    """Carries the gradient `dstate` of the final states (overwritten by that of the initial ones) back.

    do: [R, C, V].  Returns the gradient dZ of Z = beta * Y [R, C, V], and those of the states that leave the chunks
    [R, K, V].
    """
    dz, du = torch.empty_like(do), torch.bmm(c.p.mT, do)
    leaving = dstate.new_empty(len(do), *dstate.shape[1:])
    inflow = torch.bmm(c.qk_since[:, :, 0].mT, do)
    k_until, kept = c.k_until, c.kept
    for rows in reversed(list(layout.steps(heads))):
        s = dstate[: rows.stop - rows.start]
        leaving[rows] = s
        du[rows].baddbmm_(k_until[rows], s)
        torch.bmm(c.inverse[rows].mT, du[rows], out=dz[rows])
        dy = c.beta[rows] * dz[rows]
        s.mul_(kept[rows]).add_(inflow[rows]).baddbmm_(c.k_since[rows].mT, dy, alpha=-1)
    return dz, leaving


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, g, beta, state)
        ctx.scale, ctx.layout = scale, layout
        H = q.shape[2]
        c = prepare(q, k, v, g, beta, scale, layout)
        final = layout.sort(state, c.v.dtype)
        _, u, entering = scan(c, final, layout, H)
        o = torch.bmm(c.qk_since[:, :, 0], entering).baddbmm_(c.p, u)
        return layout.join(o, v), layout.unsort(final, H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, state = ctx.saved_tensors
        scale, layout, H = ctx.scale, ctx.layout, q.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            c = prepare(q, k, v, g, beta, scale, layout)
            dtype = c.v.dtype
            y, u, entering = scan(c, layout.sort(state, dtype), layout, H)
            do, dstate = layout.split(do, dtype), layout.sort(dfinal, dtype)
            dz, leaving = reverse_scan(c, do, dstate, layout, H)

            # gradients of O beside those of -Z, later of -Y: what falls on the rows of P and A
            out = torch.stack((do, -dz), 2)
            dpa = torch.bmm(out.flatten(1, 2), u.mT).view_as(c.pa)
            dp = dpa[:, :, 0].diagonal(dim1=1, dim2=2)[..., None]
            dbeta = (dz * y).sum(-1) + (dpa[:, :, 1] * c.pa[:, :, 1]).sum(-1)
            dpa[:, :, 1] *= c.beta
            out[:, :, 1] *= c.beta

            rows = torch.bmm(out.flatten(1, 2), entering.mT).view_as(c.qk).mul_(c.since[:, :, None])
            end = torch.bmm(u, leaving.mT).mul_(c.until)
            cols = end.clone()
            for b, since, until in halvings(c.retention):
                if b == layout.size:
                    break
                since, until = half(since, b, 1)[..., None, :], half(until, b, 0)
                block = lower_left(dpa, b).reshape(-1, 2 * b, b)
                row = (half(c.qk, b, 1) * since).view(-1, 2 * b, q.shape[-1])
                col = (half(c.k, b, 0) * until).flatten(0, 1)
                half(rows, b, 1).addcmul_(torch.bmm(block, col).view(half(rows, b, 1).shape), since)
                half(cols, b, 0).addcmul_(torch.bmm(block.mT, row).view(until.shape), until)

            dG = (c.qk * rows).sum(2).sub_(c.k * cols)
            dG[:, -1] += (c.k * end).sum(1) + c.kept[..., 0] * (entering * leaving).sum(-1)
            dg = dG.flip(1).cumsum(1).flip(1)
            dq = scale * (rows[:, :, 0] + dp * c.k)
            dk = rows[:, :, 1] + cols + dp * c.qk[:, :, 0]
            dv = -out[:, :, 1]
        grads = [layout.join(x, like) for x, like in ((dq, q), (dk, k), (dv, v), (dg, g))]
        return (
            *grads,
            layout.join(dbeta[..., None], beta[..., None])[..., 0],
            layout.unsort(dstate, H).to(state.dtype),
            None,
            None,
        )


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
    layout = Layout.of(q.shape, cu, chunk, q.device)
    if initial_state is None:
        sequences = q.shape[0] if cu is None else len(cu) - 1
        dtype = working_dtype(q, k, v, g, beta)
        initial_state = torch.zeros(sequences, q.shape[2], q.shape[3], v.shape[3], dtype=dtype, device=q.device)
    return _Chunked.apply(q, k, v, g, beta, initial_state, scale, layout)

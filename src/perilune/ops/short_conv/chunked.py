"""The convolution by shifted multiply-adds over all rows at once, whatever the documents.

Rows are convolved as if they were one document.  That is wrong only at the head of each document, its first W-1 rows,
whose taps reach back past its start: those few are computed apart, each from a window of its own that holds rows of
its document and of its state.  So there is no loop over documents, and nothing of one enters another, not even a NaN.

The work runs in blocks of rows.  The graph keeps x, the weight and the state; the backward pass computes the rest anew.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from perilune.ops.blocks import row_blocks
from perilune.ops.first_order import first_order
from perilune.ops.upload import on_device


def short_conv(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu: list[int] | None,
    activation: str | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """x [B, T, D], weight [D, W], state [N, W-1, D] -> y [B, T, D], final state [N, W-1, D] or None."""
    T, W = x.shape[1], weight.shape[1]
    if cu is None and T < W:
        if initial_state is None:
            initial_state = x.new_zeros(x.shape[0], W - 1, x.shape[2])
        return _step(x, weight, initial_state, activation)
    return _by_blocks(x, weight, initial_state, cu, activation, output_final_state)


@torch.compiler.disable  # where documents begin is data to a compiler, and every length one more to go through
def _by_blocks(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu: list[int] | None,
    activation: str | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    (B, T, D), W = x.shape, weight.shape[1]
    N = B if cu is None else len(cu) - 1
    state = x.new_zeros(N, W - 1, D) if initial_state is None else initial_state
    bounds = [T * n for n in range(B + 1)] if cu is None else cu
    heads = find_heads(tuple(bounds), W, x.device)
    y = ShortConv.apply(x.reshape(B * T, D), weight, state, heads, activation == "silu").view(B, T, D)
    if not output_final_state:
        return y, None
    return y, x[:, T - (W - 1) :].clone() if cu is None else _last_rows(x[0], state, cu)


def _step(x: Tensor, weight: Tensor, state: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """So few rows that a copy of them behind their state is the quickest way."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rows = torch.cat([state.to(compute), x.to(compute)], dim=1)  # [B, W-1+T, D]
    u = convolve(rows, weight.to(compute).T)
    y = silu(u) if activation == "silu" else u
    return y.to(x.dtype), rows[:, x.shape[1] :].to(x.dtype, copy=True)


def _last_rows(x: Tensor, state: Tensor, cu: list[int]) -> Tensor:
    """The last W-1 rows of (state, document) for each document of x [R, D]: [N, W-1, D]."""
    N, reach, D = state.shape
    end = torch.tensor(cu[1:], device=x.device).unsqueeze(1)
    length = end - torch.tensor(cu[:-1], device=x.device).unsqueeze(1)
    back = torch.arange(reach, device=x.device) - reach  # [W-1]
    held = (length + back).unsqueeze(2) < 0  # [N, W-1, 1], still in the state
    kept = state.to(x.dtype).gather(1, (length + back + reach).clamp(max=reach - 1).unsqueeze(2).expand(N, reach, D))
    return torch.where(held, kept, x[(end + back).clamp(min=0)]) if len(x) else kept


class Heads(NamedTuple):
    """The P rows of x [R, D] that lie less than W-1 rows into their document.

    Their windows hold nothing but such rows and rows of the N states; `source` numbers the former from 0, the latter
    from P.
    """

    rows: Tensor  # [P], rising
    places: Tensor  # the same on the CPU
    source: Tensor  # [P, W], into P + N * (W-1) rows

    def within(self, first: int, last: int) -> tuple[slice, Tensor]:
        """Which heads lie in rows first to last, and where there."""
        a, b = torch.searchsorted(self.places, torch.tensor([first, last])).tolist()
        return slice(a, b), self.rows[a:b] - first


@lru_cache(maxsize=16)  # the convolutions of a model share them
def find_heads(cu: tuple[int, ...], W: int, device: torch.device) -> Heads:
    counts = [min(b - a, W - 1) for a, b in pairwise(cu)]  # heads of each document
    before = torch.tensor(list(accumulate(counts, initial=0)))
    document = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.long))  # [P]
    P = len(document)
    offset = torch.arange(P) - before[document]  # [P], in the document
    rows = torch.tensor(cu)[document] + offset
    tap = torch.arange(W)
    row = torch.arange(P).unsqueeze(1) + tap - (W - 1)  # [P, W]
    in_state = offset.unsqueeze(1) + tap  # [P, W], as a row of (state, document)
    source = torch.where(in_state < W - 1, P + document.unsqueeze(1) * (W - 1) + in_state, row)
    return Heads(on_device(rows, device), rows, on_device(source, device))


class ShortConv(torch.autograd.Function):
    """x [R, D], weight [D, W], state [N, W-1, D] -> y [R, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: Tensor, heads: Heads, activate: bool) -> Tensor:
        ctx.save_for_backward(x, weight, state)
        ctx.heads, ctx.activate = heads, activate
        taps = weight.to(torch.promote_types(x.dtype, torch.float32)).T.contiguous()  # [W, D]
        u_heads = convolve(windows_of(heads, x, state, taps.dtype), taps).squeeze(1)  # [P, D]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for first, last in row_blocks(x):
            u = convolve(rows_behind(x, first, last, taps), taps)
            which, place = heads.within(first, last)
            u[place] = u_heads[which]
            y[first:last] = silu(u, inplace=True) if activate else u
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """With u before the activation, du its gradient and s = W-1-j how far tap j reaches back:

        dx_t = sum_j w_j du_(t+s)        dw_j = sum_t du_t x_(t-s)

        Heads are left out of these sums and go through their windows.
        """
        x, weight, state = ctx.saved_tensors
        heads, activate = ctx.heads, ctx.activate
        taps = weight.to(torch.promote_types(x.dtype, torch.float32)).T.contiguous()
        W, D = taps.shape

        windows = windows_of(heads, x, state, taps.dtype)
        du = dy[heads.rows].to(taps.dtype)
        if activate:
            du = torch.ops.aten.silu_backward(du, convolve(windows, taps).squeeze(1))
        dtaps = (du.unsqueeze(1) * windows).sum(0)  # [W, D]
        dwindows = (du.unsqueeze(1) * taps).view(-1, D)
        P = len(heads.rows)
        dsources = dwindows.new_zeros(P + state.shape[0] * (W - 1), D).index_add_(0, heads.source.view(-1), dwindows)
        dx_heads, dstate = dsources[:P], dsources[P:].view(state.shape).to(state.dtype)

        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        following = taps.new_zeros(W - 1, D)  # du of the rows after the block
        for first, last in reversed(list(row_blocks(x))):
            L = last - first
            rows = rows_behind(x, first, last, taps)
            which, place = heads.within(first, last)
            du = dy[first:last].to(taps.dtype)
            if activate:
                du = torch.ops.aten.silu_backward(du, convolve(rows, taps))
            du = torch.cat([du, following])
            du[place] = 0
            following = du[: W - 1]
            dx_block = convolve(du, taps.flip(0))
            dx_block[place] += dx_heads[which]
            dx[first:last] = dx_block
            for j in range(W):
                dtaps[j] += (du[:L] * rows[j : j + L]).sum(0)
        return dx, dtaps.T.to(weight.dtype), dstate, None, None


def windows_of(heads: Heads, x: Tensor, state: Tensor, dtype: torch.dtype) -> Tensor:
    """What each head's taps fall on: [P, W, D]."""
    return torch.cat([x[heads.rows].to(dtype), state.flatten(0, 1).to(dtype)])[heads.source]


def rows_behind(x: Tensor, first: int, last: int, taps: Tensor) -> Tensor:
    """Rows first to last of x with the W-1 rows before them, zeros where there are none: [W-1+last-first, D]."""
    start = first - (len(taps) - 1)
    return pad(x[max(start, 0) : last].to(taps.dtype), (0, 0, max(-start, 0), 0))


def convolve(rows: Tensor, taps: Tensor) -> Tensor:
    """u_t = sum_j taps_j rows_(t+j): rows [..., W-1+L, D], taps [W, D] -> [..., L, D]."""
    W = len(taps)
    L = rows.shape[-2] - (W - 1)
    u = rows[..., W - 1 :, :] * taps[W - 1]
    for j in reversed(range(W - 1)):
        u.addcmul_(rows[..., j : j + L, :], taps[j])
    return u

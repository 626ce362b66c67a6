"""Blocks that cover the strict lower triangle of a chunk's row pairs, with the decay of every pair as two factors.

Pair (i, j), j < i, decays by exp(g) of the rows j+1 .. i, per key channel.  Over a chunk that spans more orders of
magnitude than a float, so the factors refer to a row between: what is retained from the reference to row i times what
is retained from row j to the reference.

*Halves.*  The triangle is halved again and again; in the block that joins the two halves of 2b rows the reference is
the middle.  Both factors are products of retentions, at most 1, and what underflows is truly that small, so any decay
is safe.

*Tiles.*  Where the decay is bounded, a tile of 16 rows on the diagonal is one block, the part above the diagonal to be
cut off: with half the worst decay of a tile as reference, exponents stay within +-40 for a bound of -5.  The reference
does not depend on the data, so no row sees a later one, not even through rounding.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16
WIDEST = 84.0  # a tile's log decay; exp(87.3) is where float32 runs out


class Block(NamedTuple):
    """One block in every tile of b rows, or between the halves of every 2b rows: n blocks [b, b] a chunk."""

    b: int
    tile: bool
    to: Tensor  # [R, n, b, K]: factor of the block's rows
    since: Tensor  # [R, n, b, K]: factor of its columns

    def rows(self, x: Tensor) -> Tensor:
        """The block's rows of x [R, C, ...]: a view [R, n, b, ...]."""
        return x.unflatten(1, (-1, self.b)) if self.tile else halves(x, self.b)[1]

    def cols(self, x: Tensor) -> Tensor:
        """The rows of x [R, C, ...] that are the block's columns: a view [R, n, b, ...]."""
        return x.unflatten(1, (-1, self.b)) if self.tile else halves(x, self.b)[0]

    def of(self, pairs: Tensor) -> Tensor:
        """The block in pairs [R, C, 2, C], rows by columns: a view [R, n, b, 2, b]."""
        x = self.cols(self.rows(pairs).movedim(-1, 1))  # [R, n', b', n, b, 2]
        return x.diagonal(dim1=1, dim2=3).permute(0, 4, 2, 3, 1)

    def cut(self, pairs: Tensor) -> Tensor:
        """pairs [R, n, b, 2, b] without those on and above the diagonal."""
        if not self.tile:
            return pairs
        above = torch.ones(self.b, self.b, dtype=torch.bool, device=pairs.device).triu()
        return pairs.masked_fill(above[:, None], 0)  # a selection: what is above may have overflowed


def cover(since: Tensor, until: Tensor, floor: float | None) -> Iterator[Block]:
    """The blocks, smallest first; each is good until the next is asked for.

    since: [R, C, K], the retentions exp(g), C a power of two; until: ones.  Leaves in `since` what is retained from
    the chunk's start through each row, in `until` what is retained after each row to its end.  floor: no g is below.
    """
    C = since.shape[1]
    tile = min(TILE, C) if floor is not None and -floor * TILE <= WIDEST else 1
    b = 1
    while True:
        if b == tile > 1:
            to = since.unflatten(1, (-1, b)) * math.exp(-floor * b / 2)  # type: ignore[operator]
            yield Block(b, True, to, to.reciprocal())
        if b == C:
            return
        (since_first, since_second), (until_first, _) = halves(since, b), halves(until, b)
        if b >= tile:
            yield Block(b, False, since_second, until_first)
        until_first *= since_second[:, :, -1:]
        since_second *= since_first[:, :, -1:]
        b *= 2


def halves(x: Tensor, b: int) -> tuple[Tensor, ...]:
    """The first and the second half of every 2b rows of x [R, C, ...]: two views [R, C/2b, b, ...]."""
    return x.unflatten(1, (-1, 2, b)).unbind(2)


def sum_from_(x: Tensor) -> None:
    """Sums over the rows from each to the last, in place and by halves: x [R, C, K]."""
    b = 1
    while b < x.shape[1]:
        first, second = halves(x, b)
        first += second[:, :, :1]
        b *= 2


def sum_through_(x: Tensor) -> Tensor:
    """Sums over the rows from the first through each, in place and by halves: x [R, C, K]."""
    b = 1
    while b < x.shape[1]:
        first, second = halves(x, b)
        second += first[:, :, -1:]
        b *= 2
    return x

"""How the tokens of N sequences are laid out in chunks.

A chunk is `size` rows of one sequence.  Step s holds chunk s of every sequence that has one, longest sequence first,
so the sequences alive at a step are always the first ones, and a scan over the steps is one batched product each.
Steps are worked on in parts, small enough that temporaries stay in cache and their memory is used again.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

PART = 1 << 17  # elements of one [R, C, K] tensor of a part, roughly
LAUNCHES = 64  # times as many where kernels are launched: their number counts there, not the cache
MIN_STEPS = 8  # of a part: a state is kept for each, so they must not be short


@dataclass(frozen=True)
class Part(ABC):
    """A run of steps as tensors of rows [R, C, ...], R = chunks * heads, C = `size`, ordered by step, sequence, head.

    Rows that no token fills are zero: zero k and beta write nothing, zero g forgets nothing.
    """

    size: int
    live: list[int]  # sequences alive at each step

    def steps(self, heads: int) -> list[int]:
        """How many of R each step reads."""
        return [n * heads for n in self.live]

    @abstractmethod
    def fill(self, rows: Tensor, x: Tensor) -> None:
        """Writes the part's tokens in x [N, T, H, D] (packed: [1, T, H, D]) to rows [R, C, D]."""

    @abstractmethod
    def pour(self, x: Tensor, rows: Tensor) -> None:
        """What `fill` does, the other way."""


@dataclass(frozen=True)
class EvenPart(Part):
    """Of sequences of one length: views alone."""

    tokens: slice  # of every sequence

    def fill(self, rows: Tensor, x: Tensor) -> None:
        x = self._by_chunk(x)
        rows = rows.unflatten(0, x.shape[:3])
        if x.shape[3] < self.size:
            rows[:, :, :, x.shape[3] :] = 0
            rows = rows[:, :, :, : x.shape[3]]
        rows.copy_(x)

    def pour(self, x: Tensor, rows: Tensor) -> None:
        x = self._by_chunk(x)
        x.copy_(rows.unflatten(0, x.shape[:3])[:, :, :, : x.shape[3]])

    def _by_chunk(self, x: Tensor) -> Tensor:
        """This part's tokens as a view [steps, N, H, C or fewer, D]."""
        return x[:, self.tokens].unflatten(1, (len(self.live), -1)).permute(1, 0, 3, 2, 4)


@dataclass(frozen=True)
class RaggedPart(Part):
    """Of packed documents of several lengths."""

    tokens: Tensor  # of the row
    slots: Tensor  # the place of each among the chunks' rows

    def fill(self, rows: Tensor, x: Tensor) -> None:
        H, D = x.shape[2:]
        flat = rows.new_zeros(sum(self.live) * self.size, H, D)
        flat.index_copy_(0, self.slots, x[0].index_select(0, self.tokens).to(rows.dtype))
        rows.unflatten(0, (-1, H)).copy_(flat.view(-1, self.size, H, D).transpose(1, 2))

    def pour(self, x: Tensor, rows: Tensor) -> None:
        H, D = x.shape[2:]
        flat = rows.unflatten(0, (-1, H)).transpose(1, 2).reshape(-1, H, D)
        x[0].index_copy_(0, self.tokens, flat.index_select(0, self.slots).to(x.dtype))


@dataclass(frozen=True)
class Layout:
    """Parts in order of time, and the order of the sequences in them."""

    parts: Sequence[Part]
    sequences: int
    order: Tensor | None = None  # packed: the sequence at each place, longest first

    def view(self, x: Tensor) -> Tensor:
        """[B, T, ...] as the parts see it: documents of one length are a batch."""
        if self.order is not None or x.shape[0] == self.sequences:
            return x
        return x[0].unflatten(0, (self.sequences, x.shape[1] // max(self.sequences, 1)))

    def sort(self, states: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, H, K, V] to a copy [N * H, K, V] in the order of the parts."""
        states = states.to(dtype, copy=True) if self.order is None else states[self.order].to(dtype)
        return states.contiguous().flatten(0, 1)

    def unsort(self, states: Tensor, heads: int) -> Tensor:
        """What `sort` does, the other way."""
        states = states.unflatten(0, (self.sequences, heads))
        return states if self.order is None else torch.empty_like(states).index_copy_(0, self.order, states)


def lay_out(q: Tensor, cu: list[int] | None, size: int) -> Layout:
    """Chunks of at most `size` rows, a power of two, for q [B, T, H, K] and documents bounded by `cu`."""
    assert size & (size - 1) == 0, size
    B, T, H, K = q.shape
    lengths = [T] * B if cu is None else [stop - start for start, stop in pairwise(cu)]
    longest = max(lengths, default=0)
    size = min(size, _power_of_two(longest))
    chunk = size * H * K // (1 if q.device.type == "cpu" else LAUNCHES)
    if cu is None or all(n == longest for n in lengths):
        return Layout(_even_parts(len(lengths), longest, size, chunk), len(lengths))
    return _ragged(cu, lengths, size, chunk, q.device)


def _power_of_two(n: int) -> int:
    """The smallest one not below n."""
    return 1 << max(n - 1, 0).bit_length()


def _cut(live: list[int], chunk: int) -> list[slice]:
    """Steps gathered to parts, `chunk` elements a sequence and step."""
    cuts, start, elements = [], 0, 0
    for step, n in enumerate(live, 1):
        elements += n * chunk
        if step == len(live) or (elements >= PART and step - start >= MIN_STEPS):
            cuts.append(slice(start, step))
            start, elements = step, 0
    return cuts


def _even_parts(sequences: int, length: int, size: int, chunk: int) -> list[EvenPart]:
    """Of a plain batch: whole chunks, then the tail as a chunk of its own."""
    whole, tail = divmod(length, size)
    live = [sequences] * whole
    parts = [EvenPart(size, live[cut], slice(cut.start * size, cut.stop * size)) for cut in _cut(live, chunk)]
    if tail:
        parts.append(EvenPart(_power_of_two(tail), [sequences], slice(length - tail, length)))
    return parts


def _ragged(cu: list[int], lengths: list[int], size: int, chunk: int, device: torch.device) -> Layout:
    """Of documents of unequal lengths: where every token goes, by step."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    chunks = sorted(-(-n // size) for n in lengths)
    live = [len(chunks) - bisect_right(chunks, step) for step in range(chunks[-1])]

    counts = torch.tensor(lengths)
    place = torch.tensor(order).argsort().repeat_interleave(counts)
    offset = torch.arange(cu[-1]) - torch.tensor(cu[:-1]).repeat_interleave(counts)
    step, row = offset // size, offset % size
    first = torch.tensor([0, *accumulate(live)])  # chunk of each step
    slots, tokens = ((first[step] + place) * size + row).sort()
    reached = torch.searchsorted(slots, first * size).tolist()  # tokens before each step

    parts = []
    for cut in _cut(live, chunk):
        here = slice(reached[cut.start], reached[cut.stop])
        base = first[cut.start] * size
        parts.append(RaggedPart(size, live[cut], tokens[here].to(device), (slots[here] - base).to(device)))
    return Layout(parts, len(lengths), torch.tensor(order, device=device))

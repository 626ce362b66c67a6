"""Where the chunks of a call begin and end, and the runs of them that one program carries a state through."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.upload import on_device

LEAST = 8  # chunks of a segment: a state goes through memory for each
# Microseconds on an H200
STEP, HALF_STEP = 1.8, 1.3  # of a program that passes a chunk, with all columns of V or half of them
SHARED = 1 / 40  # of memory, for a program's chunk
FIRST = 1.25  # of a program that passes a chunk for what its segment makes of a state
BORDER = 3.0  # of a segment, to join it to the one before
BEGIN = 20.0  # of the kernels that splitting adds

LARGE = 7 << 27  # bytes that a backward pass keeps which are worth a turn
TURNS = 4  # along the sequences, for which the states in between are kept; and by heads
BUSY = 2 / 3  # of the processors, at least, in every turn


class Chunks(NamedTuple):
    """Chunks of at most C tokens, none across a boundary, in the order of the tokens.

    A segment is a run of chunks of one sequence; a sequence is one segment or several, also when it is empty.
    """

    number: int
    starts: Tensor  # [number] int64, the first token of each
    lengths: Tensor  # [number] int32
    segments: Tensor  # [segments + 1] int32, the first chunk of each, and their number
    sequences: Tensor  # [N + 1] int32, the first segment of each, and their number
    firsts: Tensor  # [N] int64, the first segment of each
    lasts: Tensor  # [N] int64
    split: bool  # whether any sequence has several segments
    parts: tuple["Chunks", ...] = ()  # the same segments, a stretch of each after the other; none: all at once

    @property
    def stretches(self) -> tuple["Chunks", ...]:
        return self.parts or (self,)

    @property
    def segment_count(self) -> int:
        return len(self.segments) - 1


def chunks_of(
    B: int, T: int, cu: list[int] | None, C: int, programs: int, device: torch.device, size: int = 0
) -> Chunks:
    """The chunks of B rows of T tokens laid end to end, or of the documents of one row.

    programs: how many work on a sequence side by side.  size: bytes that a backward pass keeps for a chunk.
    """
    edges = tuple(cu) if cu is not None else tuple(b * T for b in range(B + 1))
    return _chunks(edges, C, programs, processors(device), device, size)


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def segment_length(counts: list[int], programs: int, processors: int) -> int:
    """How many chunks go into a segment, for sequences of `counts` chunks; all of the longest if splitting is no gain.

    The longest in equal segments, so many that a forward pass takes the least time.
    """
    longest = max(counts, default=0)
    best, least = max(longest, 1), float("inf")
    for parts in range(1, max(longest // LEAST, 1) + 1):
        length = max(-(-longest // parts), 1)
        number = programs * sum(-(-max(n, 1) // length) for n in counts)
        if parts > 1 and number > processors:
            break
        step = HALF_STEP if 2 * number <= processors else STEP
        time = max(length * step, sum(counts) * programs * SHARED)
        if parts > 1:
            time += -(-2 * number // processors) * length * FIRST + parts * BORDER + BEGIN
        if time < least:
            best, least = length, time
    return best


def turns(H: int, size: int, programs: int, processors: int) -> list[slice]:
    """The heads that a backward pass works on at a time: as many turns as memory asks for and processors allow.

    size: bytes of what it keeps for all H.  programs: of a scan over all of them, at their narrowest.
    """
    number = max(min(size // LARGE, TURNS, int(programs / (BUSY * processors)), H), 1)
    edges = [H * i // number for i in range(number + 1)]
    return [slice(*edge) for edge in pairwise(edges)]


@lru_cache(maxsize=64)  # layers of a model share them, and steps where shapes stay
def _chunks(
    edges: tuple[int, ...], C: int, programs: int, processors: int, device: torch.device, size: int = 0
) -> Chunks:
    first, lengths = torch.tensor(edges)[:-1], torch.tensor(edges).diff()
    counts = (lengths + C - 1) // C
    within = C * _ranks(counts)
    starts = first.repeat_interleave(counts) + within
    sizes = (lengths.repeat_interleave(counts) - within).clamp(max=C)

    length = segment_length(counts.tolist(), programs, processors)
    parts = ((counts + length - 1) // length).clamp(min=1)
    segments = _sums(counts)[:-1].repeat_interleave(parts) + length * _ranks(parts)
    segments = torch.cat((segments, counts.sum()[None]))
    sequences = _sums(parts)
    split = len(segments) - 1 > len(counts)

    def tabled(starts: Tensor, sizes: Tensor, segments: Tensor, parts: tuple[Chunks, ...] = ()) -> Chunks:
        tables = (starts, sizes.int(), segments.int(), sequences.int(), sequences[:-1], sequences[1:] - 1)
        return Chunks._make((len(starts), *(on_device(x, device) for x in tables), split, parts))

    n, runs = len(starts), segments.diff()
    number = 1 if split else min(size * n // LARGE, TURNS, n // (LEAST * max(len(runs), 1)))
    stretches = []
    for part in range(number if number > 1 else 0):
        begin, end = runs * part // number, runs * (part + 1) // number
        own = (segments[:-1] + begin).repeat_interleave(end - begin) + _ranks(end - begin)
        stretches.append(tabled(starts[own], sizes[own], _sums(end - begin)))
    return tabled(starts, sizes, segments, tuple(stretches))


def _sums(counts: Tensor) -> Tensor:
    """[N] -> [N + 1], the sums of those before each, and of all."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _ranks(counts: Tensor) -> Tensor:
    """0, 1 .. counts[0] - 1, 0, 1 .. counts[1] - 1 and so on."""
    return torch.arange(int(counts.sum())) - _sums(counts)[:-1].repeat_interleave(counts)

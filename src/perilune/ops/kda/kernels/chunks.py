"""Where the chunks of a call begin and end, and the runs of them that one program carries a state through."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 8  # chunks of a segment: a state goes through memory for each
GAIN = 3  # programs side by side that it takes to pay for passing a sequence twice


class Chunks(NamedTuple):
    """Chunks of at most C tokens, none across a boundary, in the order of the tokens.

    A segment is a run of chunks of one sequence; a sequence is one segment or several, also when it is empty.
    """

    number: int
    starts: Tensor  # [number] int64, the first token of each
    lengths: Tensor  # [number] int32
    segments: Tensor  # [segments + 1] int32, the first chunk of each, and their number
    sequences: Tensor  # [N + 1] int32, the first segment of each, and their number
    split: bool  # whether any sequence has several segments

    @property
    def segment_count(self) -> int:
        return len(self.segments) - 1


def chunks_of(B: int, T: int, cu: list[int] | None, C: int, programs: int, device: torch.device) -> Chunks:
    """The chunks of B rows of T tokens laid end to end, or of the documents of one row.

    programs: how many work on a sequence side by side.
    """
    edges = tuple(cu) if cu is not None else tuple(b * T for b in range(B + 1))
    return _chunks(edges, C, programs, processors(device), device)


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def segment_length(counts: list[int], programs: int, processors: int) -> int:
    """How many chunks go into a segment, for sequences of `counts` chunks; all of the longest if splitting is no gain.

    As many that all segments' programs together just find room on the processors.
    """
    longest = max(counts, default=0)
    length = max(-(-sum(counts) * programs // processors), LEAST)
    while length < longest and sum(-(-n // length) for n in counts) * programs > processors:
        length += 1 + length // 16
    if length * GAIN > longest:
        return max(longest, 1)
    return -(-longest // -(-longest // length))  # the longest in equal segments


@lru_cache(maxsize=64)  # layers of a model share them, and steps where shapes stay
def _chunks(edges: tuple[int, ...], C: int, programs: int, processors: int, device: torch.device) -> Chunks:
    first, lengths = torch.tensor(edges)[:-1], torch.tensor(edges).diff()
    counts = (lengths + C - 1) // C
    within = C * _ranks(counts)
    starts = first.repeat_interleave(counts) + within
    sizes = (lengths.repeat_interleave(counts) - within).clamp(max=C)

    length = segment_length(counts.tolist(), programs, processors)
    parts = ((counts + length - 1) // length).clamp(min=1)
    segments = _sums(counts)[:-1].repeat_interleave(parts) + length * _ranks(parts)
    segments = torch.cat((segments, counts.sum()[None]))
    split = len(segments) - 1 > len(counts)
    tables = [x.to(device) for x in (starts, sizes.int(), segments.int(), _sums(parts).int())]
    return Chunks(len(starts), tables[0], tables[1], tables[2], tables[3], split)


def _sums(counts: Tensor) -> Tensor:
    """[N] -> [N + 1], the sums of those before each, and of all."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _ranks(counts: Tensor) -> Tensor:
    """0, 1 .. counts[0] - 1, 0, 1 .. counts[1] - 1 and so on."""
    return torch.arange(int(counts.sum())) - _sums(counts)[:-1].repeat_interleave(counts)

"""Where the chunks of a call begin and end: tables the kernels read."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """Chunks of at most C tokens, none across a boundary, in the order of the tokens; segments are runs of them."""

    starts: Tensor  # [number] int64, the first token of each
    lengths: Tensor  # [number] int32
    segments: Tensor  # [segments + 1] int32, the first chunk of each, and their number
    number: int

    @property
    def segment_count(self) -> int:
        return len(self.segments) - 1


def chunks_of(B: int, T: int, cu: list[int] | None, C: int, device: torch.device) -> Chunks:
    """The chunks of B rows of T tokens laid end to end, or of the documents of one row; a segment is a sequence."""
    return _chunks(tuple(cu) if cu is not None else tuple(b * T for b in range(B + 1)), C, device)


@lru_cache(maxsize=64)  # layers of a model share them, and steps where shapes stay
def _chunks(edges: tuple[int, ...], C: int, device: torch.device) -> Chunks:
    first, lengths = torch.tensor(edges)[:-1], torch.tensor(edges).diff()
    counts = (lengths + C - 1) // C
    segments = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    within = C * (torch.arange(int(segments[-1])) - segments[:-1].repeat_interleave(counts))
    starts = first.repeat_interleave(counts) + within
    sizes = (lengths.repeat_interleave(counts) - within).clamp(max=C)
    return Chunks(starts.to(device), sizes.int().to(device), segments.int().to(device), len(starts))

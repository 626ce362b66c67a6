"""What decoding remembers: a fixed-size state for a recurrent layer, a growing list of latents for an attention layer.

A cache holds N sequences.  New tokens come either dense, `[N, T, ...]`, or packed, `[1, sum T, ...]` with N documents
in `cu_seqlens`: one document a sequence, so that every sequence may grow by its own number of tokens, none included.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class LayerCache(Protocol):
    """What every layer's cache can do."""

    @property
    def lengths(self) -> list[int]: ...

    def reset(self) -> None: ...

    def select(self, rows: Tensor) -> "LayerCache": ...


@dataclass
class RecurrentCache:
    """A KDA layer's past: `conv` [N, W-1, 3P], the last raw rows of q | k | v, and `state` [N, H, K, V] in float32.

    A layer replaces both and writes into neither, so that whoever took one, or a shallow copy of this, keeps it as is.
    """

    lengths: list[int]
    conv: Tensor | None = None
    state: Tensor | None = None

    def update(self, conv: Tensor, state: Tensor, counts: Sequence[int]) -> None:
        self.conv, self.state = conv, state
        self.lengths = [n + new for n, new in zip(self.lengths, counts)]

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)
        self.conv = self.state = None

    def select(self, rows: Tensor) -> "RecurrentCache":
        lengths = [self.lengths[i] for i in rows.tolist()]
        if self.state is None or self.conv is None:
            return RecurrentCache(lengths)
        return RecurrentCache(lengths, self.conv[rows], self.state[rows])


@dataclass
class LatentCache:
    """An MLA layer's past: `latents` [N, capacity, R], of which each sequence has filled its first `lengths` rows."""

    lengths: list[int]
    latents: Tensor | None = None

    def append(self, new: Tensor, counts: Sequence[int]) -> Tensor:
        """Adds the first `counts[n]` rows of `new: [N, T, R]` to sequence n; returns `[N, longest, R]`.

        Rows past a sequence's own length are zero or stale and must be masked.
        """
        lengths = [n + c for n, c in zip(self.lengths, counts)]
        self._reserve(new, max(lengths, default=0))
        assert self.latents is not None
        if torch.is_grad_enabled() and self.latents.requires_grad:
            self.latents = self.latents.clone()  # the graph of an earlier call holds the old ones
        if len(set(self.lengths)) == 1 and len(set(counts)) == 1:  # the common case: all sequences in step
            self.latents[:, self.lengths[0] : lengths[0]] = new[:, : counts[0]]
        else:
            for row, (start, end) in enumerate(zip(self.lengths, lengths)):
                self.latents[row, start:end] = new[row, : end - start]
        self.lengths = lengths
        return self.latents[:, : max(lengths, default=0)]

    def _reserve(self, like: Tensor, needed: int) -> None:
        """Room for `needed` rows; grows by doubling, so that n tokens are copied O(n) times in all."""
        capacity = 0 if self.latents is None else self.latents.shape[1]
        if needed <= capacity and self.latents is not None:
            return
        grown = like.new_zeros(len(self.lengths), max(needed, 2 * capacity, 64), like.shape[-1])
        if self.latents is not None:
            grown[:, :capacity] = self.latents
        self.latents = grown

    def reset(self) -> None:
        self.lengths = [0] * len(self.lengths)
        self.latents = None

    def select(self, rows: Tensor) -> "LatentCache":
        return LatentCache(
            [self.lengths[i] for i in rows.tolist()], None if self.latents is None else self.latents[rows]
        )


@dataclass
class HybridCache:
    """The caches of all layers of a model, one entry a layer."""

    layers: list[LayerCache] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Tokens seen by each sequence; the same in every layer."""
        return list(self.layers[0].lengths) if self.layers else []

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def reset(self) -> None:
        """Forgets everything; the next prompt starts afresh."""
        for layer in self.layers:
            layer.reset()

    def select(self, rows: Tensor) -> "HybridCache":
        """A copy that holds the sequences `rows`, in that order, repeats allowed: to branch or to drop sequences."""
        return HybridCache([layer.select(rows) for layer in self.layers])


def token_counts(batch: int, length: int, cu: Sequence[int] | None) -> list[int]:
    """How many new tokens each sequence brings: T for a dense batch, the document lengths for a packed one."""
    if cu is None:
        return [length] * batch
    return [b - a for a, b in itertools.pairwise(cu)]


def pad_documents(packed: Tensor, counts: Sequence[int]) -> Tensor:
    """`[1, sum counts, ...]` to `[N, max counts, ...]`, zeros behind the shorter ones."""
    if not counts:
        return packed.new_zeros(0, 0, *packed.shape[2:])
    documents = packed[0].split(list(counts))
    return torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)


def unpad_documents(padded: Tensor, counts: Sequence[int]) -> Tensor:
    """The inverse of `pad_documents`."""
    return torch.cat([padded.flatten(0, 1)[:0], *(row[:n] for row, n in zip(padded, counts))])[None]

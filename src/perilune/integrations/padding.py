"""What a `transformers` decoder layer is told about padding and packing, read as documents laid end to end.

Attention can be masked; a recurrence has to be kept away from what is not text.  So real tokens are laid in one row,
with the boundaries of their documents.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from perilune.core.errors import ShapeError
from perilune.ops.packing import boundaries


@dataclass(frozen=True, eq=False)
class Pack:
    """The tokens of a batch [B, T] as one row of documents."""

    places: Tensor
    """[n] int64, where they stand in the flattened batch; padding is left out."""
    cu: list[int]
    """[N+1] boundaries of the documents among the n tokens."""
    one_a_row: bool
    """Whether document b is row b of the batch, perhaps empty."""


_packs = WeakTensorKeyDictionary()  # one look at a mask serves all layers, and their recomputation


def pack_of(x: Tensor, mask: Any, position_ids: Tensor | None, cu_seqlens: Tensor | None = None) -> Pack | None:
    """The documents in hidden states x: [B, T, D]; None where each row is one whole document.

    The first that is given decides:
        cu_seqlens: [N+1] boundaries, of one row.
        mask: [B, S] of ones and zeros, or [B or 1, 1, T, S] of booleans or of zeros and large negative numbers; S - T
            tokens are cached.  A token that sees itself is text; one that sees none before it starts a document.
        position_ids: [B or 1, T]; a document starts where they do not go on by one.

    Raises ShapeError for a mask that lets a token see a later one or another document's, and for what cannot be read.
    """
    given = ((cu_seqlens, _from_boundaries), (mask, _from_mask), (position_ids, _from_positions))
    source, read = next(((s, read) for s, read in given if s is not None), (None, _from_mask))
    B, T = x.shape[:2]
    if source is None or (source is position_ids and T == 1):
        return None
    if not isinstance(source, Tensor):
        raise ShapeError(
            f"attention_mask: expected a tensor or None, got {type(source).__name__}; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    state = None if source.is_inference() else (source._version, B, T)  # inference tensors do not count their changes
    if state is None or source not in _packs or _packs[source][0] != state:
        _packs[source] = state, _packed(*read(source, B, T))
    return _packs[source][1]


def real_tokens(mask: Any, tokens: int) -> Tensor | None:
    """Which tokens of a batch [B, T] are text, in one row: [B * T] bool; None where nothing says that any is not.

    mask: as a decoder gets it: None, [B, S] of ones and zeros, or [B or 1, 1, T, S] of booleans or of zeros and large
    negative numbers, where a token that does not see itself is padding; S - T tokens are cached.  Of several masks, one
    for each kind of attention, any says it.  tokens: B * T.

    Raises ShapeError for a mask that cannot be read.
    """
    if isinstance(mask, dict):
        mask = next((m for m in mask.values() if m is not None), None)
    if mask is None:
        return None
    shape = list(mask.shape) if isinstance(mask, Tensor) else None
    if shape is not None and len(shape) == 2 and tokens % shape[0] == 0 and shape[1] >= (T := tokens // shape[0]) > 0:
        return mask[:, shape[1] - T :].bool().flatten()
    if shape is not None and len(shape) == 4 and tokens % (T := shape[2]) == 0 and shape[0] in (1, tokens // T):
        return _sees(mask).diagonal(shape[3] - T, 1, 2).expand(tokens // T, T).flatten()
    raise ShapeError(
        f"attention_mask: expected [B, S] or [B, 1, T, S] of {tokens} tokens, got {shape or type(mask).__name__}; "
        "give a mask of ones and zeros, one for every token"
    )


def _packed(kept: Tensor, starts: Tensor) -> Pack | None:
    """From which tokens [B, T] are text, and which of them start a document."""
    one_a_row = not bool((starts & (kept.cumsum(1) > 1)).any())
    if one_a_row and bool(kept.all()):
        return None
    places = kept.flatten().nonzero().flatten()
    if one_a_row:
        return Pack(places, [0, *accumulate(kept.sum(1).tolist())], True)
    return Pack(places, [*starts.flatten()[places].nonzero().flatten().tolist(), len(places)], False)


def _from_boundaries(cu_seqlens: Tensor, B: int, T: int) -> tuple[Tensor, Tensor]:
    cu = boundaries(cu_seqlens, B, T)
    assert cu is not None
    starts = torch.zeros(B, T, dtype=torch.bool, device=cu_seqlens.device)
    starts[0, [start for start in cu if start < T]] = True
    return torch.ones_like(starts), starts


def _from_mask(mask: Tensor, B: int, T: int) -> tuple[Tensor, Tensor]:
    past = mask.shape[-1] - T
    if past < 0 or list(mask.shape[:-1]) not in ([B], [B, 1, T], [1, 1, T]):
        raise ShapeError(
            f"attention_mask: expected [{B}, S] or [{B}, 1, {T}, S] with S >= {T}, got {list(mask.shape)}; "
            "give a mask of ones and zeros, one for every token"
        )
    if mask.dim() == 2:
        kept = mask.bool()
        return kept[:, past:], (kept & (kept.cumsum(1) == 1))[:, past:]
    sees = _sees(mask).expand(B, T, past + T)
    kept = sees.diagonal(past, 1, 2)
    starts = kept & ~sees.tril(past - 1).any(-1)
    document = starts.cumsum(1)
    allowed = (document[:, :, None] == document[:, None, :]).tril()
    if bool((sees[..., past:] & kept[..., None] & ~allowed).any()):
        raise ShapeError(
            "attention_mask: expected each token to see earlier ones of its document, got one that sees others; "
            "a recurrence cannot follow such a mask, keep attention in this layer"
        )
    return kept, starts


def _sees(mask: Tensor) -> Tensor:
    """Who sees whom, [B or 1, T, S], from a mask [B or 1, 1, T, S] of booleans or of numbers to be added."""
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2


def _from_positions(positions: Tensor, B: int, T: int) -> tuple[Tensor, Tensor]:
    if list(positions.shape) not in ([1, T], [B, T]):
        raise ShapeError(
            f"position_ids: expected [{B}, {T}], got {list(positions.shape)}; positions of several kinds do not say "
            "where documents start, give an attention_mask"
        )
    starts = torch.ones(B, T, dtype=torch.bool, device=positions.device)
    starts[:, 1:] = positions.diff() != 1
    return torch.ones_like(starts), starts

"""Weights cast once for all the times they are multiplied before they change.

A step of training multiplies each weight once a part of its batch, and again where activations are recomputed.  What
`cast_once` made is known to every thread: a backward pass has some of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_made: dict[int, tuple[Tensor, int, Tensor]] = {}
"""By identity: a weight, its version when it was cast, the copy."""


@contextmanager
def cast_once(weights: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Inside, `projections` that need these weights in `dtype` find them cast, all in one call.

    The copies are held until the end; one whose weight was written to since is not used.
    """
    wide = [w for w in weights if w.dtype != dtype]
    with torch.no_grad():
        copies = cast(wide, dtype)
    _made.update((id(w), (w, w._version, copy)) for w, copy in zip(wide, copies))
    try:
        yield
    finally:
        for w in wide:
            _made.pop(id(w), None)


def cast(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The weights in `dtype`, as they are where they have it, or were cast to it."""
    known = [w if w.dtype == dtype else _known(w, dtype) for w in weights]
    wrong = [w for w, copy in zip(weights, known) if copy is None]
    copies = [torch.empty(w.shape, dtype=dtype, device=w.device) for w in wrong]
    if wrong:
        torch._foreach_copy_(copies, wrong)
    made = iter(copies)
    return [next(made) if copy is None else copy for copy in known]


def _known(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    own, version, copy = _made.get(id(weight), (None, 0, None))
    return copy if own is weight and own._version == version and copy is not None and copy.dtype == dtype else None

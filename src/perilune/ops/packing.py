"""Packed sequences: documents laid end to end in one row, with `cu_seqlens` their boundaries.

`cu_seqlens: [N+1]` integers, first 0, last T, never falling; N documents, some perhaps empty.  B is 1 then.
"""

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.core.errors import ShapeError


def boundaries(cu_seqlens: Tensor | Sequence[int] | None, batch: int, length: int) -> list[int] | None:
    """`cu_seqlens` as a checked list of Python integers; None stays None.

    Raises ShapeError where it does not describe one row of `length` tokens.
    """
    if cu_seqlens is None:
        return None
    if batch != 1:
        raise ShapeError(f"cu_seqlens: expected batch size 1 with packed documents, got {batch}; lay them in one row")
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype.is_floating_point or cu_seqlens.dtype == torch.bool:
            raise ShapeError(
                f"cu_seqlens: expected a 1-D integer tensor, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
                "give the N+1 boundaries of N documents"
            )
        cu_seqlens = cu_seqlens.tolist()
    try:
        cu = [operator.index(x) for x in cu_seqlens]  # int() would round
    except TypeError:
        raise ShapeError(
            f"cu_seqlens: expected integers, got {cu_seqlens}; give the N+1 boundaries of N documents"
        ) from None
    if not cu or cu[0] != 0:
        raise ShapeError(f"cu_seqlens: expected first entry 0, got {cu[:1]}; it starts where the row starts")
    if cu[-1] != length:
        raise ShapeError(
            f"cu_seqlens: expected last entry {length} (T), got {cu[-1]}; pad the pack or mend the lengths"
        )
    if any(a > b for a, b in itertools.pairwise(cu)):
        raise ShapeError(f"cu_seqlens: expected boundaries that never fall, got {cu}; sort them")
    return cu

"""Operations under `torch.autocast`: which dtype it asks for, and islands in which it has no say."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would give a linear layer on x's device; None where it is off, as always on the meta device."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context for work on x's device in which matrix products compute in the dtype of their operands."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def as_autocast(x: Tensor) -> Tensor:
    """x as every linear layer that reads it would cast it, once for all of them; x itself without autocast."""
    dtype = autocast_dtype(x)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)

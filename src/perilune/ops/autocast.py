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


def dtype_for_products(x: Tensor) -> torch.dtype:
    """In which dtype linear layers read x: what makes x asks for it, so that no layer has to cast."""
    dtype = autocast_dtype(x)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype

"""Shapes and inputs that the tests of the short convolution share."""

import torch
from torch import Tensor

CASES = {
    "one row": (3, 1, 5, 4, None),
    "two rows": (2, 2, 5, 4, None),
    "no row": (2, 0, 5, 4, None),
    "rows as many as reach": (2, 3, 5, 4, None),
    "rows as many as taps": (2, 4, 5, 4, None),
    "long": (2, 130, 3, 4, None),
    "one tap": (2, 9, 5, 1, None),
    "two taps": (2, 9, 5, 2, None),
    "seven taps": (1, 20, 2, 7, None),
    "one document": (1, 9, 5, 4, [0, 9]),
    "empty documents": (1, 12, 5, 4, [0, 0, 5, 5, 12, 12]),
    "one-row documents": (1, 71, 3, 4, [0, 1, 2, 70, 71]),
    "short documents": (1, 10, 3, 4, [0, 2, 4, 5, 8, 10]),
    "only one-row documents": (1, 4, 3, 4, [0, 1, 2, 3, 4]),
    "only empty documents": (1, 0, 3, 4, [0, 0, 0]),
    "packed with one tap": (1, 12, 3, 1, [0, 5, 5, 12]),
    "packed, seven taps": (1, 40, 3, 7, [0, 3, 9, 9, 30, 31, 40]),
}


def inputs(B: int, T: int, D: int, W: int, N: int | None = None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, weight and one initial state for each of N sequences, all wanting gradients."""
    shapes = [(B, T, D), (D, W), (B if N is None else N, W - 1, D)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]

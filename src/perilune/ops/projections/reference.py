"""One linear layer after the other, as autocast and autograd have them."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def projections(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w) for w in weights)

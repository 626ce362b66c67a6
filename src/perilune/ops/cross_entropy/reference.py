"""The oracle: all logits, then the loss."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """See the public function."""
    logits = h @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum")

"""The oracle, and what runs wherever parts save nothing: both operands raised, then multiplied."""

import torch
from torch import Tensor


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the public function."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return x.to(wide) @ weight.to(wide).T

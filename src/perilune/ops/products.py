"""Products of 16-bit matrices whose sums stay in float32."""

import torch
from torch import Tensor


def not_wide() -> str | None:
    """Why a GPU's products of 16-bit matrices cannot be relied on to be summed in float32, or None."""
    return "torch sums 16-bit products in float32 on NVIDIA's GPUs alone" if torch.version.hip is not None else None


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, of matrices [M, K] and [K, N] of one dtype, in which they are multiplied."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # products of 16-bit numbers are exact in float32


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total [M, N] float32 plus a b, in place."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.addmm_(a.float(), b.float())

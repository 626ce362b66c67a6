"""The orthogonalisation inside Muon."""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7
"""Blocks of a smaller Frobenius norm are not blown up to a full update: they fade, and a zero block stays zero."""
CPU_BATCH = 2**17
"""Numbers iterated at a time on a CPU: few enough to stay in its cache, which halves the time of small blocks."""
DEVICE_BATCH = 2**27
"""The same elsewhere: few launches, while five tensors of so many numbers at most are held, 1.3 GiB in 16 bits."""


def newton_schulz(blocks: Tensor, steps: int = 5, *, dtype: torch.dtype | None = None) -> Tensor:
    """Pushes the singular values of every matrix towards 1 and keeps its singular vectors.

        X = N / |N|_F;   `steps` times:  A = X X^T,  X = a X + (b A + c A^2) X      (a, b, c) = COEFFICIENTS

    (Muon, Jordan et al. 2024).  It is quick, not exact: five steps leave well-conditioned singular values in about
    [0.68, 1.13], and lift small ones only part of the way (1e-3 of the norm to 0.47, 1e-4 to 0.05).

    blocks: [..., n, m], each matrix on its own; the scale of a block does not matter.  Computes in `dtype`, by
    default float32 or wider (bfloat16 is customary on GPUs), and returns the input's shape and dtype.  Blocks that are
    in `dtype` already are never held any wider.
    """
    wide = torch.promote_types(blocks.dtype, torch.float32)
    dtype = dtype or wide
    tall = blocks.shape[-2] > blocks.shape[-1]
    n, m = sorted(blocks.shape[-2:])
    X = (blocks.mT if tall else blocks).to(dtype if blocks.dtype == dtype else wide).reshape(-1, n, m)
    batch = max(1, (CPU_BATCH if X.device.type == "cpu" else DEVICE_BATCH) // (n * m))
    parts = [_iterate(x, steps, dtype) for x in X.split(batch)]
    X = parts[0] if len(parts) == 1 else torch.cat(parts)
    X = (X.mT if tall else X).to(blocks.dtype)
    return X.reshape(blocks.shape)


def _iterate(X: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    a, b, c = COEFFICIENTS
    wide = torch.promote_types(X.dtype, torch.float32)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=wide).clamp_min(SMALLEST_NORM)
    X = (X / norm.to(X.dtype)).to(dtype)
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X

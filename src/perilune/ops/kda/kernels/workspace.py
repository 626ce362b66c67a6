"""What the kernels hand each other: a record for every chunk and head, of n chunks."""

from typing import NamedTuple

import torch
from torch import Tensor


class Records(NamedTuple):
    """What a chunk determines alone, in the letters of `perilune.ops.kda.chunked`.

    The matrices are bfloat16, or float32 where the inputs are; what scales rows and channels is always float32.
    """

    q_since: Tensor  # [n, H, C, K]: scale * c * Q
    k_since: Tensor  # [n, H, C, K]: c * K
    k_until: Tensor  # [n, H, C, K]: c_n / c * K
    solve: Tensor  # [n, H, C, C]: -A X, so that U / beta = Y + (-A X) (beta Y), whatever beta is
    pairs: Tensor  # [n, H, C, C]: P below its diagonal
    retained: Tensor  # [n, H, K]: c_n
    own: Tensor  # [n, H, C]: the diagonal of P
    strength: Tensor  # [n, H, C]: beta
    q_norm: Tensor  # [n, H, C]: one over the norm of q, or one
    k_norm: Tensor  # [n, H, C]

    @classmethod
    def empty(cls, n: int, H: int, C: int, K: int, dtype: torch.dtype, device: torch.device) -> "Records":
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # Of one kind one behind the other: one descriptor for all of them
        keys, squares = new(3, n, H, C, K, dtype=dtype), new(2, n, H, C, C, dtype=dtype)
        return cls._make((*keys, *squares, new(n, H, K), *new(4, n, H, C)))


class Flow(NamedTuple):
    """What the scans leave for the gradients."""

    residuals: Tensor  # [n, H, C, V]: U / beta; `value_grads_kernel` makes it U
    states: Tensor  # [n, H, V, K]: those that enter the chunks, transposed
    dz: Tensor  # [n, H, C, V]: gradients of Z = Diag(beta) Y; `value_grads_kernel` makes it -dY
    dstates: Tensor  # [n, H, V, K]: gradients of the states that leave the chunks, transposed

    @classmethod
    def empty(cls, n: int, H: int, C: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> "Flow":
        def new(*shape: int) -> Tensor:
            return torch.empty(n, H, *shape, dtype=dtype, device=device)

        return cls(new(C, V), new(V, K), new(C, V), new(V, K))

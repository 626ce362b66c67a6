"""One of several tensors that a kernel in Triton was given."""

import triton
import triton.language as tl


@triton.jit
def chosen(items, i, N: tl.constexpr):
    """items[i] of N, where i is known only at run time."""
    item = items[0]
    for j in tl.static_range(1, N):
        item = tl.where(i == j, items[j], item)
    return item

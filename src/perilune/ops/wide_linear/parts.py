"""Float32 products on tensor cores, which multiply bfloat16: a number of 24 bits is the sum of three of 8.

With W = W1 + W2 + W3, each the rest before it rounded to bfloat16, x W^T is the sum of three products whose terms are
exact and whose sums are float32.  Tensor cores of an H200 make them sixteen times as fast as its float32 units.

They cut such sums off, toward zero, after every few terms, where a float32 unit rounds to nearest: errors add up, and
those of 7,168 terms are larger than all of W3.  So W1's sums end after RUN terms, and the rest is rounded to nearest.

    y  = x W3^T + x W2^T + x W1^T                 smallest first
    dW = dy3^T x + dy2^T x + dy1^T x              dy in parts as well; one product, the parts side by side
    dx = dy2 W1 + dy1 W1 + dy1 W2                 one product; what is left out is 2^-16 of a term: dx is bfloat16
"""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.blocks import as_rows
from perilune.ops.first_order import first_order
from perilune.ops.fused import INTERPRETED, TRITON
from perilune.ops.products import add_product_, not_wide, wide_product

FEW = 256  # rows
RUN = 1024  # terms, whose sum is cut off by about 2^-20 of it; to add the next costs a reading and a writing of y
BLOCK = 1024  # numbers a program


@torch.compiler.disable  # it cannot see through products of another dtype than their operands
def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the public function; on every device."""
    return _WideLinear.apply(x, weight)


def refuses(x: Tensor, weight: Tensor) -> str | None:
    """Why parts cannot serve a call, or save nothing; or None."""
    if x.dtype != torch.bfloat16 or weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its parts are bfloat16, of float32 at most, and x and weight are {x.dtype} and {weight.dtype}"
    if not x.is_cuda or weight.device != x.device:
        return f"it is for tensor cores, and x and weight are on {x.device} and {weight.device}"
    if (reason := not_wide()) is not None:
        return reason
    if torch.cuda.get_device_capability(x.device)[0] < 8:
        return "this GPU's tensor cores know no bfloat16"
    if len(as_rows(x)) < FEW:
        return f"of fewer than {FEW} rows a float32 product takes no longer"
    return None


def split(x: Tensor, parts: Tensor) -> None:
    """Writes x [M, N] float32 to parts [3, M, N] bfloat16 whose sum it is, the smallest first; a fourth, if there is
    one, is the largest again.

    To the last bit above 2^-110; below, parts would be smaller than any number.  One kernel where Triton runs.
    """
    if TRITON and (x.is_cuda or INTERPRETED):
        return _split_at_once(x, parts)
    third, second, first, *again = parts
    first.copy_(x)
    rest = x - first
    second.copy_(rest)
    rest -= second
    third.copy_(rest)
    for part in again:
        part.copy_(first)
    return None


def _split_at_once(x: Tensor, parts: Tensor) -> None:
    from perilune.ops.wide_linear.kernels import split_kernel

    assert parts.stride(2) == 1
    if count := x.numel():
        with torch.cuda.device_of(x):  # kernels are launched on the current device
            split_kernel[(-(-count // BLOCK),)](
                x, *x.stride(), parts, *parts.stride()[:2], count, x.shape[1],
                TWICE=len(parts) == 4, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip


def product(rows: Tensor, parts: Tensor) -> Tensor:
    """rows [M, K] times the sum of parts [3 or 1, N, K], transposed: [M, N] float32."""
    *small, first = parts
    terms = [(rows, part) for part in small]
    terms += zip(rows.split(RUN, 1), first.split(RUN, 1))
    y = wide_product(terms[0][0], terms[0][1].T)
    for x, w in terms[1:]:
        add_product_(y, x, w.T)
    return y


class _WideLinear(torch.autograd.Function):
    """x [..., K] bfloat16, weight [N, K] float32 or bfloat16 -> [..., N] float32.  Keeps x and W's parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dtype == torch.float32:
            parts = weight.new_empty(3, *weight.shape, dtype=torch.bfloat16)
            split(weight, parts)
        else:
            parts = weight[None]
        y = product(as_rows(x), parts)
        ctx.save_for_backward(x, parts)
        ctx.dtype = weight.dtype
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, parts = ctx.saved_tensors
        rows, dy = as_rows(x), as_rows(dy)
        (M, N), K = dy.shape, x.shape[-1]
        sides = dy.new_empty(M, 4, N, dtype=torch.bfloat16)  # dy3, dy2, dy1, dy1
        split(dy, sides.transpose(0, 1))
        dx = dw = None
        if ctx.needs_input_grad[0]:
            first = parts[-1]
            below = torch.cat([first, first, *parts[-2:-1]])
            dx = (sides.view(M, 4 * N)[:, N : N + len(below)] @ below).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = wide_product(sides.view(M, 4 * N)[:, : 3 * N].T, rows).view(3, N, K).sum(0).to(ctx.dtype)
        return dx, dw

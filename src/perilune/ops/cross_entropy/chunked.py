"""Logits a block of rows at a time: made, turned into their own gradient in place, used, and gone.

With p = softmax(z) of a row's logits z = W h, the loss is logsumexp(z) - z_y and its gradient p - e_y, so that nothing
but dh and dW outlives a block.  Both are computed in the forward pass and scaled in the backward.
"""

from typing import Any

import torch
from torch import Tensor

from perilune.ops.blocks import CPU_BLOCK, DEVICE_BLOCK
from perilune.ops.first_order import first_order

LEAST_ROWS = 64  # a block of fewer would read the weight more often than it is worth


def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """See the public function."""
    return _LinearCrossEntropy.apply(h, weight, targets, ignored)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
        wide = torch.promote_types(h.dtype, torch.float32)
        dh = torch.zeros_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        rows = (targets != ignored).nonzero()[:, 0]  # only these have a loss
        total = h.new_zeros((), dtype=wide)
        elements = CPU_BLOCK if h.device.type == "cpu" else DEVICE_BLOCK
        for block in rows.split(max(LEAST_ROWS, elements // len(weight))):
            x, y = h[block], targets[block, None]
            z = (x @ weight.T).to(wide)
            norm = z.logsumexp(-1, keepdim=True)
            total += (norm - z.gather(-1, y)).sum()
            if dh is None and dw is None:
                continue
            dz = z.sub_(norm).exp_()
            dz.scatter_add_(-1, y, torch.full_like(norm, -1))
            dz = dz.to(h.dtype)
            if dh is not None:
                dh[block] = dz @ weight
            if dw is not None:
                dw += dz.T @ x
        ctx.save_for_backward(*(None if g is None else g.to(like.dtype) for g, like in ((dh, h), (dw, weight))))
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        return *(None if g is None else g * grad.to(g.dtype) for g in (dh, dw)), None, None

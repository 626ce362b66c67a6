"""Logits a block of rows at a time: made, turned into their own gradient in place, used, and gone.

On a CPU rows without a target are left out.  Elsewhere to find them would wait for the device; there they go along and
count nothing, also where they hold no numbers.

With p = softmax(z) of a row's logits z = W h, the loss is logsumexp(z) - z_y and its gradient p - e_y, so that nothing
but dh and dW outlives a block.  Both are computed in the forward pass and scaled in the backward.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from perilune.ops.blocks import CPU_BLOCK, DEVICE_BLOCK
from perilune.ops.first_order import first_order

LEAST_ROWS = 64  # a block of fewer would read the weight more often than it is worth
GATHERED = ("cpu",)  # devices on which rows without a target are left out


def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """See the public function."""
    return _LinearCrossEntropy.apply(h, weight, targets, ignored, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, ignored: int, learning: bool) -> Tensor:
        wide = torch.promote_types(h.dtype, torch.float32)
        dh = torch.zeros_like(h) if learning and ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=wide) if learning and ctx.needs_input_grad[1] else None
        total = h.new_zeros((), dtype=wide)
        elements = CPU_BLOCK if h.device.type == "cpu" else DEVICE_BLOCK
        size = max(LEAST_ROWS, elements // len(weight))
        blocks: Iterable[Tensor | slice] = (slice(i, i + size) for i in range(0, len(h), size))
        if gathered := h.device.type in GATHERED:
            blocks = (targets != ignored).nonzero()[:, 0].split(size)
        for block in blocks:
            x, y = h[block], targets[block, None]
            counts = y != ignored  # [rows, 1]
            if not gathered:
                y, x = y.clamp(min=0), x.masked_fill(~counts, 0)
            z = (x @ weight.T).to(wide)
            norm = z.logsumexp(-1, keepdim=True)
            total += ((norm - z.gather(-1, y)) * counts).sum()
            if dh is None and dw is None:
                continue
            dz = z.sub_(norm.masked_fill(~counts, torch.inf)).exp_()  # 0 where there is no target
            dz = dz.scatter_add_(-1, y, -counts.to(wide)).to(h.dtype)
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
        return *(None if g is None else g * grad.to(g.dtype) for g in (dh, dw)), None, None, None

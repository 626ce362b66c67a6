"""No fast path lets a second derivative pass as 0."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.ops import attn_res, grouped_experts, kda, linear_cross_entropy, short_conv, situ_glu, swiglu

IDS = torch.tensor([[0, 1], [1, 2], [2, 0]])

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "kda": lambda x: kda(*3 * [x[None, :, None]], -(x[None, :, None] ** 2), x[None, :, :1])[0],
    "short_conv": lambda x: short_conv(x[None], x.T)[0],
    "attn_res": lambda x: attn_res(x[0], [x, 2 * x], x[1]),
    "situ_glu": lambda x: situ_glu(x, x),
    "swiglu": lambda x: swiglu(x, x),
    "grouped_experts": lambda x: grouped_experts(x, *2 * [x.expand(3, 3, 4)], x.T.expand(3, 4, 3), IDS, x[:, :2]),
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, x, torch.arange(3)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("loss", [torch.sum, lambda o: o.square().sum()], ids=["constant", "varying"])
def test_a_second_derivative_is_refused(operation: str, loss: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    out = loss(OPERATIONS[operation](x))
    (once,) = torch.autograd.grad(out, x, retain_graph=True)
    (dx,) = torch.autograd.grad(out, x, create_graph=True)
    assert torch.equal(dx, once)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()

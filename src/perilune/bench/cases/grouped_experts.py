"""A sparse layer with very many small experts: the grouped form against loops over experts.

Two loops, as for KDA: one indexes the stacked weights expert by expert, and each index backpropagates a gradient as
large as all experts; the library's reference takes the stack apart once.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from perilune.bench.case import DEVICE, Candidate, Case, Gate
from perilune.ops import grouped_experts, situ_glu

INDEXED, REFERENCE, FAST = "loop indexing w", "reference, weights unbound", "perilune"
E, TOP_K, M, D, F = 896, 16, 2048, 64, 32


def inputs(tokens: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, w_gate, w_up, w_down, ids, weights of a random router; and dL/dy."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(DEVICE)

    weights, ids = normal(tokens, experts).sigmoid().topk(TOP_K)
    weights = (weights / weights.sum(-1, keepdim=True)).to(torch.promote_types(dtype, torch.float32))
    w_gate, w_up, w_down = (
        normal(experts, F, D) / D**0.5,
        normal(experts, F, D) / D**0.5,
        normal(experts, D, F) / F**0.5,
    )
    leaves = normal(tokens, D), w_gate, w_up, w_down
    return *(x.requires_grad_() for x in leaves), ids, weights.requires_grad_(), normal(tokens, D)


def forward_backward(backend: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and the gradients of everything that has one."""
    *arguments, dy = tensors
    y = grouped_experts(*arguments, backend=backend)
    return y.detach(), *torch.autograd.grad(y, [x for x in arguments if x.requires_grad], dy)


def indexed(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and the gradients of a loop as it is usually written."""
    x, w_gate, w_up, w_down, ids, weights, dy = tensors
    y = torch.zeros_like(x)
    for e in range(len(w_gate)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        inner = situ_glu(x[token] @ w_gate[e].T, x[token] @ w_up[e].T)
        y = y.index_add(0, token, inner @ w_down[e].T * weights[token, slot, None])
    return y.detach(), *torch.autograd.grad(y, [x, w_gate, w_up, w_down, weights], dy)


def build() -> Sequence[Candidate]:
    tensors = inputs(M, E, torch.float32)
    return (
        Candidate(INDEXED, partial(indexed, tensors)),
        Candidate(REFERENCE, partial(forward_backward, "reference", tensors)),
        Candidate(FAST, partial(forward_backward, "auto", tensors)),
    )


def check() -> None:
    """In float64, on fewer tokens, so that some experts get none."""
    tensors = inputs(10, 100, torch.float64)
    expected, got = (forward_backward(backend, tensors) for backend in ("reference", "auto"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(indexed(tensors), expected, rtol=1e-12, atol=1e-12)


CASE = Case(
    name="grouped_experts",
    title=f"{E} experts, {TOP_K} a token, forward and backward: {M} tokens, width {D}, inner width {F}, float32",
    build=build,
    check=check,
    gates=(Gate(FAST, INDEXED, 10.0), Gate(FAST, REFERENCE, 5.0)),
)

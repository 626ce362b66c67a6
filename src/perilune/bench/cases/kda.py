"""KDA over a long row: the fast form against loops over tokens and against `transformers`; on a GPU, `bench.kda`.

Two loops, because they differ much: one indexes every tensor token by token, as such loops are written, and each index
backpropagates a gradient as long as the row; the library's reference takes the tokens apart once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from perilune.bench.case import DEVICE, Candidate, Case, Gate
from perilune.bench.kda.comparison import Comparison
from perilune.ops import kda, kda_step

STEPS, REFERENCE = "loop over q[:, t]", "reference, tokens unbound"
FAST, TRANSFORMERS = "perilune", "transformers"
T, H, D = 4096, 4, 64


def inputs(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, log decay in (-5, 0), write strength: [1, length, H, D] leaves with unit keys; and dL/do."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, z, do = torch.randn(5, 1, length, H, D, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, length, H, generator=generator, dtype=torch.float64)
    leaves = normalize(q, dim=-1), normalize(k, dim=-1), v, -5 * torch.sigmoid(3 * z - 3), beta
    return *(x.to(DEVICE, dtype).requires_grad_() for x in leaves), do.to(DEVICE, dtype)


def forward_backward(op: Callable[..., Any], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k, v, g, beta."""
    *leaves, do = tensors
    o = op(*leaves)[0]
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def stepwise(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One `kda_step` a token."""
    state = q.new_zeros(q.shape[0], H, D, D)
    outputs = []
    for t in range(q.shape[1]):
        o, state = kda_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(o)
    return torch.stack(outputs, 1), state


def transformers_op() -> Callable[..., Any] | None:
    if find_spec("transformers") is None or find_spec("transformers.models.kimi_linear") is None:
        return None
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return chunk_kimi_delta_attention


def build() -> Sequence[Candidate]:
    tensors = inputs(T, torch.float32)
    theirs = transformers_op()
    return (
        Candidate(STEPS, partial(forward_backward, stepwise, tensors)),
        Candidate(REFERENCE, partial(forward_backward, partial(kda, backend="reference"), tensors)),
        Candidate(TRANSFORMERS, partial(forward_backward, theirs, tensors))
        if theirs
        else Candidate(TRANSFORMERS, lambda: None, skipped="transformers with Kimi Linear is not installed"),
        Candidate(FAST, partial(forward_backward, kda, tensors)),
    )


def check() -> None:
    """Against the token loop in float64, gradients too: the fast form to rounding, `transformers` in its float32."""
    tensors = inputs(200, torch.float64)
    expected = forward_backward(partial(kda, backend="reference"), tensors)
    compare(STEPS, forward_backward(stepwise, tensors), expected, 1e-12)
    compare(FAST, forward_backward(kda, tensors), expected, 1e-12)
    single = tuple(x.detach().float().requires_grad_(x.requires_grad) for x in tensors)
    compare(FAST, forward_backward(kda, single), expected, 1e-5)
    if theirs := transformers_op():
        compare(TRANSFORMERS, forward_backward(theirs, single), expected, 1e-4)


def compare(label: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...], allowed: float) -> None:
    for name, x, exact in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), got, expected):
        error = float((x - exact).norm() / exact.norm())
        assert error <= allowed, f"{label}: {name} is off by {error:.1e} of its size, allowed {allowed:.0e}"


ON_CPU = Case(
    name="kda",
    title=f"Kimi Delta Attention, forward and backward: 1 row of {T} tokens, {H} heads of {D}, float32",
    build=build,
    check=check,
    gates=(Gate(FAST, STEPS, 25.0), Gate(FAST, REFERENCE, 10.0), Gate(FAST, TRANSFORMERS, 2.0)),
)

CASE = Comparison() if DEVICE.type == "cuda" else ON_CPU

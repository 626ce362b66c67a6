"""The six projections of a KDA layer under autocast, forward and backward, against linear layers one by one."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from perilune.bench.case import DEVICE, Candidate, Case, Gate
from perilune.ops import projections

REFERENCE, FAST = "linear layers", "perilune"
M, D, SIZES = (32_768, 1024, (1024, 1024, 1024, 128, 8, 1024)) if DEVICE.type == "cuda" else (512, 256, (256, 256, 8))


def inputs(tokens: int, width: int, sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, *weights = (
        torch.randn(n, width, generator=generator, dtype=dtype).to(DEVICE).requires_grad_() for n in (tokens, *sizes)
    )
    return x, weights


def forward_backward(backend: str, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The results and the gradients of x and all weights."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        results = projections(x, weights, backend=backend)
    gradients = torch.autograd.grad(results, [x, *weights], [torch.ones_like(y) for y in results])
    return [*(y.detach() for y in results), *gradients]


def build() -> Sequence[Candidate]:
    x, weights = inputs(M, D, SIZES, torch.float32)
    return (
        Candidate(REFERENCE, partial(forward_backward, "reference", x, weights)),
        Candidate(FAST, partial(forward_backward, "chunked", x, weights)),
    )


def check() -> None:
    """In float64, which autocast leaves alone."""
    x, weights = inputs(10, 24, (3, 16), torch.float64)
    got, expected = (forward_backward(backend, x, weights) for backend in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


CASE = Case(
    name="projections",
    title=f"{len(SIZES)} linear maps of one input, bf16 autocast, forward and backward: {M} tokens, width {D}",
    build=build,
    check=check,
    gates=(Gate(FAST, REFERENCE, 0.8),),  # what it saves are launches; on a CPU the two take as long
)

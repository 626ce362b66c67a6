"""What KDA is checked and timed on: random inputs, with gates of three kinds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from perilune.ops import BoundedGate, kda
from perilune.ops.kda.api import BACKENDS

REGIMES = ("fast", "mixed", "slow")
"""Of the gates: all channels forget within a token or two, some never, or none within a thousand tokens."""
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


@dataclass(frozen=True)
class Shape:
    """B rows of T tokens, or a row of documents."""

    B: int
    T: int
    H: int
    D: int = 128
    documents: tuple[int, ...] = ()
    """Their lengths, T in all and B = 1; none: a row is a document."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs that have gradients, and the gradient of the output."""

    leaves: tuple[Tensor, ...]
    """In the order of INPUTS: q, k, v, g: [B, T, H, D], beta: [B, T, H]; A_log: [H], dt_bias: [H, D] with logits."""
    do: Tensor
    """[B, T, H, D]"""
    cu_seqlens: Tensor
    """[N+1] int32, the boundaries of all documents when rows are laid end to end."""
    packed: bool

    @property
    def activated(self) -> bool:
        """Whether g is the decay, beta the write strength, and q and k of unit length; else they are logits."""
        return len(self.leaves) == 5

    @property
    def gate(self) -> BoundedGate | None:
        return None if self.activated else BoundedGate(A_log=self.leaves[5], dt_bias=self.leaves[6])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        """The same with other leaves and gradient."""
        leaves = tuple(change(x.detach()).requires_grad_() for x in self.leaves)
        return Problem(leaves, change(self.do), self.cu_seqlens, self.packed)

    def activate(self) -> "Problem":
        """The same for those that take what the recurrence reads."""
        q, k, v, z, beta, A_log, dt_bias = (x.detach() for x in self.leaves)
        q, k = (normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        leaves = q, k, v, BoundedGate(A_log, dt_bias)(z), beta.float().sigmoid()
        return Problem(tuple(x.requires_grad_() for x in leaves), self.do, self.cu_seqlens, self.packed)


def gate_logits(shape: tuple[int, ...], regime: str, device: torch.device) -> Tensor:
    """[..., D] for a gate bounded by -5, in float32."""
    first, last = {"fast": (0, 0), "mixed": (-13, 3), "slow": (-8.5, -8.5)}[regime]
    return torch.randn(shape, device=device) + torch.linspace(first, last, shape[-1], device=device)


def make(shape: Shape, regime: str, device: torch.device) -> Problem:
    """Logits in bf16, parameters of the gate in float32; the same at every call."""
    torch.manual_seed(0)
    B, T, H, D = shape.B, shape.T, shape.H, shape.D
    normal = partial(torch.randn, dtype=torch.bfloat16, device=device)
    q, k, v, do = (normal(B, T, H, D) for _ in range(4))
    z = gate_logits((B, T, H, D), regime, device).bfloat16()
    A_log, dt_bias = torch.randn(H, device=device) / 10, torch.randn(H, D, device=device) / 10
    leaves = q, k, v, z, normal(B, T, H), A_log, dt_bias
    ends = torch.tensor((0, *(shape.documents or (T,) * B)), device=device).cumsum(0, dtype=torch.int32)
    return Problem(tuple(x.requires_grad_() for x in leaves), do, ends, bool(shape.documents))


def ours(problem: Problem, backend: str = "auto") -> Tensor:
    """o [B, T, H, D] by this library, of logits or of what the recurrence reads."""
    q, k, v, g, beta = problem.leaves[:5]
    logits = not problem.activated
    o, _ = kda(
        q, k, v, g, beta, cu_seqlens=problem.cu_seqlens if problem.packed else None, backend=backend,
        gate=problem.gate, normalize_qk=logits, beta_logits=logits,
    )  # fmt: skip
    return o


def path(problem: Problem) -> str:
    """The backend that `ours` takes."""
    normalize = not problem.activated
    name, _ = BACKENDS.choice(*problem.leaves[:5], initial_state=None, gate=problem.gate, normalize_qk=normalize)
    return name or "none"


def forward_backward(run: Callable[[Problem], Tensor], problem: Problem) -> tuple[Tensor, ...]:
    """o, and the gradients of the leaves."""
    o = run(problem)
    return o.detach(), *torch.autograd.grad(o, problem.leaves, problem.do)

"""Who takes part: this library, its torch path, flash-linear-attention and cuDNN frontend.

The two peers are called as their users call them.  cuDNN takes activated inputs and so has less to do than the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor

from perilune.bench.kda.problem import Problem, ours


@dataclass(frozen=True)
class Contender:
    label: str
    run: Callable[[Problem], Tensor]
    """o of a problem."""
    activated: bool = False
    """Whether it takes what the recurrence reads, not logits."""
    package: str | None = None
    """Where it comes from, if not from here."""
    graph: bool = False
    """Whether to time it as a CUDA graph too, which leaves out what the host does between launches."""

    @property
    def missing(self) -> str:
        """Why it cannot take part, or nothing."""
        return f"{self.package} is not installed" if self.package and find_spec(self.package) is None else ""


def fla(problem: Problem) -> Tensor:
    from fla.ops.kda import chunk_kda

    q, k, v, z, beta, A_log, dt_bias = problem.leaves
    o, _ = chunk_kda(
        q, k, v, z, beta, A_log=A_log, dt_bias=dt_bias.flatten(), use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0,
        cu_seqlens=problem.cu_seqlens.long() if problem.packed else None,
    )  # fmt: skip
    return o


def cudnn(problem: Problem) -> Tensor:
    op = import_module("cudnn.linear_attention").kimi_delta_attention
    q = problem.leaves[0]
    out = op(*(x.flatten(0, 1) for x in problem.leaves), problem.cu_seqlens)
    return (out[0] if isinstance(out, tuple) else out).view(q.shape)


OURS = Contender("perilune", ours, graph=True)
CONTENDERS = (
    OURS,
    Contender("cuDNN", cudnn, activated=True, package="cudnn"),
    Contender("fla", fla, package="fla"),
    Contender("torch", partial(ours, backend="chunked")),
)

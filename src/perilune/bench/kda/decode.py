"""One decoding step of a layer for many sequences, from its projections on."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from perilune.bench.contest import error
from perilune.bench.kda.problem import REGIMES, gate_logits
from perilune.ops import BoundedGate, KdaPool, KdaWeights, kda_decode

ALLOWED = {"y": 4e-3, "state": 1e-4, "window": 0.0}
"""Of the norm: y is rounded to bf16, the state is float32, the window is copied."""
WIDTH = 4


@dataclass(frozen=True)
class Size:
    """N sequences with a state [D, D] for each of H heads."""

    N: int
    H: int
    D: int = 128

    @property
    def state_bytes(self) -> int:
        """What a step has to move: every state is read and written, in float32."""
        return 2 * 4 * self.N * self.H * self.D**2


@dataclass(frozen=True, eq=False)
class Step:
    """The arguments of `kda_decode`, a token a sequence."""

    inputs: tuple[Tensor, ...]
    """qkv: [N, 1, 3*H*D], z: [N, 1, H, D], beta: [N, 1, H], out_gate: [N, 1, H, D]."""
    pool: KdaPool
    slots: Tensor
    weights: KdaWeights

    def __call__(self, backend: str = "auto") -> Tensor:
        """y [N, 1, H, D]; the pool is written to."""
        qkv, z, beta, out_gate = self.inputs
        return kda_decode(qkv, z, beta, out_gate, self.pool, self.slots, self.weights, backend=backend)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Step":
        """The same with other inputs and a pool of its own."""
        pool = KdaPool(*(change(getattr(self.pool, field.name)) for field in fields(KdaPool)))
        return Step(tuple(map(change, self.inputs)), pool, self.slots, self.weights)


def make(size: Size, regime: str, device: torch.device) -> Step:
    """bf16 inputs, filled states in float32, slots in no order; the same at every call."""
    torch.manual_seed(0)
    N, H, D = size.N, size.H, size.D
    shapes = (N, 1, 3 * H * D), (N, 1, H, D), (N, 1, H), (N, 1, H, D)
    qkv, z, beta, out_gate = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    z = gate_logits(tuple(z.shape), regime, device).bfloat16()
    pool = KdaPool.zeros(N, H, D, D, width=WIDTH, dtype=torch.bfloat16, device=device)
    pool.state.normal_()
    pool.window.normal_()
    weights = KdaWeights(
        torch.randn(3 * H * D, WIDTH, device=device) / 2,
        BoundedGate(torch.randn(H, device=device) / 10, torch.randn(H, D, device=device) / 10),
        torch.randn(D, device=device),
    )
    return Step((qkv, z, beta, out_gate), pool, torch.randperm(N, device=device), weights)


def check(device: torch.device, size: Size = Size(5, 4)) -> str:
    """What is wrong against the plain form in float64, or nothing."""
    for regime in REGIMES:
        step = make(size, regime, device)
        exact = step.map(torch.Tensor.double)
        expected = {"y": exact("reference"), "state": exact.pool.state, "window": exact.pool.window}
        got = {"y": step(), "state": step.pool.state, "window": step.pool.window}
        for name, allowed in ALLOWED.items():
            if (off := error(got[name], expected[name])) > allowed:
                return f"decoding: {name} is off by {off:.1e} of its size, allowed {allowed:.1e} ({regime} gates)"
    return ""

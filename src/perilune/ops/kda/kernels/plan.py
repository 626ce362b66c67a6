"""What the kernels are told besides their tensors: settled once a call."""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from perilune.ops.kda.gate import BoundedGate, Gate
from perilune.ops.kda.kernels.blocks import TILE
from perilune.ops.kda.kernels.gate import BOUNDED, LOG2E, NONE, SOFTPLUS

REACH = 84.0  # a tile's natural log decay; exp(87.3) is where float32 ends


@dataclass(frozen=True)
class Plan:
    scale: float
    gate: int
    g_min: float
    normalize: bool
    beta_logits: bool
    wide: bool  # float32 inputs
    hopper: bool  # the kernels written for its tensor cores

    @classmethod
    def of(cls, q: Tensor, scale: float, gate: Gate | None, normalize: bool, beta_logits: bool, hopper: bool) -> "Plan":
        kind = NONE if gate is None else BOUNDED if isinstance(gate, BoundedGate) else SOFTPLUS
        g_min = gate.g_min if isinstance(gate, BoundedGate) else 0.0
        return cls(scale, kind, g_min, normalize, beta_logits, q.dtype == torch.float32, hopper)

    @property
    def chunk(self) -> int:
        """Rows of a chunk.  float32 halves it, for shared memory's sake."""
        return 32 if self.wide else 64

    @property
    def dtype(self) -> torch.dtype:
        """Of what goes through memory from kernel to kernel."""
        return torch.float32 if self.wide else torch.bfloat16

    @property
    def bounded(self) -> bool:
        return self.gate == BOUNDED and -self.g_min * TILE.value <= REACH

    @property
    def smallest(self) -> int:
        """The smallest halves to join: within tiles, where the decay is bounded, none."""
        return TILE.value if self.bounded else 1

    @property
    def middle(self) -> float:
        """Half the worst decay of a tile, in log2."""
        return -0.5 * TILE.value * self.g_min * LOG2E.value

    @property
    def terms(self) -> int:
        """Of bfloat16 that logarithms are split into to be summed; 0: none.  Unbounded ones need one more."""
        return 0 if self.wide else 2 if self.bounded else 3

    @property
    def half(self) -> tl.dtype:
        """Of products within +-1: keys need to be normalized for that."""
        return tl.float16 if self.normalize and not self.wide else tl.float32

    @property
    def half_grad(self) -> tl.dtype:
        """Of products with gradients, which may have any size."""
        return tl.float32 if self.wide else tl.bfloat16

    @property
    def precision(self) -> str:
        """Of products of float32."""
        return "tf32x3" if self.wide else "tf32"

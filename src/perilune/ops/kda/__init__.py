"""Kimi Delta Attention."""

from perilune.ops.kda.api import kda, kda_step
from perilune.ops.kda.context_parallel import kda_context_parallel
from perilune.ops.kda.decode import KdaPool, KdaWeights, kda_accept, kda_decode
from perilune.ops.kda.gate import BoundedGate, SoftplusGate

__all__ = [
    "BoundedGate",
    "KdaPool",
    "KdaWeights",
    "SoftplusGate",
    "kda",
    "kda_accept",
    "kda_context_parallel",
    "kda_decode",
    "kda_step",
]

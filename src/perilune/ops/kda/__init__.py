"""Kimi Delta Attention."""

from perilune.ops.kda.api import kda, kda_step
from perilune.ops.kda.gate import BoundedGate, SoftplusGate

__all__ = ["BoundedGate", "SoftplusGate", "kda", "kda_step"]

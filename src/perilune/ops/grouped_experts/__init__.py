"""Mixture-of-experts compute: every token through its chosen gated MLPs, summed with its routing weights."""

from perilune.ops.grouped_experts.api import grouped_experts

__all__ = ["grouped_experts"]

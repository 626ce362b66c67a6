"""Several linear maps of one input."""

from perilune.ops.projections.api import projections

__all__ = ["projections"]

"""Several linear maps of one input."""

from perilune.ops.projections.api import projections
from perilune.ops.projections.copies import cast_once

__all__ = ["cast_once", "projections"]

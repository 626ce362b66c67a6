"""Head and next-token loss in one."""

from perilune.ops.cross_entropy.api import IGNORED, linear_cross_entropy

__all__ = ["IGNORED", "linear_cross_entropy"]

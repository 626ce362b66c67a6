"""A linear layer whose result is as good as float32, of bfloat16 inputs."""

from perilune.ops.wide_linear.api import wide_linear

__all__ = ["wide_linear"]

"""The short causal convolution in front of a recurrence: one small filter for each channel."""

from perilune.ops.short_conv.api import short_conv

__all__ = ["short_conv"]

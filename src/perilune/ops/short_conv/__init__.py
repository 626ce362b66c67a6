"""The short causal convolution in front of a recurrence: one small filter for each channel."""

from perilune.ops.short_conv.api import short_conv
from perilune.ops.short_conv.context_parallel import short_conv_context_parallel

__all__ = ["short_conv", "short_conv_context_parallel"]

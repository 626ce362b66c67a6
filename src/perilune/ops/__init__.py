"""Pure functions on tensors, one folder an operation: a plain reference beside the fast path and the test that ties them."""

from perilune.ops.attn_res import attn_res, attn_res_bank, attn_res_merge
from perilune.ops.grouped_experts import grouped_experts
from perilune.ops.kda import BoundedGate, SoftplusGate, kda, kda_step
from perilune.ops.quantile_bias import quantile_bias
from perilune.ops.short_conv import short_conv
from perilune.ops.situ_glu import situ_glu, swiglu

__all__ = [
    "BoundedGate",
    "SoftplusGate",
    "attn_res",
    "attn_res_bank",
    "attn_res_merge",
    "grouped_experts",
    "kda",
    "kda_step",
    "quantile_bias",
    "short_conv",
    "situ_glu",
    "swiglu",
]

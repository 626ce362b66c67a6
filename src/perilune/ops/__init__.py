"""Pure functions on tensors, a folder each: a plain reference, the fast path, and the public call."""

from perilune.ops.attn_res import (
    Stored,
    attn_res,
    attn_res_advance,
    attn_res_bank,
    attn_res_merge,
    project_source,
    share_gradient,
    store_source,
)
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.grouped_experts import grouped_experts
from perilune.ops.kda import (
    BoundedGate,
    KdaPool,
    KdaWeights,
    SoftplusGate,
    kda,
    kda_accept,
    kda_context_parallel,
    kda_decode,
    kda_step,
)
from perilune.ops.projections import cast_once, projections
from perilune.ops.quantile_bias import quantile_bias
from perilune.ops.rms_norm import gated_rms_norm, rms_norm
from perilune.ops.short_conv import short_conv, short_conv_context_parallel
from perilune.ops.situ_glu import sigmoid_glu, situ_glu, swiglu
from perilune.ops.wide_linear import wide_linear

__all__ = [
    "BoundedGate",
    "KdaPool",
    "KdaWeights",
    "SoftplusGate",
    "Stored",
    "attn_res",
    "attn_res_advance",
    "attn_res_bank",
    "attn_res_merge",
    "cast_once",
    "gated_rms_norm",
    "grouped_experts",
    "kda",
    "kda_accept",
    "kda_context_parallel",
    "kda_decode",
    "kda_step",
    "linear_cross_entropy",
    "project_source",
    "projections",
    "quantile_bias",
    "rms_norm",
    "share_gradient",
    "short_conv",
    "short_conv_context_parallel",
    "sigmoid_glu",
    "situ_glu",
    "store_source",
    "swiglu",
    "wide_linear",
]

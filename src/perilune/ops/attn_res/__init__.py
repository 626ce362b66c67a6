"""Attention residuals: each sublayer reads a learned, per-token mixture of what earlier layers left behind."""

from perilune.ops.attn_res.api import attn_res
from perilune.ops.attn_res.shared import share_gradient
from perilune.ops.attn_res.stored import Stored, project_source, store_source
from perilune.ops.attn_res.two_phase import Partial, attn_res_advance, attn_res_bank, attn_res_merge

__all__ = [
    "Partial",
    "Stored",
    "attn_res",
    "attn_res_advance",
    "attn_res_bank",
    "attn_res_merge",
    "project_source",
    "share_gradient",
    "store_source",
]

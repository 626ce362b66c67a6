"""Root-mean-square normalisation, and the gated form that closes a KDA layer."""

from perilune.ops.rms_norm.api import gated_rms_norm, rms_norm

__all__ = ["gated_rms_norm", "rms_norm"]

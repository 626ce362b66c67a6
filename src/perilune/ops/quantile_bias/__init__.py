"""Quantile Balancing: the selection bias that gives every expert the same load, without a step size."""

from perilune.ops.quantile_bias.api import quantile_bias, score_histogram
from perilune.ops.quantile_bias.groups import Groups, limiting
from perilune.ops.quantile_bias.histogram import bias_from_histogram, rebin

__all__ = ["Groups", "bias_from_histogram", "limiting", "quantile_bias", "rebin", "score_histogram"]

"""Attention residuals in bf16; only on a GPU, see `bench.attn_res`."""

from perilune.bench.attn_res import Comparison

CASE = Comparison()

"""The short convolution in bf16; only on a GPU, see `bench.short_conv`."""

from perilune.bench.short_conv import Comparison

CASE = Comparison()

"""The routed experts in bf16; only on a GPU, see `bench.experts`."""

from perilune.bench.experts import Comparison

CASE = Comparison()

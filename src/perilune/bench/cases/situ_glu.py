"""Gated units in bf16; only on a GPU, see `bench.rows`."""

from perilune.bench.rows import Comparison, Operation, Shape
from perilune.ops.situ_glu.api import SIGMOID, SITU, SWIGLU

CASE = Comparison(
    name="situ_glu",
    title="gated units, bf16",
    operations={
        "situ": Operation(SITU, (4.0, 25.0), "rr", "chunked"),
        "swiglu": Operation(SWIGLU, (), "rr", "chunked"),
        "sigmoid": Operation(SIGMOID, (), "rr", "chunked"),
    },
    shapes=(
        Shape("situ", 32_768, 2816),
        Shape("situ", 32_768, 320),
        Shape("swiglu", 32_768, 2816),
        Shape("sigmoid", 32_768, 1024),
    ),
    checked=(Shape("situ", 300, 2816), Shape("swiglu", 77, 320), Shape("sigmoid", 100, 1000)),
)

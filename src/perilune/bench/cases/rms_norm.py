"""Norms in bf16, plain and per head behind a gate; only on a GPU, see `bench.rows`."""

import torch

from perilune.bench.rows import Comparison, Operation, Shape
from perilune.ops.rms_norm.api import GATED, NORM

EPS = 1e-5

CASE = Comparison(
    name="rms_norm",
    title="norms, bf16",
    operations={
        "norm": Operation(NORM, (EPS, torch.bfloat16), "rv", "reference"),
        "gated": Operation(GATED, (EPS,), "rvr", "reference"),
    },
    shapes=(
        Shape("norm", 32_768, 1024),
        Shape("norm", 32_768, 320),
        Shape("norm", 8192, 7168),
        Shape("gated", 262_144, 128),
    ),
    checked=(Shape("norm", 300, 1024), Shape("norm", 77, 320), Shape("norm", 20, 7168), Shape("gated", 1000, 128)),
)

"""Whole training steps, see `bench.training`."""

from perilune.bench.training import Training

CASE = Training()

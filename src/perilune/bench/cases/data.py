"""Reading text, see `bench.reading`."""

from perilune.bench.reading import Reading

CASE = Reading()

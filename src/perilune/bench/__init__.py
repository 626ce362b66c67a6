"""Benchmarks: `perilune bench [NAME...]`.  A file in `cases` is a benchmark; there is no list to keep."""

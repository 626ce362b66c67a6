"""`python -m perilune VERB ...`, which is also how `torchrun -m perilune train ...` starts every rank."""

from perilune.cli.main import entry

entry()

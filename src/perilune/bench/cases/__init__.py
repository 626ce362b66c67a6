"""One file a benchmark, holding one `CASE`."""

import pkgutil
from importlib import import_module

from perilune.bench.case import Case, Sheet


def find() -> dict[str, Case | Sheet]:
    """Every case of this package by name."""
    cases = (import_module(f"{__name__}.{module.name}").CASE for module in pkgutil.iter_modules(__path__))
    return {case.name: case for case in cases}

"""Errors for people.

A user's mistake raises a subclass of `PeriluneError` whose text is one line, `what: expected X, got Y; do Z`; the
command line prints that line and exits with 2.  Our own bugs raise `AssertionError`.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PeriluneError(Exception):
    """The base of every error that a user can cause and mend."""


class ConfigError(PeriluneError, ValueError):
    """A configuration that cannot be built."""


class ShapeError(PeriluneError, ValueError):
    """A tensor whose shape, dtype or content does not fit the call."""


class BackendError(PeriluneError, ValueError):
    """A backend that does not exist or cannot serve the call."""


class DataError(PeriluneError, ValueError):
    """Data that cannot be read."""


class CheckpointError(PeriluneError, ValueError):
    """A checkpoint that is missing, broken or of another model."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: `do you mean 'x'?`, or the list of what there is."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1)
    return f"do you mean {close[0]!r}?" if close else f"there are {', '.join(known) or 'none'}"

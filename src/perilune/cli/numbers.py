"""Numbers on the command line: read from it, checked, and shown."""

from argparse import ArgumentTypeError
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of an option that takes whole numbers from `least` up."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value < 2**63:
            raise ArgumentTypeError(f"expected a whole number from {least} up, got {text!r}")
        return value

    return whole


def human(n: float) -> str:
    """Three digits and a letter: 2.78T."""
    for unit in ("", "K", "M", "B", "T"):
        if n < 999.5 or unit == "T":
            return f"{n:.3g}{unit}" if n < 99.95 else f"{n:.4g}{unit}"
        n /= 1000
    raise AssertionError

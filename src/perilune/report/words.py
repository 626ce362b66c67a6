"""Numbers as people read them."""

import math

UNITS = ("", "K", "M", "B", "T")


def human(n: float) -> str:
    """Three digits and a letter: 2.35M."""
    if not math.isfinite(n):
        return "unknown"
    for unit in UNITS:
        if abs(n) < 999.5 or unit == UNITS[-1]:
            return f"{n:.3g}{unit}" if abs(n) < 99.95 else f"{n:.0f}{unit}"
        n /= 1000
    raise AssertionError


def figure(x: float) -> str:
    """Three digits, without an exponent where that can be read."""
    return human(x) if abs(x) >= 999.5 else f"{x:.3g}"


def length(tokens: int) -> str:
    """A context as it is spoken of: 2048 is 2K, 1500 is 1,500."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"


def duration(seconds: float) -> str:
    """Two units: 3 h 05 min."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def percent(share: float) -> str:
    """0.634 is 63%; small shares keep a digit."""
    if not math.isfinite(share):
        return "unknown"
    return f"{100 * share:.1f}%" if 0 < abs(share) < 0.0995 else f"{100 * share:.0f}%"


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def sublayer(name: str) -> str:
    """`0.feed_forward` is `0 feed-forward`."""
    layer, dot, kind = name.rpartition(".")
    return f"{layer} {kind.replace('_', '-')}" if dot else name.replace("_", "-")


def layer(name: str) -> str:
    """`0` is `layer 0`, `mtp.0` stays."""
    return f"layer {name}" if name.isdecimal() else name

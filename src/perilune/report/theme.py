"""Colours and the frame that all charts share.

Every colour is a name with a light and a dark value.  Charts are built with the light values; the page's script swaps
them where the reader prefers dark.  Lines keep apart for colour-blind readers (after Okabe and Ito), and dashes help.
"""

from typing import Any

COLOURS = {  # name: (light, dark)
    "paper": ("#fbfaf7", "#14171c"),
    "card": ("#ffffff", "#1b1f26"),
    "ink": ("#1d2530", "#e6e8eb"),
    "soft": ("#5d6875", "#9aa5b1"),
    "rule": ("#e5e2da", "#2d333c"),
    "faint": ("#f1efe9", "#232831"),
    "accent": ("#0b6b94", "#56b8e2"),
    "orange": ("#c8590a", "#ff9a4d"),
    "green": ("#0a8562", "#46c79c"),
    "pink": ("#a8518a", "#e296c5"),
    "gold": ("#9a7300", "#dcb84f"),
    "slate": ("#4b5a78", "#a3b3d6"),
    "low": ("#f0f3f3", "#20262e"),  # the heat maps' ends and middle
    "half": ("#7fb6cd", "#245f7b"),
    "full": ("#0a5a7d", "#2a8cba"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
LINES = ("accent", "orange", "green", "pink", "gold", "slate")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
FONT = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

SEQUENTIAL = [[0, LIGHT["low"]], [0.5, LIGHT["half"]], [1, LIGHT["full"]]]
DIVERGING = [[0, LIGHT["orange"]], [0.5, LIGHT["low"]], [1, LIGHT["full"]]]  # around 1: too few, even, too many


def colour(i: int) -> str:
    """The light value of the i-th line's colour."""
    return LIGHT[LINES[i % len(LINES)]]


def axis(**more: Any) -> dict[str, Any]:
    return {
        "gridcolor": LIGHT["rule"],
        "zeroline": False,
        "linecolor": LIGHT["rule"],
        "tickfont": {"color": LIGHT["soft"], "size": 12},
        "title": {"font": {"color": LIGHT["soft"], "size": 12}, "standoff": 8},
        "automargin": True,
        "spikecolor": LIGHT["soft"],
        "spikethickness": 1,
        "spikedash": "dot",
    } | more


def titled(text: str) -> dict[str, Any]:
    """An axis title."""
    return {"text": text, "font": {"color": LIGHT["soft"], "size": 12}, "standoff": 8}


def layout(**more: Any) -> dict[str, Any]:
    """What all charts have in common; `more` replaces."""
    return {
        "font": {"family": FONT, "size": 13, "color": LIGHT["ink"]},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 10, "t": 14, "b": 8},
        "height": 300,
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": LIGHT["card"],
            "bordercolor": LIGHT["rule"],
            "font": {"color": LIGHT["ink"], "size": 12},
            "namelength": -1,
        },
        "xaxis": axis(),
        "yaxis": axis(),
    } | more


def css() -> str:
    """The colours as custom properties, light and dark."""
    sides = ["".join(f"--{name}:{pair[i]};" for name, pair in COLOURS.items()) for i in range(2)]
    return f":root{{{sides[0]}}}\n@media (prefers-color-scheme: dark){{:root{{{sides[1]}}}}}\n"

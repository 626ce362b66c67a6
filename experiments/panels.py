"""Several plots in one plotly figure, in the style of `perilune report`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.report.draw import Figure
from perilune.report.theme import DASHES, LIGHT, LINES, axis, colour, layout

PANEL, GAP = 300, 0.09  # px of a panel's height with its axis; share of the width between two
LEGEND, TITLE, LABELS = 58, 26, 48  # px above all, above a panel's plot, below it
TICKS = 8  # on a log axis, at most, where powers of ten are enough of them


@dataclass(frozen=True)
class Panel:
    title: str
    traces: list[dict[str, Any]]
    xaxis: dict[str, Any] = field(default_factory=dict)
    yaxis: dict[str, Any] = field(default_factory=dict)


def grid(panels: Sequence[Panel], columns: int, height: int = PANEL) -> Figure:
    """Panels side by side, row by row, under one legend."""
    rows = -(-len(panels) // columns)
    total = rows * height  # px that panels share
    width = (1 - GAP * (columns - 1)) / columns
    made: dict[str, Any] = {}
    traces, titles, said = [], [], set()
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        left = column * (width + GAP)
        top, bottom = 1 - (row * height + TITLE) / total, 1 - ((row + 1) * height - LABELS) / total
        suffix = "" if i == 0 else str(i + 1)
        made[f"xaxis{suffix}"] = axis(domain=[left, left + width], anchor=f"y{suffix}") | panel.xaxis
        made[f"yaxis{suffix}"] = axis(domain=[bottom, top], anchor=f"x{suffix}") | panel.yaxis
        titles.append({
            "text": panel.title, "xref": "paper", "yref": "paper", "x": left, "y": top, "xanchor": "left",
            "yanchor": "bottom", "showarrow": False, "yshift": 4, "font": {"size": 13, "color": LIGHT["ink"]},
        })  # fmt: skip
        for trace in panel.traces:
            group = trace.get("legendgroup")
            shown = group is not None and group not in said
            said.add(group)
            traces.append(trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": shown})
    legend = {"orientation": "h", "x": 0, "y": 0.995, "yanchor": "top", "yref": "container", "font": {"size": 12}}
    return {
        "data": traces,
        "layout": layout(
            height=total + LEGEND, showlegend=True, legend=legend, annotations=titles,
            margin={"l": 16, "r": 12, "t": LEGEND, "b": 0}, hovermode="closest", **made,
        ),
    }  # fmt: skip


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """From the least to the largest of those above 0, with plain numbers: 1, 2, 5, 10; every digit if those are not
    even two, powers of ten if they are many."""
    known = [value for value in values if value and value > 0]
    if not known:
        return {}
    low, high = math.log10(min(known)) - 0.05, math.log10(max(known)) + 0.05
    powers = range(math.floor(low), math.ceil(high) + 1)

    def within(digits: Iterable[int]) -> list[float]:
        return [m * 10.0**p for p in powers for m in digits if low <= math.log10(m * 10.0**p) <= high]

    ticks = within((1, 2, 5))
    if len(ticks) < 2 or len(ticks) > TICKS:
        ticks = within(range(1, 10) if len(ticks) < 2 else (1,))
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks], "range": [low, high]}


def rgb(code: str) -> tuple[int, int, int]:
    """`#0b6b94` as numbers from 0 to 255."""
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)


def styled(i: int) -> tuple[str, dict[str, Any]]:
    """Colour and dash of the i-th curve; beyond six both differ from every other."""
    return colour(i), {"dash": DASHES[i % len(DASHES)] if i < len(LINES) else DASHES[(i + 2) % len(DASHES)]}

"""Several plots in one plotly figure, in the style of `perilune report`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.report.draw import Figure
from perilune.report.theme import DASHES, LIGHT, LINES, axis, colour, layout

PANEL, GAP = 300, 0.09  # px of a panel's height with its axis; share of the width between two
LEGEND, TITLE, LABELS = 58, 26, 48  # px above all, above a panel's plot, below it


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


def styled(i: int) -> tuple[str, dict[str, Any]]:
    """Colour and dash of the i-th curve; beyond six both differ from every other."""
    return colour(i), {"dash": DASHES[i % len(DASHES)] if i < len(LINES) else DASHES[(i + 2) % len(DASHES)]}

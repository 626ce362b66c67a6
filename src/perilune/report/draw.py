"""What charts are made of: curves, reference lines, axes, stage marks.  Plotly figures as plain dicts.

A curve of many thousand steps keeps the extremes of each stretch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perilune.report import measures, words
from perilune.report.read import Bucket, Column, Steps
from perilune.report.theme import LIGHT, axis, colour, layout, titled

Figure = dict[str, Any]
MOST_POINTS = 1600  # a curve shows
PHONE, DESKTOP = 300, 960  # px that they leave for a plot: stage names are laid out so that they fit
NAME_ROW = 16  # px
ROW = 22  # px of a heat map's row
MOST_LABELS = 24
LOSS_TICKS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class Key:
    """An entry of a chart's legend: it shows or hides the traces whose `legendgroup` is its label."""

    label: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True)
class Chart:
    """A figure with its title; several, by label, where a reader may choose (such as the stage)."""

    id: str
    title: str
    figures: dict[str, Figure]
    keys: list[Key] = field(default_factory=list)
    note: str = ""
    wide: bool = False
    """Takes the whole width of the page."""
    chosen: int = 0
    """Which of the figures is shown first."""


def single(id: str, title: str, figure: Figure, keys: Iterable[Key] = (), note: str = "", wide: bool = False) -> Chart:
    return Chart(id, title, {"": figure}, list(keys), note, wide)


def short(text: str, most: int = 48) -> str:
    """Text from a file on one line, cut where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def plain(text: str, most: int = 48) -> str:
    """Short text as plotly shows it literally: it reads tags and entities otherwise."""
    return short(text, most).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def thinned(values: Column) -> list[int]:
    """The indices to draw: all, or the least and the greatest of every stretch, and both ends."""
    n = len(values)
    if n <= MOST_POINTS:
        return list(range(n))
    chosen = {0, n - 1}
    for part in np.array_split(np.arange(n), MOST_POINTS // 2):
        inside = part[np.isfinite(values[part])]
        chosen |= (
            {int(inside[values[inside].argmin()]), int(inside[values[inside].argmax()])}
            if len(inside)
            else {int(part[0])}
        )
    return sorted(chosen)


def evenly(n: int) -> list[int]:
    """The indices to draw of n values that are smooth: all, or as many evenly apart, and both ends."""
    return sorted({*range(0, n, -(-n // MOST_POINTS)), n - 1}) if n else []


def numbers(values: Iterable[float]) -> list[float | None]:
    """For JSON: what is not finite is a gap."""
    return [float(v) if math.isfinite(v) else None for v in values]


def line(x: Iterable[Any], y: Iterable[float], name: str, stroke: str, **more: Any) -> dict[str, Any]:
    """A curve; the key labelled `name` shows and hides it."""
    shape = {"color": stroke, "width": 2} | more.pop("line", {})
    return {
        "type": "scatter", "mode": "lines", "x": list(x), "y": numbers(y), "name": plain(name), "legendgroup": name,
        "line": shape,
    } | more  # fmt: skip


def level(y: float, text: str, stroke: str = LIGHT["soft"], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A horizontal reference line over the whole plot, and its label."""
    shape = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": y, "y1": y,
        "line": {"color": stroke, "width": 1.2, "dash": "dash"},
    }  # fmt: skip
    label = {
        "xref": "paper", "x": 1, "xanchor": "right", "yref": "y", "y": y, "yanchor": "bottom", "showarrow": False,
        "text": text, "font": {"size": 11, "color": stroke}, "bgcolor": LIGHT["card"], "borderpad": 0, "yshift": 2,
    } | more  # fmt: skip
    return shape, label


def upright(x: float, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A vertical reference line and its label above the plot; `x` in the axis' own units."""
    shape = {
        "type": "line", "xref": "x", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1,
        "line": {"color": LIGHT["soft"], "width": 1.2, "dash": "dash"},
    }  # fmt: skip
    label = {
        "xref": "x", "x": math.log10(x), "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False,
        "text": text, "font": {"size": 11, "color": LIGHT["soft"]},
    }  # fmt: skip
    return shape, label


def token_axis(steps: Steps) -> dict[str, Any]:
    return axis(title=titled("tokens trained on"), range=[0, float(steps.tokens[-1])], hoverformat=",.4s", nticks=7)


def over_time(
    steps: Steps,
    traces: list[dict[str, Any]],
    names: bool = False,
    borders: bool = True,
    yaxis: dict[str, Any] | None = None,
    **more: Any,
) -> Figure:
    """A chart over tokens, with the stages' borders and, above it, their names."""
    labels, rows = stage_names(steps) if names else ([], 0)
    shapes, annotations = more.pop("shapes", []), more.pop("annotations", [])
    return {
        "data": traces,
        "layout": layout(
            xaxis=token_axis(steps),
            yaxis=axis() | (yaxis or {}),
            shapes=(stage_borders(steps) if borders else []) + shapes,
            annotations=labels + annotations,
            margin={"l": 8, "r": 12, "t": 14 + NAME_ROW * rows, "b": 8},
            **more,
        ),
    }


def stage_starts(steps: Steps) -> list[float]:
    """The tokens at which stages begin."""
    return [0.0 if i == 0 else float(steps.tokens[i - 1]) for i in steps.borders]


def stage_borders(steps: Steps) -> list[dict[str, Any]]:
    return [
        {
            "type": "line", "xref": "x", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
            "line": {"color": LIGHT["soft"], "width": 1, "dash": "dot"},
        }
        for x in stage_starts(steps)[1:]
    ]  # fmt: skip


def stage_names(steps: Steps) -> tuple[list[dict[str, Any]], int]:
    """Labels above the plot in as many rows as keep them apart on a phone, and how many rows.

    `name` is the label's row on a wide screen, where the page's script puts it.
    """
    texts = [plain(steps.stage[i], 18) for i in steps.borders]
    widths = [7 * min(len(steps.stage[i]), 18) + 8 for i in steps.borders]
    places = [x / (float(steps.tokens[-1]) or 1.0) for x in stage_starts(steps)]
    narrow, broad = rows_apart(places, widths, PHONE), rows_apart(places, widths, DESKTOP)
    labels = []
    for text, width, place, row, wide_row in zip(texts, widths, places, narrow, broad):
        at_end = place * PHONE + width > PHONE  # it would be cut at the right border
        labels.append(
            {
                "xref": "paper", "x": 1 if at_end else place, "xanchor": "right" if at_end else "left",
                "yref": "paper", "y": 1, "yanchor": "bottom", "yshift": NAME_ROW * row, "name": f"row {wide_row}",
                "showarrow": False, "text": text, "font": {"size": 11, "color": LIGHT["soft"]},
            }
        )  # fmt: skip
    return labels, max(narrow, default=-1) + 1


def rows_apart(places: list[float], widths: list[int], plot: int) -> list[int]:
    """The row of each label so that none covers another; `places` are shares of a plot that is so many px wide."""
    taken: list[float] = []  # up to where each row is full
    rows = []
    for place, width in zip(places, widths):
        left = min(place * plot, plot - width)
        row = next((r for r, end in enumerate(taken) if end <= left), len(taken))
        taken[row : row + 1] = [left + width]
        rows.append(row)
    return rows


def depth_axis(names: list[str]) -> dict[str, Any]:
    """Sublayers or layers from the top down, as many named as fit."""
    every = -(-len(names) // MOST_LABELS)
    shown = list(range(0, len(names), every))
    return axis(
        autorange="reversed", tickmode="array", tickvals=shown, ticktext=[names[i] for i in shown], showgrid=False,
        range=[len(names) - 0.5, -0.5],
    ) | {"autorange": False}  # fmt: skip


def depth_height(rows: int, around: int) -> int:
    return around + max(90, min(rows * ROW, 640))


def rounded(rows: Iterable[Iterable[float]]) -> list[list[float | None]]:
    """A heat map's cells: four digits are more than an eye sees."""
    return [[float(f"{v:.4g}") if math.isfinite(v) else None for v in row] for row in rows]


def loss_axis(values: Column) -> dict[str, Any]:
    """Logarithmic, so that the long end gets the room; ticks at plain numbers."""
    least, most = float(values.min()), float(values.max())
    if least <= 0.05 or most < 2 * least:  # the logarithm would stretch what is nothing, or change little
        return {"hoverformat": ".4f"}
    ticks = [t for t in LOSS_TICKS if 0.9 * least <= t <= 1.1 * most]
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{t:g}" for t in ticks],
        "hoverformat": ".4f",
    }


def raw_and_smooth(steps: Steps, values: Column) -> list[dict[str, Any]]:
    """A column of the metrics over tokens, faint, and how it runs without the noise."""
    kept = thinned(values)
    x = steps.tokens[kept].tolist()
    smooth = measures.smoothed(values, steps.parts)
    return [
        line(x, values[kept], "each step", colour(0), line={"width": 1}, opacity=0.28),
        line(x, smooth[kept], "smoothed", colour(0), line={"width": 2.4}),
    ]


def colourbar(values: list[float], labels: list[str]) -> dict[str, Any]:
    """Below the plot, where a phone has room."""
    return {
        "orientation": "h", "thickness": 9, "len": 0.8, "y": 0, "yref": "container", "yanchor": "bottom",
        "tickvals": values, "ticktext": labels, "tickfont": {"size": 11, "color": LIGHT["soft"]}, "outlinewidth": 0,
    }  # fmt: skip


def spread(i: int, n: int) -> float:
    """Where the i-th of n stands beside its layer's place."""
    return 0.0 if n < 2 else 0.7 * (i / (n - 1) - 0.5)


def decades(least: float, most: float) -> dict[str, Any]:
    """Ticks of a log axis at powers of ten, written out."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    every = -(-(high - low + 1) // 8)
    powers = range(low, high + 1, every)
    return {
        "tickvals": [10.0**p for p in powers],
        "ticktext": [f"{10.0**p:g}" if p < 3 else words.human(10.0**p) for p in powers],
    }


def size_axis(values: Iterable[float]) -> dict[str, Any]:
    """Of root mean squares: logarithmic where they span more than an eye can."""
    known = [v for v in values if math.isfinite(v)]
    wide = len(known) > 0 and min(known) > 0 and max(known) > 30 * min(known)
    return axis(title=titled("root mean square"), **({"type": "log", "nticks": 6} if wide else {"rangemode": "tozero"}))


def length_axis(lengths: Iterable[int]) -> dict[str, Any]:
    """Lengths of text in doublings."""
    values = sorted(set(lengths))
    room = 0.06 * max(1.0, math.log10(values[-1] / values[0]))
    return axis(
        type="log", tickmode="array", tickvals=values, ticktext=[words.length(v) for v in values],
        title=titled("length of the text, tokens"),
        range=[math.log10(values[0]) - room, math.log10(values[-1]) + room],
    )  # fmt: skip


def place(bucket: Bucket) -> float:
    """Where a bucket of positions stands on a log axis."""
    return math.sqrt(max(1, bucket.start) * max(1, bucket.stop))


def position_axis(least: int, most: int) -> dict[str, Any]:
    ticks = [4**k for k in range(12) if least <= 4**k <= most]
    return axis(
        type="log", title=titled("position in the text, tokens"), tickmode="array", tickvals=ticks,
        ticktext=[words.length(t) for t in ticks], hoverformat=",.0f",
    )  # fmt: skip

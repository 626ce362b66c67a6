"""The charts of one run, built from what its files say; None where they say nothing.

A figure holds the numbers of the files, so that what a page shows can be checked against them.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from perilune.report import measures, words
from perilune.report.draw import (
    MOST_LABELS,
    MOST_POINTS,
    Chart,
    Figure,
    Key,
    colourbar,
    decades,
    depth_axis,
    depth_height,
    evenly,
    length_axis,
    level,
    line,
    loss_axis,
    numbers,
    over_time,
    place,
    plain,
    position_axis,
    raw_and_smooth,
    rounded,
    short,
    single,
    size_axis,
    spread,
    thinned,
    upright,
)
from perilune.report.read import Column, Length, RunFiles, Snapshot
from perilune.report.theme import DASHES, DIVERGING, LIGHT, SEQUENTIAL, axis, colour, layout, titled


def by_stage(
    run: RunFiles,
    id: str,
    title: str,
    draw: Callable[[Snapshot], Figure | None],
    keys: Iterable[Key] = (),
    note: str = "",
    wide: bool = True,
) -> Chart | None:
    """One figure for each snapshot; the last is shown first."""
    figures: dict[str, Figure] = {}
    for snapshot in run.snapshots:
        figure = draw(snapshot)
        label = short(snapshot.stage)
        label = label if label not in figures else f"{label}, step {snapshot.step:,}"
        if figure is not None:
            figures[label] = figure
    return Chart(id, title, figures, list(keys), note, wide, len(figures) - 1) if figures else None


# learning


def loss(run: RunFiles) -> Chart | None:
    steps = run.steps
    if steps is None or not len(measures.known(steps.next_token)):
        return None
    blue, kept = colour(0), evenly(len(steps))
    traces = raw_and_smooth(steps, steps.next_token)
    keys = [Key("smoothed", blue), Key("each step", blue, "faint")]
    others = {"one token further (MTP)": (steps.mtp, colour(1), "dash"), "answers": (steps.answers, colour(2), "dot")}
    for name, (values, paint, dash) in others.items():
        smooth = measures.smoothed(values, steps.parts)[kept]
        there = np.isfinite(smooth)  # answers are not in every step
        if there.any():
            traces.append(line(steps.tokens[kept][there].tolist(), smooth[there], name, paint, line={"dash": dash}))
            keys.append(Key(name, paint, dash))
    broken = [i for i in range(len(steps)) if not math.isfinite(steps.next_token[i])][:MOST_POINTS]
    if broken:
        floor, pink = float(np.min(measures.known(steps.next_token))), LIGHT["pink"]
        crosses = {"symbol": "x", "size": 8, "color": pink}
        x = steps.tokens[broken].tolist()
        traces.append(line(x, [floor] * len(x), "not a number", pink, mode="markers", marker=crosses))
        keys.append(Key("not a number", LIGHT["pink"], "dot"))
    figure = over_time(
        steps,
        traces,
        names=True,
        height=380,
        yaxis=loss_axis(np.concatenate([measures.known(x) for x in (steps.next_token, steps.mtp, steps.answers)])),
    )
    return single("loss", "Training loss, nats a token", figure, keys, wide=True)


def learning_rate(run: RunFiles) -> Chart | None:
    return column(run, "lr", "learning-rate", "Learning rate", ".3g")


def grad_norm(run: RunFiles) -> Chart | None:
    if run.steps is None:
        return None
    values = measures.known(run.steps.grad_norm)
    wide = len(values) > 0 and 0 < 30 * float(values.min()) < float(values.max())
    yaxis = {"type": "log", "nticks": 6} if wide else {"rangemode": "tozero"}
    return column(run, "grad_norm", "grad-norm", "Gradient norm", ".3g", yaxis, smooth=True)


def column(
    run: RunFiles,
    name: str,
    id: str,
    title: str,
    digits: str,
    yaxis: dict[str, Any] | None = None,
    smooth: bool = False,
) -> Chart | None:
    """One column of the metrics over tokens."""
    if run.steps is None or not len(measures.known(getattr(run.steps, name))):
        return None
    values: Column = getattr(run.steps, name)
    kept = thinned(values)
    plot = line(run.steps.tokens[kept].tolist(), values[kept], title, colour(0))
    traces = raw_and_smooth(run.steps, values) if smooth else [plot]
    return single(id, title, over_time(run.steps, traces, yaxis={"hoverformat": digits} | (yaxis or {}), height=240))


# judged on held-out text


def bits_bars(run: RunFiles) -> Chart | None:
    bits = run.result.bits_per_byte if run.result else {}
    ranked = sorted(((v, n) for n, v in bits.items() if math.isfinite(v)), reverse=True)
    if not ranked:
        return None
    names = ["this model" if name == measures.OURS else plain(name) for _, name in ranked]
    bars = {
        "type": "bar", "orientation": "h", "x": [value for value, _ in ranked], "y": names,
        "marker": {"color": [LIGHT["accent"] if name == measures.OURS else LIGHT["rule"] for _, name in ranked]},
        "text": [f"{value:.3f}" for value, _ in ranked], "textposition": "outside", "cliponaxis": False,
        "hoverinfo": "skip",
    }  # fmt: skip
    figure = {
        "data": [bars],
        "layout": layout(
            height=60 + 44 * len(ranked),
            xaxis=axis(rangemode="tozero", range=[0, 1.3 * ranked[0][0]], showgrid=False, showticklabels=False),
            yaxis=axis(tickfont={"size": 13, "color": LIGHT["ink"]}, showgrid=False),
            bargap=0.35,
        ),
    }
    return single("bits", "Bits per byte of held-out text; shorter is better", figure)


def bits_by_stage(run: RunFiles) -> Chart | None:
    known = [s for s in run.snapshots if s.bits_per_byte is not None and math.isfinite(s.bits_per_byte)]
    if not known:
        return None
    x = list(range(len(known)))
    y = [s.bits_per_byte or 0.0 for s in known]
    trace = line(
        x, y, "this model", colour(0), mode="lines+markers", marker={"size": 9, "color": colour(0)}, hoverinfo="skip"
    )
    values: list[dict[str, Any]] = [
        {
            "x": place, "y": value, "text": f"{value:.3f}", "showarrow": False, "yshift": 18, "font": {"size": 13},
            "bgcolor": LIGHT["card"], "borderpad": 1,
        }
        for place, value in zip(x, y)
    ]  # fmt: skip
    others = run.result.bits_per_byte if run.result else {}
    best, name = min(((v, n) for n, v in others.items() if n != measures.OURS), default=(math.nan, ""))
    near = 0.75 * min(y) < best < 1.25 * max(y)
    shapes, labels = zip(level(best, plain(name))) if near else ((), ())
    least, most = min([*y, *[best] * near]), max([*y, *[best] * near])
    room = 0.12 * (most - least or 1.0)
    figure = {
        "data": [trace],
        "layout": layout(
            height=60 + 44 * max(4, len(others)),
            xaxis=axis(
                tickmode="array", tickvals=x, ticktext=[plain(s.stage, 14) for s in known], showgrid=False,
                range=[-0.4, len(known) - 0.6],
            ),
            yaxis=axis(range=[least - room, most + 2 * room]),
            shapes=list(shapes),
            annotations=[*labels, *values],
        ),
    }  # fmt: skip
    return single("bits-stages", "At each stage's end, on a fixed part of that text", figure)


# experts


def gini(run: RunFiles) -> Chart | None:
    if run.steps is None or not len(measures.known(run.steps.gini)):
        return None
    traces = raw_and_smooth(run.steps, run.steps.gini)
    shape, label = level(0.1, "0.1", LIGHT["orange"])
    top = max(0.12, float(np.max(measures.known(run.steps.gini))) * 1.08)
    figure = over_time(
        run.steps,
        traces,
        names=True,
        shapes=[shape],
        annotations=[label],
        yaxis={"hoverformat": ".3f", "range": [0, top]},
    )
    return single("gini", "Gini of the experts' load, worst layer; 0 is even", figure, wide=True)


def max_violation(run: RunFiles) -> Chart | None:
    return column(
        run,
        "max_violation",
        "max-violation",
        "Fullest expert: load above the mean, in means",
        ".3f",
        {"rangemode": "tozero"},
        smooth=True,
    )


def dead(run: RunFiles) -> Chart | None:
    yaxis: dict[str, Any] = {"rangemode": "tozero", "tickformat": ".0%"}
    if run.steps is not None and not np.any(measures.known(run.steps.dead) > 0):
        yaxis["range"] = [0, 0.1]
    return column(run, "dead", "dead", "Experts without a token, share of all", ".2%", yaxis)


def expert_load(run: RunFiles) -> Chart | None:
    def draw(snapshot: Snapshot) -> Figure | None:
        layers = snapshot.expert_load
        if not layers:
            return None
        most = max(map(len, layers.values()))
        cells = rounded([*row, *[math.nan] * (most - len(row))] for row in layers.values())
        heat = {
            "type": "heatmap", "z": cells, "zmin": 0, "zmax": 2, "colorscale": DIVERGING,
            "xgap": 0.5 if most <= 128 else 0, "ygap": 2 if len(cells) <= MOST_LABELS else 0,
            "hovertemplate": "%{y}, expert %{x}<br>%{z:.2f} of the mean<extra></extra>",
            "colorbar": colourbar([0, 1, 2], ["no token", "the mean", "twice or more"]),
        }  # fmt: skip
        names = [words.layer(plain(name, 8)) for name in layers]
        return {
            "data": [heat],
            "layout": layout(
                height=depth_height(len(layers) * 2, 120), hovermode="closest", yaxis=depth_axis(names),
                xaxis=axis(title=titled("expert"), showgrid=False),
            ),
        }  # fmt: skip

    return by_stage(run, "expert-load", "Load of every expert at the stage's end", draw)


# depth


def sources(snapshot: Snapshot) -> list[str]:
    """What the columns of a depth-attention map are."""
    blocks = max((len(weights) for _, weights in snapshot.depth_attention), default=0) - 2
    return ["embedding", *(f"block {i + 1}" for i in range(blocks)), "live sum"]


def depth_rows(snapshot: Snapshot) -> list[list[float]]:
    """The map's rows, NaN where a sublayer has no such source; the embedding is first, the live sum last."""
    width = len(sources(snapshot))
    return [
        weights
        if len(weights) == width
        else [*weights[:-1], *[math.nan] * (width - len(weights)), weights[-1]]
        if len(weights) > 1
        else [*weights, *[math.nan] * (width - len(weights))]
        for _, weights in snapshot.depth_attention
    ]


def depth_attention(run: RunFiles) -> Chart | None:
    def draw(snapshot: Snapshot) -> Figure | None:
        if not snapshot.depth_attention:
            return None
        names, columns = [words.sublayer(plain(name, 24)) for name, _ in snapshot.depth_attention], sources(snapshot)
        heat = {
            "type": "heatmap", "z": rounded(depth_rows(snapshot)), "x": list(range(len(columns))), "zmin": 0, "zmax": 1,
            "colorscale": SEQUENTIAL, "xgap": 2, "ygap": 2 if len(names) <= 2 * MOST_LABELS else 0,
            "hoverongaps": False, "showscale": False,
            "text": [[f"{100 * v:.0f}" if math.isfinite(v) else "" for v in row] for row in depth_rows(snapshot)],
            "hovertemplate": "%{z:.3f}<extra></extra>",
        }  # fmt: skip
        if len(columns) <= 10 and len(names) <= MOST_LABELS:
            heat["texttemplate"] = "%{text}"
        return {
            "data": [heat],
            "layout": layout(
                height=depth_height(len(names), 60), hovermode="closest", yaxis=depth_axis(names),
                xaxis=axis(
                    side="top", tickmode="array", showgrid=False, tickvals=list(range(len(columns))),
                    ticktext=columns,
                ),
            ),
        }  # fmt: skip

    note = "Percent of what the sublayer reads. Empty: that source does not exist yet."
    return by_stage(run, "depth-attention", "Where each sublayer reads from", draw, note=note)


def half_life(run: RunFiles) -> Chart | None:
    bound = run.setting("model.linear_attn_config.gate_lower_bound")
    floor = math.log(2) / -bound if isinstance(bound, int | float) and bound < 0 else None

    def draw(snapshot: Snapshot) -> Figure | None:
        points = [
            (place + spread(head, len(heads)), head, *values)
            for place, heads in enumerate(snapshot.half_life.values())
            for head, values in enumerate(heads)
            if all(v > 0 and math.isfinite(v) for v in values)
        ]
        if not points:
            return None
        x, heads, low, median, high = zip(*points)
        trace = {
            "type": "scatter", "mode": "markers", "x": list(x), "y": list(median), "name": "head",
            "marker": {"size": 8 if len(points) <= 200 else 4, "color": colour(0)},
            "customdata": [list(row) for row in zip(heads, low, high)],
            "hovertemplate": "head %{customdata[0]}: %{y:.3g} tokens<br>"
            "%{customdata[1]:.3g} to %{customdata[2]:.3g}<extra></extra>",
        }  # fmt: skip
        if len(points) <= 200:
            trace["error_y"] = {
                "type": "data", "symmetric": False, "array": [h - m for h, m in zip(high, median)],
                "arrayminus": [m - l for m, l in zip(median, low)], "thickness": 1.4, "width": 0,
                "color": LIGHT["half"],
            }  # fmt: skip
        marks = [level(floor, "the bound: all but forgotten in a token", LIGHT["orange"])] if floor else []
        context = run.trained_context
        if context:
            marks.append(level(context, f"longest trained context, {words.length(context)}"))
        few = len(snapshot.half_life) <= 8
        names = [words.layer(plain(name, 8)) if few else plain(name, 8) for name in snapshot.half_life]
        every = -(-len(names) // (MOST_LABELS // 2))
        values = [*low, *high, *([floor] if floor else []), *([context] if context else [])]
        return {
            "data": [trace],
            "layout": layout(
                height=340, hovermode="closest",
                xaxis=axis(
                    tickmode="array", tickvals=list(range(0, len(names), every)), ticktext=names[::every],
                    title=titled("" if few else "layer"), showgrid=False, range=[-0.55, len(names) - 0.45],
                ),
                yaxis=axis(
                    type="log", tickmode="array", **decades(min(values), max(values)),
                    range=[math.log10(min(values)) - 0.2, math.log10(max(values)) + 0.35],
                ),
                shapes=[shape for shape, _ in marks],
                annotations=[label | {"y": math.log10(label["y"])} for _, label in marks],
            ),
        }  # fmt: skip

    note = "A point is a head's median over its channels and the text's tokens; the bar spans p10 to p90."
    return by_stage(run, "half-life", "Half-life of KDA's memory, tokens", draw, note=note)


def activations(run: RunFiles) -> Chart | None:
    blue, orange = colour(0), colour(1)
    kinds = (("input", 1, blue, "circle"), ("output", 2, orange, "diamond"))

    def draw(snapshot: Snapshot) -> Figure | None:
        if not snapshot.activation_rms:
            return None
        columns = list(zip(*snapshot.activation_rms))
        names = [words.sublayer(plain(name, 24)) for name in columns[0]]
        rows = list(range(len(names)))
        traces = [
            {
                "type": "scatter", "mode": "lines+markers" if len(names) <= 2 * MOST_LABELS else "lines",
                "x": numbers(columns[column]), "y": rows, "name": name,
                "legendgroup": name, "line": {"color": stroke, "width": 1.6}, "marker": {"size": 6, "symbol": symbol},
                "hovertemplate": "%{x:.3g}<extra>" + name + "</extra>",
            }
            for name, column, stroke, symbol in kinds
        ]  # fmt: skip
        return {
            "data": traces,
            "layout": layout(
                height=depth_height(len(names), 60), hovermode="y unified", xaxis=size_axis([*columns[1], *columns[2]]),
                yaxis=depth_axis(names),
            ),
        }  # fmt: skip

    keys = [Key("input", blue), Key("output", orange)]
    return by_stage(run, "activations", "Size of what each sublayer reads and adds", draw, keys, wide=False)


def states(run: RunFiles) -> Chart | None:
    def draw(snapshot: Snapshot) -> Figure | None:
        points = [
            (value, place, head)
            for place, heads in enumerate(snapshot.state_rms.values())
            for head, value in enumerate(heads)
            if math.isfinite(value)
        ]
        if not points:
            return None
        values, rows, heads = zip(*points)
        trace = {
            "type": "scatter", "mode": "markers", "x": list(values), "y": list(rows), "customdata": list(heads),
            "marker": {"size": 9 if len(points) <= 200 else 4, "color": colour(0), "opacity": 0.65},
            "hovertemplate": "head %{customdata}: %{x:.3g}<extra></extra>",
        }  # fmt: skip
        names = [words.layer(plain(name, 8)) for name in snapshot.state_rms]
        return {
            "data": [trace],
            "layout": layout(
                height=depth_height(len(names) * 2, 60), hovermode="closest", yaxis=depth_axis(names),
                xaxis=size_axis(values),
            ),
        }  # fmt: skip

    return by_stage(run, "states", "Size of KDA's state after the text, a point a head", draw, wide=False)


# speed


def throughput(run: RunFiles) -> Chart | None:
    steps = run.steps
    usual = measures.speed(run)
    if steps is None or usual is None:
        return None
    traces = raw_and_smooth(steps, steps.speed)
    shape, label = level(usual, f"median {words.human(usual)}")
    top = 1.1 * float(np.max(measures.known(steps.speed)))
    yaxis = {"range": [0, top], "hoverformat": ",.0f"}
    figure = over_time(steps, traces, names=True, shapes=[shape], annotations=[label], yaxis=yaxis)
    return single("throughput", "Tokens a second", figure, wide=True)


# long context


def needle(run: RunFiles) -> Chart | None:
    lengths = [entry for entry in measures.task(run, "needle") if entry.positions]
    if not lengths:
        return None
    columns = sorted({(p.start, p.stop) for entry in lengths for p in entry.positions})
    found = [{(p.start, p.stop): p.accuracy for p in entry.positions} for entry in lengths]
    cells = [[row.get(column, math.nan) for column in columns] for row in found]
    heat = {
        "type": "heatmap", "z": rounded(cells), "y": list(range(len(lengths))), "x": list(range(len(columns))),
        "zmin": 0, "zmax": 1, "colorscale": SEQUENTIAL, "xgap": 2, "ygap": 2, "showscale": False,
        "text": [[f"{100 * v:.0f}" if math.isfinite(v) else "" for v in row] for row in cells],
        "texttemplate": "%{text}", "hovertemplate": "%{z:.1%}<extra></extra>", "hoverongaps": False,
    }  # fmt: skip
    trained = run.trained_context
    inside = sum(trained is not None and entry.length <= trained for entry in lengths)
    shapes = []
    if trained is not None and inside < len(lengths):
        shapes = [
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": inside - 0.5, "y1": inside - 0.5,
                "line": {"color": LIGHT["orange"], "width": 2.5},
            }
        ]  # fmt: skip
    figure = {
        "data": [heat],
        "layout": layout(
            height=100 + 36 * len(lengths), hovermode="closest", shapes=shapes,
            margin={"l": 8, "r": 26, "t": 14, "b": 8},
            yaxis=axis(
                tickmode="array", tickvals=list(range(len(lengths))), showgrid=False,
                ticktext=[words.length(entry.length) for entry in lengths], range=[len(lengths) - 0.5, -0.5],
            ),
            xaxis=axis(
                title=titled("where in the text the fact stands, start to end"), showgrid=False, tickmode="array",
                tickvals=[-0.5, len(columns) / 2 - 0.5, len(columns) - 0.5],
                ticktext=[f"{100 * columns[0][0]:.0f}%", "50%", f"{100 * columns[-1][1]:.0f}%"],
                ticklabeloverflow="allow",
            ),
        ),
    }  # fmt: skip
    beyond = (
        f" Below the orange line: longer than the {words.length(trained)} tokens trained on."
        if shapes and trained
        else ""
    )
    return single(
        "needle",
        "Needle: percent found, by length and place",
        figure,
        note="Rows are lengths in tokens." + beyond,
        wide=True,
    )


def wilson(accuracy: float, asked: int) -> tuple[float, float]:
    """The 95% interval of a share of `asked` answers (Wilson)."""
    z2 = 1.96**2
    centre = (accuracy + z2 / (2 * asked)) / (1 + z2 / asked)
    half = 1.96 / (1 + z2 / asked) * math.sqrt(accuracy * (1 - accuracy) / asked + z2 / (4 * asked**2))
    return centre - half, centre + half


def accuracy_line(entries: list[Length], name: str, i: int) -> dict[str, Any]:
    """A task's accuracy over length with its interval."""
    entries = [e for e in entries if math.isfinite(e.accuracy)]
    bounds = [wilson(e.accuracy, e.asked) if e.asked else (e.accuracy, e.accuracy) for e in entries]
    return line(
        [e.length for e in entries], [e.accuracy for e in entries], name, colour(i), mode="lines+markers",
        line={"dash": DASHES[i % len(DASHES)]}, marker={"size": 8, "symbol": i},
        error_y={
            "type": "data", "symmetric": False, "array": [max(0.0, b[1] - e.accuracy) for e, b in zip(entries, bounds)],
            "arrayminus": [max(0.0, e.accuracy - b[0]) for e, b in zip(entries, bounds)], "thickness": 1, "width": 0,
        },
    )  # fmt: skip


def tasks(run: RunFiles) -> Chart | None:
    context = run.result.long_context if run.result else None
    named = {name: entries for name, entries in (context.tasks if context else {}).items() if entries}
    if not named:
        return None
    traces, keys = [], []
    for i, (name, entries) in enumerate(named.items()):
        label = short(name, 24)
        traces.append(accuracy_line(entries, label, i))
        chance = [(e.length, e.chance) for e in entries if math.isfinite(e.chance)]
        if chance:
            x, y = zip(*chance)
            dots = {"dash": "dot", "width": 1}
            traces.append(
                line(x, y, f"{label}, chance", colour(i), legendgroup=label, line=dots, hoverinfo="skip", opacity=0.7)
            )
        keys.append(Key(label, colour(i), DASHES[i % len(DASHES)]))
    marks = [upright(run.trained_context, "trained up to here")] if run.trained_context else []
    figure = {
        "data": traces,
        "layout": layout(
            height=340, shapes=[shape for shape, _ in marks], annotations=[label for _, label in marks],
            margin={"l": 8, "r": 10, "t": 28, "b": 8},
            xaxis=length_axis(e.length for entries in named.values() for e in entries),
            yaxis=axis(tickformat=".0%", range=[-0.03, 1.05], hoverformat=".1%"),
        ),
    }  # fmt: skip
    note = "Bars are 95% intervals of the share; thin dots are what guessing gets."
    return single("tasks", "Share of answers right, by length", figure, keys, note)


def loss_by_position(run: RunFiles) -> Chart | None:
    curves = {context: buckets for context, buckets in measures.position_curves(run).items() if buckets}
    if not curves:
        return None
    trained = run.trained_context
    traces, keys = [], []
    for i, (tokens, buckets) in enumerate(curves.items()):
        name = f"{words.length(tokens)} tokens"
        dash = "dash" if trained is not None and tokens > trained else "solid"
        x = [place(b) for b in buckets]
        traces.append(
            line(
                x,
                [b.nats for b in buckets],
                name,
                colour(i),
                mode="lines+markers",
                marker={"size": 6},
                line={"dash": dash},
            )
        )
        keys.append(Key(name, colour(i), dash))
    marks = [upright(trained, "trained up to here")] if trained else []
    ends = [b for buckets in curves.values() for b in buckets]
    least, most = max(1, min(b.start for b in ends)), max(b.stop for b in ends)
    figure = {
        "data": traces,
        "layout": layout(
            height=340, shapes=[shape for shape, _ in marks], annotations=[label for _, label in marks],
            margin={"l": 8, "r": 10, "t": 28, "b": 8},
            xaxis=position_axis(least, most),
            yaxis=axis(hoverformat=".3f"),
        ),
    }  # fmt: skip
    note = "Dashed: texts longer than any trained on." if any(key.dash == "dash" for key in keys) else ""
    return single("position", "Loss by position in the text, nats a token", figure, keys, note)

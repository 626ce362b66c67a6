"""The pictures as plotly figures, in the style of `perilune report`."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.depth.evidence import PLAIN, differences, interval
from experiments.depth.recipes import MAIN, SMALL_EPS
from experiments.panels import Panel, grid, log_axis, rgb
from perilune.report.draw import Figure, line
from perilune.report.theme import DASHES, LIGHT, SEQUENTIAL, colour, layout, titled
from perilune.report.variants import Sample

NAMED = {"plain": "plain residual", "full": "full attention residuals", "block": "block attention residuals",
         "bypass": "simple bypass"}  # fmt: skip
BAND = 0.16  # opacity


def named(name: str, stack: dict[str, Any]) -> str:
    if name.endswith(" eps"):
        return f"{name.removesuffix(' eps')}, eps {SMALL_EPS:g}".replace("e-0", "e-")
    if name.startswith("block "):
        return f"block, {name.removeprefix('block ')} layers each"
    size = stack["variants"][name]["block"] if name in stack["variants"] else None
    return f"{NAMED[name]}, {size} layers each" if name == "block" else NAMED[name]


def mains(stack: dict[str, Any]) -> list[str]:
    return [name for name in MAIN if name in stack["variants"]]


def style(name: str) -> tuple[str, dict[str, Any]]:
    i = MAIN.index(name)
    return colour(i), {"dash": DASHES[i]}


def banded(x: Sequence[float], y: Sequence[float], spread: Sequence[float], name: str) -> list[dict[str, Any]]:
    """A curve in a band of one standard deviation each way."""
    stroke, dash = style(name)
    red, green, blue = rgb(stroke)
    low = [v - s if min(y) <= 0 else max(v - s, v / 4) for v, s in zip(y, spread)]  # a log axis has no room below 0
    high = [v + s for v, s in zip(y, spread)]
    band = {
        "type": "scatter", "mode": "lines", "x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{BAND})", "line": {"width": 0}, "hoverinfo": "skip",
    }  # fmt: skip
    return [band, line(x, y, NAMED[name], stroke, line=dash)]


def learning(stack: dict[str, Any]) -> Figure:
    """The loss over the run, and beside the plain residual's on the same batches."""
    tokens = stack["steps"] * stack["batch_tokens"]
    curves, gaps = [], []
    plain = dict(zip(stack["variants"][PLAIN]["seeds"], stack["variants"][PLAIN]["loss"]))
    for name in mains(stack):
        variant = stack["variants"][name]
        columns = [Sample(list(values)) for values in zip(*variant["loss"])]
        n = len(columns)
        x = [(i + 0.5) * tokens / n for i in range(n)]
        curves += banded(x, [c.mean for c in columns], [c.spread or 0.0 for c in columns], name)
        pairs = [(own, plain[seed]) for seed, own in zip(variant["seeds"], variant["loss"]) if seed in plain]
        if pairs and name != PLAIN:
            apart = [Sample([own[i] - other[i] for own, other in pairs]) for i in range(n)]
            gaps += banded(x, [c.mean for c in apart], [c.spread or 0.0 for c in apart], name)
    axis = {"title": titled("tokens trained on"), "range": [0, tokens]}
    gaps.append(line([0, tokens], [0, 0], NAMED[PLAIN], colour(0), line={"width": 1.2}))
    return grid(
        [
            Panel("training loss", curves, axis, {"title": titled("nats a token")}),
            Panel("minus the plain residual's, same batches", gaps, axis, {"title": titled("nats a token")}),
        ],
        2,
        height=340,
    )


PROFILES = {
    "input_rms": ("size of what each sublayer reads", "root mean square", "sublayer"),
    "output_rms": ("size of what each layer adds", "root mean square", "layer"),
    "gradient": ("gradient of each layer's parameters", "norm", "layer"),
}


def profiles(stack: dict[str, Any]) -> Figure:
    """Sizes and gradients over depth, before training and after it."""
    panels = []
    for figure, (what, unit, place) in PROFILES.items():
        for when, said in (("before", "at the start"), ("after", "after training")):
            traces: list[dict[str, Any]] = []
            for name in mains(stack):
                found = stack["variants"][name][when]
                if found is not None:
                    y = found[figure]
                    traces += banded(range(1, len(y) + 1), y, found[f"{figure}_spread"], name)
            n = max((len(trace["x"]) for trace in traces if "name" in trace), default=1)
            xaxis = {"title": titled(place), **whole(n), "tick0": 0 if n > 12 else 1}
            scale = log_axis(value for trace in traces for value in trace["y"])
            panels.append(Panel(f"{what}, {said}", traces, xaxis, {"title": titled(unit), **scale}))
    return grid(panels, 2)


def heat(z: list[list[float | None]], x: Sequence[Any], y: Sequence[Any], top: float) -> dict[str, Any]:
    """A map of numbers from 0 on; `top` and above have one colour."""
    return {
        "type": "heatmap", "z": z, "x": list(x), "y": list(y), "zmin": 0, "zmax": top, "colorscale": SEQUENTIAL,
        "showscale": False, "hoverongaps": False,
    }  # fmt: skip


def attention(stack: dict[str, Any]) -> Figure:
    """Who reads whom: a mixer's mean weights over its sources times their number, so that 1 is the plain mean."""
    panels = []
    for name in ("full", "block"):
        variant = stack["variants"].get(name)
        if variant is None or variant["after"] is None:
            continue
        rows = variant["after"]["attention"]
        most = max(map(len, rows))
        z: list[list[float | None]] = []
        for row in rows:  # the live sum stands last, where its block would be
            z.append([value * len(row) for value in row] + [None] * (most - len(row)))
        sources = "source: embedding, then every sublayer" if name == "full" else "source: embedding, blocks, live sum"
        mixers = {"title": titled("mixer of sublayer, the output's last"), "autorange": "reversed", "showgrid": False}
        panels.append(
            Panel(
                named(name, stack), [heat(z, range(most), range(1, len(rows) + 1), 3)],
                {"title": titled(sources), "showgrid": False, **whole(most)}, {**mixers, **whole(len(rows))},
            )
        )  # fmt: skip
    figure = grid(panels, 2, height=430)
    return legended(figure, "a source's weight over that of the plain mean", 3)


def whole(n: int) -> dict[str, Any]:
    """Ticks of an axis of n whole numbers."""
    return {"dtick": next(step for step in (1, 2, 5, 10, 20, 50) if n / step <= 12)}


def likeness(stack: dict[str, Any]) -> Figure:
    """How alike what two layers add is, for every main variant."""
    panels = []
    for name in mains(stack):
        found = stack["variants"][name]["after"]
        if found is not None:
            layers = [i + 1 for i in found["likeness_layers"]]
            title = f"{NAMED[name]}: {found['pairs']:.3f} between two"
            panels.append(
                Panel(
                    title, [heat(found["likeness"], layers, layers, 0.7)],
                    {"title": titled("layer"), "showgrid": False, **whole(layers[-1])},
                    {"title": titled("layer"), "autorange": "reversed", "showgrid": False, **whole(layers[-1])},
                )
            )  # fmt: skip
    return legended(grid(panels, 2, height=400), "cosine of what two layers add", 0.7)


def legended(figure: Figure, what: str, top: float) -> Figure:
    """With a colour scale above the panels, once for all maps."""
    maps = [i for i, trace in enumerate(figure["data"]) if trace["type"] == "heatmap"]
    if maps:
        middle = top / 2
        bar = {
            "orientation": "h", "thickness": 9, "len": 0.3, "x": 0, "xanchor": "left", "y": 1, "yref": "container",
            "yanchor": "top", "outlinewidth": 0, "tickfont": {"size": 11, "color": LIGHT["soft"]},
            "tickvals": [0, middle, top], "ticktext": ["0", f"{middle:g}", f"{top:g} or more"],
        }  # fmt: skip
        figure["data"][maps[0]] |= {"showscale": True, "colorbar": bar}
        figure["layout"]["annotations"].append({
            "text": what, "xref": "paper", "yref": "paper", "x": 0.34, "y": 1, "xanchor": "left", "yanchor": "bottom",
            "yshift": 26, "showarrow": False, "font": {"size": 12, "color": LIGHT["soft"]},
        })  # fmt: skip
    figure["layout"]["showlegend"] = False
    return figure


def sizes(stack: dict[str, Any]) -> Figure:
    """Bits beside the plain residual's, by how many layers a block has."""
    names = [name for name in stack["variants"] if name not in (PLAIN, "bypass") and not name.endswith(" eps")]
    order = sorted(names, key=lambda name: block_place(stack["variants"][name]["block"]))
    x, y, error, seeds = [], [], [], []
    for name in order:
        found = differences(stack, name)
        if found:
            size = stack["variants"][name]["block"]
            x.append("every sublayer" if size == "full" else f"{size}")
            y.append(sum(found) / len(found))
            error.append(interval(found) or 0.0)
            seeds += [(x[-1], value) for value in found]
    dots = {
        "type": "scatter", "mode": "markers", "x": [place for place, _ in seeds], "y": [value for _, value in seeds],
        "marker": {"size": 6, "color": LIGHT["soft"], "symbol": "circle-open"}, "name": "a seed",
    }  # fmt: skip
    means = {
        "type": "scatter", "mode": "markers", "x": x, "y": y, "error_y": {"type": "data", "array": error, "width": 5},
        "marker": {"size": 10, "color": colour(2)}, "name": "mean and its 95 % interval",
    }  # fmt: skip
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": 0, "y1": 0,
            "line": {"color": colour(0), "width": 1.4}}  # fmt: skip
    top = layout()
    return {
        "data": [means, dots],
        "layout": layout(
            height=340, showlegend=True, shapes=[zero], hovermode="closest",
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            margin={"l": 16, "r": 12, "t": 40, "b": 8},
            xaxis=top["xaxis"] | {"title": titled("layers in a block"), "type": "category"},
            yaxis=top["yaxis"] | {"title": titled("bits per byte minus the plain residual's")},
        ),
    }  # fmt: skip


def block_place(size: Any) -> float:
    return 0.5 if size == "full" else float(size)


FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "learning": ("Loss over training", learning),
    "profiles": ("Sizes and gradients over depth", profiles),
    "attention": ("Which sources mixers take", attention),
    "likeness": ("How alike layers are", likeness),
    "sizes": ("Block size", sizes),
}


def figures(evidence: dict[str, Any]) -> dict[str, tuple[str, Figure]]:
    """Everything there is to draw: title and figure by the picture's name."""
    found: dict[str, tuple[str, Figure]] = {}
    for scale, entry in evidence["scales"].items():
        for stack_name, stack in entry["stacks"].items():
            for key in drawn(stack):
                title, make = FIGURES[key]
                found[f"{scale}-{stack_name}-{key}"] = (f"{title}: {scale}, {stack_name}", make(stack))
    return found


def drawn(stack: dict[str, Any]) -> list[str]:
    """Which figures a stack has something for."""
    if PLAIN not in stack["variants"]:
        return []
    has_map = any(stack["variants"].get(name, {}).get("after") for name in ("full", "block"))
    has_sizes = any(name.removeprefix("block ").isdigit() for name in stack["variants"])
    return ["learning", "profiles", *["attention"] * has_map, "likeness", *["sizes"] * has_sizes]

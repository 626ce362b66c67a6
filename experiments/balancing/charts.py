"""The pictures as plotly figures, in the style of `perilune report`."""

import math
from collections.abc import Iterable
from typing import Any

from experiments.balancing import synthetic
from experiments.balancing.evidence import chosen_runs, rules_of, situations_of
from experiments.panels import Panel, grid, log_axis, rgb, styled
from perilune.nn.load import sampling_floor
from perilune.report.draw import Figure, line
from perilune.report.theme import LIGHT, colour, titled

FAMILIES = ("plain", "ema", "pooled", "both", "sign", "band")
NAMED = {
    "plain": "quantile, plain", "ema": "quantile, EMA", "pooled": "quantile, pooled (as shipped)",
    "both": "quantile, pooled and EMA", "sign": "sign, best step", "band": "band",
}  # fmt: skip
FLOOR = "by chance alone"
TIE = 1.03  # times the best is as good as that


# the map


def winners(evidence: dict[str, Any]) -> Figure:
    """Who holds a router evenest, by tokens a step and experts; the text is the best's Gini, and what chance gives."""
    panels = []
    for key, what in (("step", "single steps"), ("window", "all judged steps together")):
        for correlated in (False, True):
            cells = [cell for cell in evidence["map"]["cells"] if cell["correlated"] == correlated]
            kind = "four documents a step" if correlated else "independent tokens"
            panels.append(Panel(f"{what}, {kind}", *map_panel(cells, key)))
    figure = grid(panels, 2, height=400)
    swatches = [
        {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": NAMED[family], "showlegend": True,
         "marker": {"size": 12, "symbol": "square", "color": tint(i)}}
        for i, family in enumerate(FAMILIES)
    ]  # fmt: skip
    return figure | {"data": [*figure["data"], *swatches]}


def map_panel(cells: list[dict[str, Any]], key: str) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    experts = sorted({cell["experts"] for cell in cells})
    tokens = sorted({cell["tokens"] for cell in cells})
    z = [[0] * len(tokens) for _ in experts]
    text = [[""] * len(tokens) for _ in experts]
    for cell in cells:
        row, column = experts.index(cell["experts"]), tokens.index(cell["tokens"])
        found = dict(synthetic.families(cell, key))
        order = sorted(found, key=lambda rule: found[rule])
        z[row][column] = FAMILIES.index(order[0])
        level = [rule for rule in order[1:] if found[rule] <= TIE * found[order[0]]]
        also = "".join(f"<br>{'also ' if i == 0 else ''}{', '.join(level[i : i + 2])}" for i in range(0, len(level), 2))
        text[row][column] = f"<b>{order[0]}</b> {found[order[0]]:.3f}<br>chance {cell['floor'][key]:.3f}{also}"
    steps = [[bound, tint(i)] for i in range(len(FAMILIES)) for bound in (i / len(FAMILIES), (i + 1) / len(FAMILIES))]
    heat = {
        "type": "heatmap", "z": z, "zmin": -0.5, "zmax": len(FAMILIES) - 0.5, "colorscale": steps, "showscale": False,
        "xgap": 3, "ygap": 3, "text": text, "texttemplate": "%{text}", "textfont": {"size": 11, "color": LIGHT["ink"]},
        "hoverinfo": "skip",
    }  # fmt: skip
    tops = {cell["experts"]: cell["top_k"] for cell in cells}
    xaxis = {"tickvals": list(range(len(tokens))), "ticktext": [f"{m:,}" for m in tokens], "showgrid": False}
    names = [f"{E}<br>top-{tops[E]}" for E in experts]
    yaxis = {
        "tickvals": list(range(len(experts))), "ticktext": names, "showgrid": False, "title": titled("experts"),
    }  # fmt: skip
    return [heat], xaxis | {"title": titled("tokens a step")}, yaxis


def tint(i: int) -> str:
    """A colour light enough to be written on."""
    return "#" + "".join(f"{round(255 - 0.45 * (255 - value)):02x}" for value in rgb(colour(i)))


def small_steps(evidence: dict[str, Any]) -> Figure:
    """Gini of single steps over their size, with the remedies and the floor of chance."""
    panels = []
    for experts in (64, 896):
        for correlated in (False, True):
            cells = sorted(
                (c for c in evidence["map"]["cells"] if c["correlated"] == correlated and c["experts"] == experts),
                key=lambda cell: cell["tokens"],
            )
            x = [cell["tokens"] for cell in cells]
            traces = []
            for i, family in enumerate(FAMILIES):
                y = [dict(synthetic.families(cell, "step"))[family] for cell in cells]
                stroke, dash = styled(i)
                traces.append(line(x, y, NAMED[family], stroke, line=dash, mode="lines+markers"))
            traces.append(floor(x, [cell["floor"]["step"] for cell in cells]))
            kind = "four documents a step" if correlated else "independent tokens"
            xaxis = {"type": "log", "tickvals": x, "ticktext": [f"{m:,}" for m in x], "title": titled("tokens a step")}
            title = f"{experts} experts, top-{cells[0]['top_k']}, {kind}"
            yaxis = log_axis(y for trace in traces for y in trace["y"]) | {"title": titled("Gini")}
            panels.append(Panel(title, traces, xaxis, yaxis))
    return grid(panels, 2)


def floor(x: Iterable[float], y: Iterable[float]) -> dict[str, Any]:
    return line(x, y, FLOOR, LIGHT["soft"], line={"dash": "dot", "width": 1.6})


def mending(evidence: dict[str, Any]) -> Figure:
    """How a skewed router of 896 experts comes right, update by update, and how many experts are dead meanwhile."""
    found = evidence["map"]["mending"]
    router = found["router"]
    level = sampling_floor(router["tokens"] * router["top_k"] / router["experts"], router["experts"]).gini
    ticks = (0, 1, 2, 5, 10, 20, 60)
    xaxis = {
        "type": "log", "tickvals": [1 + t for t in ticks], "ticktext": [str(t) for t in ticks],
        "title": titled("updates"), "range": [0, math.log10(61)],
    }  # fmt: skip
    panels = []
    for skew, rules in found["skews"].items():
        curves: dict[str, list[dict[str, Any]]] = {"gini": [], "dead": []}
        for i, (name, values) in enumerate(rules.items()):
            stroke, dash = styled(i)
            x = [1 + updates for updates in range(len(values["gini"]))]
            for figure, traces in curves.items():
                traces.append(line(x, values[figure], NAMED.get(name, name), stroke, line=dash))
        uneven = [*curves["gini"], floor([1, 61], [level, level])]
        yaxis = log_axis(y for trace in uneven for y in trace["y"]) | {"title": titled("Gini")}
        panels.append(Panel(f"Gini of a step's loads, a = {skew}", uneven, xaxis, yaxis))
        panels.append(Panel(f"experts without a token, a = {skew}", curves["dead"], xaxis, {"rangemode": "tozero"}))
    return grid(panels, 2)


# trained models


def trained(found: dict[str, Any]) -> Figure:
    """Worst layer's Gini of single steps over the run, a panel a situation; means over seeds."""
    panels = []
    for situation in situations_of(found):
        traces = []
        for i, rule in enumerate(rules_of(found)):
            curves = [run["curve"] for run in chosen_runs(found, situation, rule)]
            if curves:
                mean = [sum(values) / len(values) for values in zip(*curves)]
                stroke, dash = styled(i)
                traces.append(line(range(1, len(mean) + 1), mean, rule, stroke, line=dash))
        steps = found["steps"]
        traces.append(floor([1, steps], [found["floor"]["step"]] * 2))
        if situation == "shift":
            mark = {"dash": "dash", "width": 1}
            traces.append(line([steps / 2 + 0.5] * 2, [0, 1], "from prose to code", LIGHT["soft"], line=mark))
        panels.append(Panel(situation, traces, {"title": titled("step")}, {"range": [0, 1], "title": titled("Gini")}))
    return grid(panels, len(panels), height=340)


def figures(evidence: dict[str, Any]) -> dict[str, tuple[str, Figure]]:
    """Everything there is to draw: title and figure by the picture's name."""
    found: dict[str, tuple[str, Figure]] = {}
    if evidence["map"]:
        found["map"] = ("Who holds a router evenest", winners(evidence))
        found["small-steps"] = ("What helps where steps are small", small_steps(evidence))
        found["mending"] = ("896 experts from a skewed start", mending(evidence))
    for name, scale in evidence["scales"].items():
        title = f"{scale['experts']} experts, top-{scale['top_k']}: Gini of single steps, worst layer"
        found[name] = (title, trained(scale))
    return found

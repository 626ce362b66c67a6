"""The pictures as plotly figures, in the style of `perilune report`."""

from collections.abc import Callable
from typing import Any

from experiments.ladder.evidence import accuracy, cells_of, error
from experiments.ladder.recipes import FORMS, OF_THE_PAGE, TASKS
from experiments.panels import Panel, grid, log_axis, styled
from perilune.report.draw import Figure, line
from perilune.report.theme import titled
from perilune.report.variants import Sample

Drawing = Callable[[dict[str, Any]], Figure]
PERCENT = {"title": titled("right answers, %"), "range": [-4, 104]}
MAIN, OTHER = "climb", "unbounded gate"


def lengths_axis(scale: dict[str, Any]) -> dict[str, Any]:
    lengths = scale["lengths"]
    ticks = {"tickvals": lengths, "ticktext": [f"{length:,}" for length in lengths]}
    return {**log_axis(lengths), **ticks, "title": titled("tokens of text")}


def curve(cells: list[dict[str, Any]], name: str, i: int, trained: int) -> dict[str, Any]:
    """Accuracy over length with its standard error; hollow beyond what was trained."""
    stroke, dash = styled(i)
    return line(
        [cell["length"] for cell in cells], [100 * accuracy(cell) for cell in cells], name, stroke, line=dash,
        mode="lines+markers",
        marker={
            "color": stroke, "size": 8,
            "symbol": ["circle" if cell["length"] <= trained else "circle-open" for cell in cells],
        },
        error_y={"type": "data", "array": [100 * error(cell) for cell in cells], "color": stroke, "thickness": 1.2},
    )  # fmt: skip


def guessing(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often one constant answer is right, and any value of the page."""
    ends = [cells[0]["length"], cells[-1]["length"]]
    stroke, _ = styled(5)
    shares = {"always the same answer": cells[0]["chance"], "any value of the page": OF_THE_PAGE[cells[0]["task"]]}
    return [
        line(ends, [100 * share] * 2, name, stroke, line={"width": 1.2, "dash": dash})
        for (name, share), dash in zip(shares.items(), ("dot", "longdash"))
    ]


def bars(samples: list[Sample], stroke: str) -> dict[str, Any]:
    """One standard deviation of the seeds each way; nothing where there is one seed."""
    if any(sample.spread is None for sample in samples):
        return {}
    return {"error_y": {"type": "data", "array": [s.spread for s in samples], "color": stroke, "thickness": 1.2}}


def by_length(scale: dict[str, Any]) -> Figure:
    """What the ladder finds after each of its stages."""
    panels = []
    for task in TASKS:
        for form in FORMS:
            traces: list[dict[str, Any]] = []
            for i, stage in enumerate(scale["variants"][MAIN]["stages"]):
                cells = cells_of(stage, task, form)
                traces.append(curve(cells, f"after {stage['context']:,}", i, stage["context"]))
            traces += guessing(cells)
            panels.append(Panel(f"{task}, {form}", traces, lengths_axis(scale), PERCENT))
    return grid(panels, 2)


def ways(scale: dict[str, Any]) -> Figure:
    """All ways up, after their last stages."""
    panels = []
    for task in TASKS:
        traces: list[dict[str, Any]] = []
        for i, (name, variant) in enumerate(scale["variants"].items()):
            stage = variant["stages"][-1]
            cells = cells_of(stage, task, FORMS[0])
            traces.append(curve(cells, name, i, stage["context"]))
        traces += guessing(cells)
        panels.append(Panel(f"{task}, {FORMS[0]}", traces, lengths_axis(scale), PERCENT))
    return grid(panels, 2)


def apart(bucket: dict[str, Any]) -> list[float]:
    return [one_go - fresh for one_go, fresh in zip(bucket["nats"], bucket["fresh"])]


def positions(scale: dict[str, Any]) -> Figure:
    """By position after every stage, for both gates: the loss in one go less that of the same tokens read afresh."""
    panels = []
    variants = [(i, name) for i, name in enumerate((MAIN, OTHER)) if name in scale["variants"]]
    values = [
        value
        for _, name in variants
        for stage in scale["variants"][name]["stages"]
        for bucket in stage["positions"]
        for value in apart(bucket)
    ]
    room = max(0.05 * (max(values) - min(values)), 0.001)
    low, high = min(values) - room, max(values) + room
    for k, stage in enumerate(scale["variants"][MAIN]["stages"]):
        traces: list[dict[str, Any]] = []
        for i, name in variants:
            buckets = scale["variants"][name]["stages"][k]["positions"]
            x = [(max(bucket["from"], 1) * bucket["to"]) ** 0.5 for bucket in buckets]
            samples = [Sample(apart(bucket)) for bucket in buckets]
            stroke, dash = styled(i)
            means = [s.mean for s in samples]
            traces.append(line(x, means, name, stroke, line=dash, mode="lines+markers", **bars(samples, stroke)))
        mark, _ = styled(5)
        ends = {"width": 1.2, "dash": "dot"}
        traces.append(line([stage["context"]] * 2, [low, high], "trained up to here", mark, line=ends))
        axis = {**log_axis([4, stage["positions"][-1]["to"]]), "title": titled("position")}
        yaxis = {"title": titled("nats a token more"), "range": [low, high]}
        panels.append(Panel(f"after {stage['context']:,}", traces, axis, yaxis))
    return grid(panels, 2)


def borders(ends: list[int], values: list[float]) -> list[dict[str, Any]]:
    """Where stages of the climb end and others begin, as high as the values are."""
    stroke, _ = styled(5)
    ends_at = [min(values), max(values)]
    dotted = {"width": 1, "dash": "dot"}
    return [line([end] * 2, ends_at, "a stage of the climb begins", stroke, line=dotted) for end in ends]


def jolts(scale: dict[str, Any]) -> Figure:
    """The held-out loss from the first stage's end on, and the rates."""
    ends = [stage["tokens"] for stage in scale["variants"][MAIN]["stages"]]
    curves, rates = [], []
    for i, (name, variant) in enumerate(scale["variants"].items()):
        stroke, dash = styled(i)
        looks = [look for look in variant["looks"] if look["tokens"] >= ends[0]]
        samples = [Sample(look["nats"]) for look in looks]
        x = [look["tokens"] for look in looks]
        curves.append(line(x, [s.mean for s in samples], name, stroke, line=dash, **bars(samples, stroke)))
        later = [(tokens, rate) for tokens, rate in variant["rates"] if tokens >= 0.9 * ends[0]]
        rates.append(line([t for t, _ in later], [r for _, r in later], name, stroke, line=dash))
    for traces in (curves, rates):
        traces += borders(ends[:-1], [y for trace in traces for y in trace["y"]])
    axis = {"title": titled("tokens trained on")}
    return grid(
        [
            Panel("held-out loss, short pieces", curves, axis, {"title": titled("nats a token")}),
            Panel("learning rate", rates, axis, {"title": titled("Muon's rate"), "rangemode": "tozero"}),
        ],
        2,
        height=360,
    )


def depths(scale: dict[str, Any]) -> Figure:
    """Retrieval after the last stage, by how deep in the text the line stands."""
    panels = []
    for name in (name for name in (MAIN, OTHER) if name in scale["variants"]):
        stage = scale["variants"][name]["stages"][-1]
        traces = []
        for i, cell in enumerate(cells_of(stage, TASKS[0], FORMS[0])):
            parts = [
                {"asked": asked, "right": right, "by_seed": [0.0]} if asked else None for asked, right in cell["depths"]
            ]
            stroke, dash = styled(i)
            known = [(k, part) for k, part in enumerate(parts) if part is not None]
            errors = {"type": "data", "array": [100 * error(p) for _, p in known], "color": stroke, "thickness": 1.2}
            traces.append(
                line(
                    [100 * (k + 0.5) / len(parts) for k, _ in known], [100 * accuracy(p) for _, p in known],
                    f"{cell['length']:,} tokens", stroke, line=dash, mode="lines+markers", error_y=errors,
                )
            )  # fmt: skip
        xaxis = {"title": titled("depth of the line, % of the text"), "range": [0, 100]}
        panels.append(Panel(name, traces, xaxis, PERCENT))
    return grid(panels, 2)


FIGURES: dict[str, tuple[str, Drawing]] = {
    "lengths": ("What the climb finds after each stage, by length", by_length),
    "ways": ("All ways up after their last stages", ways),
    "depths": ("Retrieval by depth after the last stage", depths),
    "positions": ("Loss by position, read in one go minus read afresh, two gates", positions),
    "jolts": ("Held-out loss and rates from the first stage's end", jolts),
}


def figures(evidence: dict[str, Any]) -> dict[str, tuple[str, Figure]]:
    """Title and figure by `SCALE-FIGURE`; none of a scale whose main variant is not there."""
    return {
        f"{name}-{key}": (f"{title}, {name}", draw(scale))
        for name, scale in evidence["scales"].items()
        if MAIN in scale["variants"]
        for key, (title, draw) in FIGURES.items()
    }

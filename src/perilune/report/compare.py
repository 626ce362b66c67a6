"""The page that sets runs side by side: what differs, who is better at what, and whether seeds explain it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from perilune.core.errors import DataError
from perilune.report import draw, health, measures, words
from perilune.report.draw import Chart, Figure, Key, line, plain, short
from perilune.report.page import Section, document, escape, notice_html, section_html, tiles_html
from perilune.report.read import Column, RunFiles, Snapshot, Steps
from perilune.report.theme import DASHES, LIGHT, LINES, axis, colour, layout, titled
from perilune.report.variants import (
    MEASURES,
    Measure,
    Variant,
    apart,
    conclusion,
    differences,
    grouped,
    ranked,
    sample,
    told,
)

FAINT = {"opacity": 0.3, "hoverinfo": "skip"}  # a single seed


@np.errstate(over="ignore", invalid="ignore")  # numbers of a run that blew up
def comparison(runs: Sequence[RunFiles]) -> str:
    """The page; DataError for fewer than two runs."""
    if len(runs) < 2:
        raise DataError(f"compare: expected two runs or more, got {len(runs)}; name another")
    variants = grouped(runs)
    sections = sections_of(variants)
    body = [header_html(variants), conclusion_html(variants), settings_html(variants), *map(section_html, sections)]
    nav = [("conclusion", "Conclusion"), ("settings", "What differs"), *((s.id, s.title) for s in sections)]
    return document("Comparison of runs", nav, "\n".join(body))


# head and tables


def header_html(variants: list[Variant]) -> str:
    runs = [run for variant in variants for run in variant.runs]
    seeds = sorted({len(variant.runs) for variant in variants})
    each = f"{seeds[0]} to {seeds[-1]} seeds each" if len(seeds) > 1 else f"{health.plural(seeds[0], 'seed')} each"
    names = "".join(
        f'<li><span class="swatch" style="--key:var(--{LINES[i % len(LINES)]})"></span>{escape(variant.name)}</li>'
        for i, variant in enumerate(variants)
    )
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes if run.finished]
    going = [run.name for run in runs if not run.finished]
    notes += [f"{name} has not finished; its curves are shown, its figures are not counted." for name in going]
    notes += [f"{v.name}: {seed}" for v in variants for seed in repeated_seeds(v)]
    lead = "Not everything here is complete." if notes else ""
    tiles = []
    for measure in MEASURES:
        order = ranked(variants, measure)
        if len(order) > 1 and order[0][1].mean != order[-1][1].mean:
            best, top = order[0]
            behind = [apart(top, s) for _, s in order[1:]]
            who = (
                best.name
                if all(behind)
                else f"{best.name}, not clearly ahead of all"
                if any(behind)
                else "no clear leader"
            )
            tiles.append((measure.show(top.mean), measure.name, who))
    return (
        '<header><p class="eyebrow">Comparison</p>'
        f"<h1>{capital(health.plural(len(variants), 'variant'))}, {each}</h1>"
        f'<ul class="facts">{names}</ul>{notice_html(lead, notes)}{tiles_html(tiles) if tiles else ""}</header>'
    )


def repeated_seeds(variant: Variant) -> list[str]:
    """Runs that are no seeds of their own."""
    seeds = [measures.seed(run) for run in variant.runs]
    twice = sorted({s for s in seeds if s is not None and seeds.count(s) > 1})
    return [f"seed {seed} is there {seeds.count(seed)} times; its runs are not independent." for seed in twice]


def conclusion_html(variants: list[Variant]) -> str:
    sentences = [(m.name, text) for m in MEASURES if (text := conclusion(variants, m)) is not None]
    said = "".join(f"<li><strong>{escape(capital(name))}</strong>: {escape(text)}</li>" for name, text in sentences)
    shown = [m for m in MEASURES if any(sample(v, m) for v in variants)]
    if not shown:
        return '<section id="conclusion"><h2>Conclusion</h2><p class="empty">No run has finished yet.</p></section>'
    head = "".join(f"<th>{escape(m.name)}<small>{better(m)}</small></th>" for m in shown)
    rows = "".join(
        f'<tr><th><span class="swatch" style="--key:var(--{LINES[i % len(LINES)]})"></span>{escape(variant.name)}</th>'
        + "".join(cell_html(variants, variant, measure) for measure in shown)
        + "</tr>"
        for i, variant in enumerate(variants)
    )
    return (
        '<section id="conclusion"><h2>Conclusion</h2><p class="see">Mean and standard deviation over seeds; the single '
        "seeds stand below. A difference is more than the seeds' spread where Welch's t test says so at 5%: of twenty "
        f'comparisons of equals, one would.</p><ul class="words">{said}</ul>'
        '<div class="card scroll"><table class="stacked figures"><thead><tr><th>variant</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def cell_html(variants: list[Variant], variant: Variant, measure: Measure) -> str:
    found = sample(variant, measure)
    label = f'data-label="{escape(measure.name)}"'
    if found is None:
        return f"<td {label}><span>not known</span></td>"
    top = ranked(variants, measure)[0][1]
    singles = ", ".join(measure.show(v) for v in found.values) if len(found.values) > 1 else "one seed"
    best = ' class="best"' if found.mean == top.mean else ""
    return f"<td {label}{best}><span>{told(found, measure)}<small>{singles}</small></span></td>"


def better(measure: Measure) -> str:
    return f"{'less' if measure.lower else 'more'} is better"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def settings_html(variants: list[Variant]) -> str:
    rows = differences([variant.settings for variant in variants])
    caution = ""
    if any(key.startswith("data.") for key, _ in rows):
        caution = notice_html("They learn from different data, so their bits per byte may be of different texts.", [])
    if len(variants) == 1:
        table = '<p class="empty">These runs differ by their seed alone.</p>'
    elif not rows:
        table = '<p class="empty">Their configurations are not known, or do not differ.</p>'
    else:
        head = "".join(f"<th>{escape(variant.name)}</th>" for variant in variants)
        lines = "".join(
            f"<tr><th><code>{escape(key)}</code></th>"
            + "".join(setting_html(variant, value) for variant, value in zip(variants, values))
            + "</tr>"
            for key, values in rows
        )
        table = (
            f'<div class="card scroll"><table class="stacked"><thead><tr><th>key</th>{head}</tr></thead>'
            f"<tbody>{lines}</tbody></table></div>"
        )
    return (
        '<section id="settings"><h2>What differs</h2>'
        '<p class="see">Every key of the configurations that is not the same '
        f"in all variants, the seed left out.</p>{table}{caution}</section>"
    )


def setting_html(variant: Variant, value: Any) -> str:
    text = "none" if value is None else short(str(value), 80)
    return f'<td data-label="{escape(variant.name)}"><code>{escape(text)}</code></td>'


# charts


def sections_of(variants: list[Variant]) -> list[Section]:
    return [
        Section(
            "figures", "Side by side",
            "Every seed is a point; the bar is their mean.",
            "to trust a difference between means that is smaller than the distance between seeds.",
            [dots(variants, measure) for measure in MEASURES], "No run has finished yet.",
        ),
        Section(
            "learning", "Learning",
            "The smoothed loss, and bits per byte where stages end. Thick: mean over seeds; thin: single seeds.",
            "a variant that leads early and is passed later: the end counts.",
            [loss(variants), bits_by_stage(variants)], "No step has been logged yet.",
        ),
        Section(
            "experts", "Experts",
            "How evenly tokens are spread over experts, in the worst layer, over a window of steps.",
            "a curve above 0.1, or one that climbs.",
            [gini(variants)], "No step has been logged yet.",
        ),
        Section(
            "long", "Long context",
            "What is found in texts of growing length, and the loss at each place in the longest text.",
            "a curve that drops where the trained length ends.",
            [tasks(variants), position(variants)], "No run has been judged yet.",
        ),
        Section(
            "depth", "Depth and memory",
            "The size of what sublayers read, what they take from the live sum, and how long KDA heads remember.",
            "a size that doubles from sublayer to sublayer, or most heads at the left end.",
            [activations(variants), live_share(variants), half_life(variants)], "No snapshot yet.",
        ),
    ]  # fmt: skip


def keys_of(variants: list[Variant]) -> list[Key]:
    return [Key(short(v.name), colour(i), DASHES[i % len(DASHES)]) for i, v in enumerate(variants)]


def curves(
    variants: list[Variant], of: Callable[[RunFiles], tuple[list[Any], Column] | None], marks: bool = False
) -> list[dict[str, Any]]:
    """Each variant's seeds thin, and thick their mean, over the x that all of them have."""
    traces: list[dict[str, Any]] = []
    for i, variant in enumerate(variants):
        found = [curve for run in variant.runs if (curve := of(run)) is not None and len(curve[0])]
        if not found:
            continue
        name, stroke = short(variant.name), colour(i)
        if len(found) > 1:
            traces += [line(x, y, name, stroke, line={"width": 1}, **FAINT) for x, y in found]
        x, y = average(found)
        more: dict[str, Any] = {"line": {"width": 2.4, "dash": DASHES[i % len(DASHES)]}}
        if marks:
            more |= {"mode": "lines+markers", "marker": {"size": 8, "symbol": i}}
        traces.append(line(x, y, name, stroke, **more))
    return traces


def average(found: list[tuple[list[Any], Column]]) -> tuple[list[Any], list[float]]:
    """The mean of several curves at the x that all of them have; NaN counts in no mean."""
    tables = [dict(zip(x, y)) for x, y in found]
    x = [place for place in found[0][0] if all(place in table for table in tables)]
    return x, [_mean([table[place] for table in tables]) for place in x]


def _mean(values: list[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan


def longest(variants: list[Variant]) -> Steps | None:
    """The steps of the run that trained on most tokens."""
    steps = [run.steps for variant in variants for run in variant.runs if run.steps is not None]
    return max(steps, key=lambda s: float(s.tokens[-1]), default=None)


def same_stages(variants: list[Variant]) -> bool:
    return all(variant.runs[0].stages == variants[0].runs[0].stages for variant in variants)


def over_tokens(
    variants: list[Variant], id: str, title: str, of: Callable[[Steps], Column], yaxis: dict[str, Any], **more: Any
) -> Chart | None:
    """A smoothed column of the metrics over tokens."""

    def curve(run: RunFiles) -> tuple[list[Any], Column] | None:
        if run.steps is None or not len(measures.known(of(run.steps))):
            return None
        kept = draw.evenly(len(run.steps))
        return run.steps.tokens[kept].tolist(), measures.smoothed(of(run.steps), run.steps.parts)[kept]

    steps, traces = longest(variants), curves(variants, curve)
    if steps is None or not traces:
        return None
    stages = same_stages(variants)
    figure = draw.over_time(steps, traces, names=stages, borders=stages, yaxis=yaxis, **more)
    return draw.single(id, title, figure, keys_of(variants), wide=True)


def dots(variants: list[Variant], measure: Measure) -> Chart | None:
    """A row a variant: its seeds and their mean."""
    found = [(i, v, s) for i, v in enumerate(variants) if (s := sample(v, measure)) is not None]
    if not found:
        return None
    seeds = [
        {
            "type": "scatter", "mode": "markers", "x": s.values, "y": [row] * len(s.values), "name": plain(v.name),
            "marker": {"size": 10, "color": colour(i), "opacity": 0.55}, "text": [measure.show(x) for x in s.values],
            "hovertemplate": "%{text}<extra></extra>",
        }
        for row, (i, v, s) in enumerate(found)
    ]  # fmt: skip
    means = [
        {
            "type": "line", "xref": "x", "yref": "y", "x0": s.mean, "x1": s.mean, "y0": row - 0.3, "y1": row + 0.3,
            "line": {"color": colour(i), "width": 3},
        }
        for row, (i, _, s) in enumerate(found)
    ]  # fmt: skip
    values = [x for _, _, s in found for x in s.values]
    room = 0.12 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 0.5
    figure = {
        "data": seeds,
        "layout": layout(
            height=76 + 34 * len(found), hovermode="closest", shapes=means,
            xaxis=axis(range=[min(values) - room, max(values) + room], nticks=6, tickformat=measure.ticks),
            yaxis=draw.depth_axis([plain(v.name, 22) for _, v, _ in found]),
        ),
    }  # fmt: skip
    title = f"{capital(measure.name)}; {better(measure)}"
    return draw.single(f"dots-{MEASURES.index(measure)}", title, figure)


def loss(variants: list[Variant]) -> Chart | None:
    values = [measures.known(run.steps.next_token) for v in variants for run in v.runs if run.steps is not None]
    together = np.concatenate(values) if values else np.array([])
    if not len(together):
        return None
    yaxis = draw.loss_axis(together)
    title = "Training loss, nats a token, smoothed"
    return over_tokens(variants, "loss", title, lambda s: s.next_token, yaxis, height=380)


def gini(variants: list[Variant]) -> Chart | None:
    shape, label = draw.level(0.1, "0.1")
    yaxis = {"rangemode": "tozero", "hoverformat": ".3f"}
    title, marks = "Gini of the experts' load, worst layer", {"shapes": [shape], "annotations": [label]}
    return over_tokens(variants, "gini", title, lambda s: s.gini, yaxis, **marks)


def bits_by_stage(variants: list[Variant]) -> Chart | None:
    def curve(run: RunFiles) -> tuple[list[Any], Column] | None:
        known = [(plain(s.stage, 16), s.bits_per_byte) for s in run.snapshots if s.bits_per_byte is not None]
        return ([name for name, _ in known], np.array([bits for _, bits in known])) if known else None

    traces = curves(variants, curve, marks=True)
    figure = {
        "data": traces,
        "layout": layout(xaxis=axis(type="category", showgrid=False), yaxis=axis(hoverformat=".4f")),
    }
    title = "Bits per byte at each stage's end, on a fixed part of the held-out text"
    return draw.single("bits-stages", title, figure, keys_of(variants), wide=True) if traces else None


def tasks(variants: list[Variant]) -> Chart | None:
    """Accuracy by length; the reader chooses the task."""
    runs = [run for variant in variants for run in variant.runs]
    contexts = [context for run in runs if run.result and (context := run.result.long_context)]
    names = list(dict.fromkeys(name for context in contexts for name, entries in context.tasks.items() if entries))
    drawn = {short(name): accuracy(variants, name) for name in sorted(names, key=lambda n: n != "needle")}
    if not drawn:
        return None
    title, note = "Share of answers right, by length", "Grey dots: what guessing gets."
    return Chart("tasks", title, drawn, keys_of(variants), note, wide=True)


def accuracy(variants: list[Variant], task: str) -> Figure:
    def curve(run: RunFiles) -> tuple[list[Any], Column] | None:
        entries = measures.task(run, task)
        return ([e.length for e in entries], np.array([e.accuracy for e in entries])) if entries else None

    runs = [run for v in variants for run in v.runs]
    entries = [e for run in runs for e in measures.task(run, task)]
    chance = sorted({e.length: e.chance for e in entries if math.isfinite(e.chance)}.items())
    traces = curves(variants, curve, marks=True)
    if chance:
        x, y = zip(*chance)
        traces.append(line(x, y, "chance", LIGHT["soft"], line={"width": 1, "dash": "dot"}))
    shapes, labels = trained_mark(runs)
    return {
        "data": traces,
        "layout": layout(
            height=320, margin={"l": 8, "r": 10, "t": 28, "b": 8}, shapes=shapes, annotations=labels,
            xaxis=draw.length_axis(e.length for e in entries),
            yaxis=axis(tickformat=".0%", range=[-0.03, 1.05], hoverformat=".1%"),
        ),
    }  # fmt: skip


def trained_mark(runs: list[RunFiles]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Where the trained length ends, if it is the same for all."""
    lengths = {run.trained_context for run in runs}
    length = lengths.pop() if len(lengths) == 1 else None
    if not length:
        return [], []
    shape, label = draw.upright(length, "trained up to here")
    return [shape], [label]


def position(variants: list[Variant]) -> Chart | None:
    """In the longest context that all runs were asked for."""
    runs = [run for variant in variants for run in variant.runs if measures.position_curves(run)]
    asked = [set(measures.position_curves(run)) for run in runs]
    context = max(set.intersection(*asked), default=None) if asked else None
    if context is None:
        return None

    def curve(run: RunFiles) -> tuple[list[Any], Column] | None:
        buckets = measures.position_curves(run).get(context, [])
        return [draw.place(b) for b in buckets], np.array([b.nats for b in buckets])

    traces = curves(variants, curve, marks=True)
    if not traces:
        return None
    shapes, labels = trained_mark(runs)
    figure = {
        "data": traces,
        "layout": layout(
            height=320, margin={"l": 8, "r": 10, "t": 28, "b": 8}, shapes=shapes, annotations=labels,
            xaxis=draw.position_axis(1, context), yaxis=axis(hoverformat=".3f"),
        ),
    }  # fmt: skip
    title = f"Loss by position in texts of {words.length(context)} tokens, nats a token"
    return draw.single("position", title, figure, keys_of(variants), wide=True)


def last(run: RunFiles, has: Callable[[Snapshot], Any]) -> Snapshot | None:
    """The last snapshot that says something about it."""
    return next((s for s in reversed(run.snapshots) if has(s)), None)


def over_depth(
    variants: list[Variant],
    id: str,
    title: str,
    of: Callable[[RunFiles], list[tuple[str, float]]],
    xaxis: dict[str, Any],
) -> Chart | None:
    """A value a sublayer, the mean over seeds; depth runs down."""
    names = max(([name for name, _ in of(run)] for v in variants for run in v.runs), key=len)
    if not names:
        return None

    def curve(run: RunFiles) -> tuple[list[Any], Column]:
        rows = [(names.index(name), value) for name, value in of(run) if name in names]
        return [row for row, _ in rows], np.array([value for _, value in rows])

    traces = [
        trace | {"x": trace["y"], "y": trace["x"], "hovertemplate": "%{x:.3g}"}
        for trace in curves(variants, curve)
        if "opacity" not in trace  # single seeds would hide each other here
    ]
    figure = {
        "data": traces,
        "layout": layout(
            height=draw.depth_height(len(names), 60), hovermode="closest", xaxis=xaxis,
            yaxis=draw.depth_axis([words.sublayer(plain(name, 24)) for name in names]),
        ),
    }  # fmt: skip
    return draw.single(id, title, figure, keys_of(variants))


def activations(variants: list[Variant]) -> Chart | None:
    def inputs(run: RunFiles) -> list[tuple[str, float]]:
        snapshot = last(run, lambda s: s.activation_rms)
        return [(name, value) for name, value, _ in snapshot.activation_rms] if snapshot else []

    xaxis = draw.size_axis(value for v in variants for run in v.runs for _, value in inputs(run))
    return over_depth(variants, "activations", "Size of what each sublayer reads", inputs, xaxis)


def live_share(variants: list[Variant]) -> Chart | None:
    def live(run: RunFiles) -> list[tuple[str, float]]:
        snapshot = last(run, lambda s: s.depth_attention)
        return [(n, w[-1]) for n, w in snapshot.depth_attention if len(w) > 1] if snapshot else []

    title = "Share that each sublayer takes from the live sum"
    return over_depth(variants, "live-sum", title, live, axis(tickformat=".0%", range=[0, 1]))


def half_life(variants: list[Variant]) -> Chart | None:
    """The heads' medians, seeds together, as a cumulative share."""
    traces = []
    for i, variant in enumerate(variants):
        taken = [s for run in variant.runs if (s := last(run, lambda s: s.half_life)) is not None]
        medians = sorted(v[1] for s in taken for heads in s.half_life.values() for v in heads if 0 < v[1] < math.inf)
        if medians:
            shares = [(k + 1) / len(medians) for k in range(len(medians))]
            shape = {"shape": "hv", "dash": DASHES[i % len(DASHES)]}
            traces.append(line(medians, shares, short(variant.name), colour(i), line=shape))
    if not traces:
        return None
    values = [x for trace in traces for x in trace["x"]]
    figure = {
        "data": traces,
        "layout": layout(
            xaxis=axis(
                type="log", title=titled("tokens"), tickmode="array", **draw.decades(min(values), max(values))
            ),
            yaxis=axis(tickformat=".0%", range=[0, 1.02]),
        ),
    }  # fmt: skip
    title = "Share of KDA heads whose half-life is shorter"
    return draw.single("half-life", title, figure, keys_of(variants), wide=True)

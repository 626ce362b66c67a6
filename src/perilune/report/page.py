"""The page: one HTML file with its own style, script and data, which fetches nothing.

Everything from a run's files is escaped on its way in, and the page's policy lets only its own two scripts run.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from perilune.core.errors import BackendError, DataError
from perilune.report import figures, health, measures, words
from perilune.report.draw import Chart
from perilune.report.health import Finding
from perilune.report.read import RunFiles
from perilune.report.theme import COLOURS, css

NAMES = {light: name for name, (light, _) in COLOURS.items()}
LEVELS = {
    health.Level.FINE: "fine",
    health.Level.WATCH: "worth a look",
    health.Level.POOR: "poor",
    health.Level.BROKEN: "broken",
}
NO_METRICS = "No step has been logged yet."
NO_SNAPSHOT = "No snapshot yet: a run takes one at the end of each stage."
NO_RESULT = "Not judged yet: a run is judged when it ends."


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    see: str
    """What one sees; HTML."""
    wrong: str
    """What would be wrong; HTML."""
    charts: list[Chart | None]
    missing: str
    """Said where there is no chart."""


def escape(text: Any) -> str:
    return html.escape(str(text), quote=True)


# pieces


def json_in_html(values: Any) -> str:
    """JSON that no parser of HTML takes for markup; what is not finite is null."""
    text = json.dumps(finite(values), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def chart_html(chart: Chart, wide: bool) -> str:
    def button(label: str, pressed: bool, attributes: str, inside: str = "") -> str:
        return f'<button type="button" aria-pressed="{str(pressed).lower()}" {attributes}>{inside}{label}</button>'

    keys = "".join(
        button(
            escape(key.label), True,
            f'class="{key.dash}" data-group="{escape(key.label)}" style="--key:var(--{NAMES[key.colour]})"', "<i></i>",
        )
        for key in chart.keys
    )  # fmt: skip
    labels = list(chart.figures)
    choices = "".join(button(escape(label), i == chart.chosen, f'data-figure="{i}"') for i, label in enumerate(labels))
    data = "".join(
        f'<script type="application/json">{json_in_html(figure)}</script>' for figure in chart.figures.values()
    )
    height = max(figure["layout"]["height"] for figure in chart.figures.values())
    return (
        f'<figure class="chart{" wide" if wide else ""}" id="chart-{chart.id}">'
        f"<figcaption><h3>{escape(chart.title)}</h3>"
        + (
            f'<div class="choices" role="group" aria-label="Choose what is shown">{choices}</div>'
            if len(labels) > 1
            else ""
        )
        + (f'<div class="keys">{keys}</div>' if len(chart.keys) > 1 else "")
        + "</figcaption>"
        + f'<div class="plot" role="img" aria-label="{escape(chart.title)}" style="height:{height}px"></div>'
        + (f'<p class="note">{escape(chart.note)}</p>' if chart.note else "")
        + f"{data}</figure>"
    )


def section_html(section: Section) -> str:
    charts = [chart for chart in section.charts if chart is not None]
    halves = [chart for chart in charts if not chart.wide]
    alone = halves[-1:] if len(halves) % 2 else []  # has no neighbour
    inside = "".join(chart_html(chart, chart.wide or chart in alone) for chart in charts)
    body = f'<div class="grid">{inside}</div>' if inside else f'<p class="empty">{escape(section.missing)}</p>'
    return (
        f'<section id="{section.id}"><h2>{escape(section.title)}</h2>'
        f'<p class="see">{section.see} <em>Wrong would be</em> {section.wrong}</p>{body}</section>'
    )


def tiles_html(tiles: Iterable[tuple[str, str, str]]) -> str:
    """(figure, what it is, a word beside it)"""
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{escape(figure)}</b><span>{escape(what)}</span><small>{escape(more)}</small></div>'
        for figure, what, more in tiles
    ) + "</div>"  # fmt: skip


def notice_html(lead: str, notes: list[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="notice">{escape(lead)}{f"<ul>{items}</ul>" if items else ""}</div>' if lead or notes else ""


def document(title: str, nav: Iterable[tuple[str, str]], body: str) -> str:
    """The whole page.  `nav`: (id, title) of sections."""
    here = files("perilune.report")
    script = (here / "page.js").read_text(encoding="utf-8")
    plotly = plotly_script()
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (plotly, script)
    )
    return Template((here / "page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:",
        title=escape(title),
        style=css() + (here / "page.css").read_text(encoding="utf-8"),
        nav="".join(f'<a href="#{id}">{escape(name)}</a>' for id, name in nav),
        body=body,
        plotly=plotly,
        swaps=json_in_html(dict(COLOURS.values())),
        script=script,
    )


def plotly_script() -> str:
    """plotly's own script, for pages that work offline; BackendError where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise BackendError(
            "plotly: expected it for the report's charts, found none; do: pip install 'perilune[report]'"
        ) from None
    return get_plotlyjs().replace("\r\n", "\n")  # as a browser reads it, for the hash


def write_page(path: Path, text: str) -> Path:
    """Whole or not at all."""
    if path.is_dir() or not path.parent.is_dir():
        raise DataError(f"{path}: expected a file in a folder that exists; choose another place")
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")  # half a pair has no UTF-8
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


# the report


@np.errstate(over="ignore", invalid="ignore")  # numbers of a run that blew up
def report(run: RunFiles) -> str:
    """The page of one run."""
    found = health.findings(run)
    sections = sections_of(run)
    body = [header_html(run), health_html(found), *map(section_html, sections), samples_html(run), config_html(run)]
    nav = [
        ("health", "Health"),
        *((s.id, s.title) for s in sections),
        ("samples", "Samples"),
        ("config", "Configuration"),
    ]
    return document(f"{run.name}: training report", nav, "\n".join(body))


def header_html(run: RunFiles) -> str:
    parameters = run.result.parameters if run.result else None
    time, seed = measures.seconds(run), measures.seed(run)
    machine = run.result.machine if run.result else {}
    facts = [
        f"{words.human(parameters)} parameters" if parameters else "",
        f"{len(run.stages)} stages" if len(run.stages) > 1 else "",
        f"seed {seed}" if seed is not None else "",
        f"trained for {words.duration(time)}" if time is not None else "",
        ", ".join(value if name == "device" else f"{name} {value}" for name, value in machine.items()),
    ]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts if fact)
    return (
        f'<header><p class="eyebrow">Training report</p><h1>{escape(run.name)}</h1><ul class="facts">{items}</ul>'
        f"{status_html(run)}{tiles_html(tiles(run))}</header>"
    )


def status_html(run: RunFiles) -> str:
    """Whether the run has ended, and what its files lack."""
    lead = ""
    if not run.finished:
        done = int(run.steps.step[-1]) if run.steps else 0
        planned = run.planned_steps
        how_far = f"step {done:,} of {planned:,} ({words.percent(done / planned)})" if planned else f"step {done:,}"
        lead = f"This run is still going, or stopped early: {how_far} is the last it logged."
    return notice_html(lead or ("Not all of this run's files could be used." if run.notes else ""), run.notes)


def tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    """The headline figures that the files give."""
    rows: list[tuple[str, str, str]] = []
    bits = measures.bits_per_byte(run)
    if bits is not None:
        others = run.result.bits_per_byte if run.result else {}
        best = min((v, n) for n, v in others.items()) if others else None
        xz = next((v for n, v in others.items() if n.startswith("xz")), None)
        if xz is not None:
            beside = f"xz needs {xz:.3f}"
        else:
            beside = "held-out text" if best else "held-out text, last snapshot"
        rows.append((f"{bits:.3f}", "bits per byte", beside))
    elif run.steps and (loss := measures.recent(run.steps.next_token)) is not None:
        rows.append((f"{loss:.3f}", "training loss", "nats a token, over the last steps"))
    total = measures.tokens(run)
    if total is not None:
        rows.append((words.human(total), "tokens", f"in {len(run.steps):,} steps" if run.steps else ""))
    speed = measures.speed(run)
    if speed is not None:
        rows.append((words.human(speed), "tokens a second", "median step"))
    trained, recall = run.trained_context, measures.needle_trained(run)
    if recall is not None and (inside := measures.within(measures.task(run, "needle"), trained)):
        beyond = measures.needle_longest(run)
        longest = measures.task(run, "needle")[-1]
        more = f"{words.percent(beyond)} at {words.length(longest.length)}" if beyond is not None else ""
        rows.append(
            (
                words.percent(recall),
                "of needles found",
                f"at {words.length(inside.length)} tokens" + (f"; {more}" if more else ""),
            )
        )
    elif trained:
        rows.append((words.length(trained), "longest context", "tokens"))
    gini = measures.gini(run)
    if gini is not None:
        dead = measures.dead_experts(run)
        rows.append(
            (f"{gini:.3f}", "Gini of expert load", "worst layer" + (f"; {dead:,} dead" if dead is not None else ""))
        )
    return rows


def health_html(found: list[Finding]) -> str:
    if not found:
        return '<section id="health"><h2>Health</h2><p class="empty">There is nothing to judge yet.</p></section>'
    cards = "".join(
        f'<li class="card finding {finding.level.name.lower()}"><p class="level">{LEVELS[finding.level]}</p>'
        f"<h3>{escape(finding.title)}</h3><p>{escape(finding.text)}</p>"
        f'<a href="#{finding.chart}">See the chart</a></li>'
        for finding in found[:3]
    )
    rest = "".join(
        f'<li><span class="level {finding.level.name.lower()}">{LEVELS[finding.level]}</span>'
        f'<span><a href="#{finding.chart}">{escape(finding.title)}</a>. {escape(finding.text)}</span></li>'
        for finding in found[3:]
    )
    more = (
        f'<details><summary>{len(found) - 3} more checks</summary><ul class="rest">{rest}</ul></details>'
        if rest
        else ""
    )
    return (
        f'<section id="health"><h2>Health</h2><p class="see">{escape(health.verdict(found))}</p>'
        f'<ol class="findings">{cards}</ol>{more}</section>'
    )


def sections_of(run: RunFiles) -> list[Section]:
    return [
        Section(
            "quality", "Quality",
            "How many bits the model needs for a byte of text that it never saw, beside programs that need no network.",
            "a bar longer than xz's, or a stage that ends above the one before it.",
            [figures.bits_bars(run), figures.bits_by_stage(run)], NO_RESULT,
        ),
        Section(
            "learning", "Learning",
            "The loss at every step; dotted lines are where a stage begins, with another context or mix of data.",
            "leaps that do not heal at once, a rise, or a flat line long before the end.",
            [figures.loss(run)], NO_METRICS,
        ),
        Section(
            "optimizer", "Learning rate and gradient",
            "The rate that each step used, and the size of its gradient.",
            "a gradient norm that keeps growing, or leaps where the rate is highest.",
            [figures.learning_rate(run), figures.grad_norm(run)], NO_METRICS,
        ),
        Section(
            "long", "Long context",
            "What the model finds in long texts, and whether later tokens get easier to predict.",
            "numbers that fall below the orange line, a place where facts get lost, or a loss that turns up.",
            [figures.needle(run), figures.tasks(run), figures.loss_by_position(run)], NO_RESULT,
        ),
        Section(
            "experts", "Experts",
            "How evenly the router spreads tokens over experts, over a window of steps.",
            "a Gini that climbs above 0.1, an expert with several times the mean, or one without any token.",
            [figures.gini(run), figures.max_violation(run), figures.dead(run), figures.expert_load(run)],
            NO_METRICS,
        ),
        Section(
            "depth", "Depth",
            "Attention residuals: each sublayer reads a learned mixture of the embedding, finished blocks and the live "
            "sum of the block in the making.",
            "an empty column, a source that nobody reads; or all weight on the live sum, which is the plain residual.",
            [figures.depth_attention(run)], NO_SNAPSHOT if not run.snapshots else "This model has a plain residual.",
        ),
        Section(
            "memory", "Memory",
            "How long each KDA head keeps what it has read. A good model has heads for words and heads for pages.",
            "heads at the bound, which keep nothing, and bars of no height, whose decay ignores the text.",
            [figures.half_life(run)], NO_SNAPSHOT if not run.snapshots else "This model has no KDA layer.",
        ),
        Section(
            "norms", "Norms",
            "The size of what flows through the model, from the first sublayer down to the last.",
            "a size that doubles from sublayer to sublayer, or one head's state far above the others.",
            [figures.activations(run), figures.states(run)], NO_SNAPSHOT,
        ),
        Section(
            "speed", "Speed",
            "Tokens a second at every step, all of it counted: data, forward, backward, update.",
            "dips that come back at a beat, or a slow slide.",
            [figures.throughput(run)], NO_METRICS,
        ),
    ]  # fmt: skip


def samples_html(run: RunFiles) -> str:
    samples = run.result.samples if run.result else []
    cards = "".join(
        f'<div class="card"><pre><b>{escape(prompt)}</b>{escape(text)}</pre></div>' for prompt, text in samples
    )
    body = f'<div class="samples">{cards}</div>' if cards else f'<p class="empty">{escape(NO_RESULT)}</p>'
    return (
        '<section id="samples"><h2>Samples</h2>'
        '<p class="see">What the model writes after a prompt, which is in colour. '
        f"<em>Wrong would be</em> a word repeated without end, or nothing.</p>{body}</section>"
    )


def config_html(run: RunFiles) -> str:
    text = json.dumps(run.config, indent=2, ensure_ascii=False) if run.config is not None else "run.json was not read."
    return (
        '<section id="config"><h2>Configuration</h2><details><summary>run.json, as the run was started</summary>'
        f'<div class="card"><pre>{escape(text)}</pre></div></details></section>'
    )

"""Everything that was found, put where it is read: one JSON, pictures, and the tables of the page."""

from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import publish
from experiments.ladder import charts
from experiments.ladder.charts import MAIN, OTHER
from experiments.ladder.evidence import accuracy, beyond, cells_of, collect, error, position_rise
from experiments.ladder.recipes import FORMS, TASKS
from experiments.publish import NOT_YET, ROOT, machine_line, markdown, spelled
from perilune.report.variants import Sample

RESULTS = ROOT / "benchmarks" / "results" / "ladder.json"
PAGE = ROOT / "docs" / "ladder-evidence.md"


def write(home: Path, console: Console) -> None:
    """From what is finished below `home`; what RESULTS has of other scales, from another machine say, stays."""
    about = "From short contexts to long ones: in stages, at once, with and without re-warming, under two gates."
    publish.write(collect(home), RESULTS, PAGE, home, charts.figures, TABLES, "The climb", about, "small", console)


def filled(text: str, evidence: dict[str, Any]) -> str:
    """The page with its tables as the evidence has them.  Raises DataError for a table that nobody makes."""
    return publish.filled(text, evidence, TABLES, PAGE.name)


def scale_of(evidence: dict[str, Any], name: str) -> dict[str, Any] | None:
    return evidence["scales"].get(name)


def setting_table(evidence: dict[str, Any], name: str) -> str:
    """What was trained, in a sentence, and its stages."""
    scale = scale_of(evidence, name)
    if scale is None:
        return NOT_YET
    some = next(iter(scale["variants"].values()))
    seeds = sorted({seed for variant in scale["variants"].values() for seed in variant["seeds"]})
    said = (
        f"{scale['layers']} layers, {scale['width']} wide, {scale['experts']} experts, "
        f"{some['parameters'] / 1e6:.2f}M parameters, vocabulary {scale['vocab_size']:,}, {scale['words']} keys and "
        f"values; {len(seeds)} seed(s); {'products in bfloat16' if scale['bf16'] else 'float32'}. "
        f"{machine_line(some['machine'])}"
    )
    rows = [
        [
            f"{s['context']:,}", f"{s['batch_tokens']:,}", f"{s['steps']:,}", f"{s['steps'] * s['batch_tokens']:,}",
            f"{s['lr']:g} to {s['lr_end']:g}",
        ]
        for s in scale["stages"]
    ]  # fmt: skip
    return f"{said}\n\n" + markdown(["context", "tokens a step", "steps", "tokens", "rate, peak to end"], rows)


def percent(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return f"{100 * accuracy(cell):.0f} ± {100 * error(cell):.0f}"


def accuracy_table(evidence: dict[str, Any], name: str) -> str:
    """Right answers by task, form and length, after each stage of each way up."""
    scale = scale_of(evidence, name)
    if scale is None:
        return NOT_YET
    rows = []
    for task in TASKS:
        for form in FORMS:
            for variant, stage in stages_of(scale):
                of_length = {cell["length"]: cell for cell in cells_of(stage, task, form)}
                cells = [
                    percent(of_length.get(n)) + (" *" if n > stage["context"] and n in of_length else "")
                    for n in scale["lengths"]
                ]
                rows.append([f"{task}, {form}", variant, f"{stage['context']:,}", *cells])
    return markdown(["asked", "way", "after", *(f"{n:,}" for n in scale["lengths"])], rows)


def stages_of(scale: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(way, stage) of all; the shared first stage once for each gate."""
    return [
        (name, stage)
        for name, variant in scale["variants"].items()
        for i, stage in enumerate(variant["stages"])
        if i or name in (MAIN, OTHER)
    ]


def extrapolation_table(evidence: dict[str, Any], name: str) -> str:
    """Within and beyond the trained length, after every stage."""
    scale = scale_of(evidence, name)
    if scale is None:
        return NOT_YET
    rows = []
    for variant, stage in stages_of(scale):
        rise = position_rise(stage)
        cells = [percent(cell) for task in TASKS for cell in beyond(stage, task, FORMS[0])]
        said = "" if rise is None else ("+" if rise.mean > 0 else "") + spelled(rise, 3)
        rows.append([variant, f"{stage['context']:,}", *cells, said])
    head = ["way", "trained to"]
    head += [f"{task}, {where}" for task in TASKS for where in ("within", "beyond")]
    return markdown([*head, "loss beyond, in one go minus afresh, nats"], rows)


def hops_table(evidence: dict[str, Any], name: str) -> str:
    """Chains by the number of lines that have to be read, all lengths together, after the last stage."""
    scale = scale_of(evidence, name)
    if scale is None:
        return NOT_YET
    rows, most = [], 0
    for variant, figures in scale["variants"].items():
        for form in FORMS:
            cells = cells_of(figures["stages"][-1], TASKS[1], form)
            hops = [[sum(c["hops"][i][j] for c in cells if i < len(c["hops"])) for j in (0, 1)] for i in range(
                max(len(c["hops"]) for c in cells))]  # fmt: skip
            most = max(most, len(hops))
            rows.append([variant, form, *(percent(one_seed(*pair)) for pair in hops)])
    return markdown(["way", "form", *(f"{i} hop{'s' * (i > 1)}" for i in range(1, most + 1))], rows)


def one_seed(asked: int, right: int) -> dict[str, Any] | None:
    """Answers whose error is that of their number."""
    return {"asked": asked, "right": right, "by_seed": [right / asked]} if asked else None


def depth_table(evidence: dict[str, Any], name: str) -> str:
    """Retrieval by length and depth after the last stage of the climb, and of its twin with the other gate."""
    scale = scale_of(evidence, name)
    if scale is None:
        return NOT_YET
    rows = []
    for variant in (v for v in (MAIN, OTHER) if v in scale["variants"]):
        for cell in cells_of(scale["variants"][variant]["stages"][-1], TASKS[0], FORMS[0]):
            parts = [percent(one_seed(*pair)) for pair in cell["depths"]]
            rows.append([variant, f"{cell['length']:,}", *parts])
    n = len(rows[0]) - 2 if rows else 0
    return markdown(["way", "tokens", *(f"{100 * i // n} to {100 * (i + 1) // n} %" for i in range(n))], rows)


def jolts_table(evidence: dict[str, Any], name: str) -> str:
    """What the beginning of each later stage did to the held-out loss and to gradients."""
    scale = scale_of(evidence, name)
    if scale is None:
        return NOT_YET
    rows = []
    for variant, figures in scale["variants"].items():
        for stage, jolts in zip(figures["stages"][1:], figures["jolts"]):
            columns = [Sample([jolt[key] for jolt in jolts]) for key in ("rise", "change", "gradient")]
            said = [spelled(columns[0], 3), spelled(columns[1], 3), spelled(columns[2], 1)]
            rows.append([variant, f"{stage['context']:,}", *said])
    head = [
        "way",
        "stage",
        "held-out loss: highest above the start",
        "end minus start",
        "largest gradient, times before",
    ]
    return markdown(head, rows)


def outcome_table(evidence: dict[str, Any], name: str) -> str:
    """Where each way ended."""
    scale = scale_of(evidence, name)
    if scale is None:
        return NOT_YET
    rows = []
    for variant, figures in scale["variants"].items():
        low, middle, high = figures["half_life"]
        rows.append([
            variant, f"{figures['stages'][-1]['tokens']:,}", spelled(Sample(figures["looks"][-1]["nats"]), 3),
            f"{low:,.1f}, {middle:,.1f}, {high:,.1f}", spelled(Sample(figures["seconds"]), 0),
        ])  # fmt: skip
    return markdown(["way", "tokens", "held-out nats a token", "half-lives: 10th, 50th, 90th percentile, tokens",
                     "seconds"], rows)  # fmt: skip


def pictures_table(evidence: dict[str, Any], name: str) -> str:
    """The pictures there are of a scale, each under what it shows."""
    if MAIN not in (scale_of(evidence, name) or {"variants": {}})["variants"]:
        return NOT_YET
    return "\n\n".join(
        f"![{title}, {name}](images/ladder-{name}-{key}.png)" for key, (title, _) in charts.FIGURES.items()
    )


TABLES: dict[str, publish.Table] = {
    "setting": setting_table, "accuracy": accuracy_table, "extrapolation": extrapolation_table, "hops": hops_table,
    "depth": depth_table, "jolts": jolts_table, "outcome": outcome_table, "pictures": pictures_table,
}  # fmt: skip

"""Everything that was found, put where it is read: one JSON, pictures, and the tables of the page."""

from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import publish
from experiments.depth import charts
from experiments.depth.evidence import (
    PLAIN,
    collect,
    differences,
    growth,
    interval,
    unevenness,
    verdict,
)
from experiments.depth.recipes import MAIN
from experiments.publish import NOT_YET, ROOT, machine_line, markdown, spelled
from perilune.report.variants import Sample

RESULTS = ROOT / "benchmarks" / "results" / "depth.json"
PAGE = ROOT / "docs" / "depth-evidence.md"


def write(home: Path, console: Console) -> None:
    """From what is finished below `home`; what RESULTS has of other scales, from another machine say, stays."""
    about = "Plain residual, attention residuals and a bypass at equal compute."
    publish.write(
        collect(home), RESULTS, PAGE, home, charts.figures, TABLES, "Attention residuals", about, "small", console
    )


def filled(text: str, evidence: dict[str, Any]) -> str:
    """The page with its tables as the evidence has them.  Raises DataError for a table that nobody makes."""
    return publish.filled(text, evidence, TABLES, PAGE.name)


def stack_of(evidence: dict[str, Any], where: str) -> dict[str, Any] | None:
    """`SCALE STACK`, if that has been run."""
    scale, _, name = where.partition(" ")
    return evidence["scales"].get(scale, {"stacks": {}})["stacks"].get(name)


def claims_table(evidence: dict[str, Any], _: str) -> str:
    """What each form of the residual changes, everywhere it was run."""
    rows = []
    for scale, entry in evidence["scales"].items():
        for name, stack in entry["stacks"].items():
            where = f"{name}, {2 * stack['layers']} sublayers, {stack['width']} wide ({scale})"
            for variant in (v for v in MAIN if v in stack["variants"] and v != PLAIN):
                found = differences(stack, variant)
                rows.append([where, charts.named(variant, stack), told(found), f"**{verdict(found)}**"])
    return markdown(["model", "beside the plain residual", "bits per byte", ""], rows) if rows else NOT_YET


def told(found: list[float] | None) -> str:
    """Mean difference and its 95 % interval."""
    if not found:
        return "no run finished"
    half = interval(found)
    return f"{sum(found) / len(found):+.4f}" + ("" if half is None else f" ± {half:.4f}")


def setting_table(evidence: dict[str, Any], where: str) -> str:
    """What was trained, in a sentence."""
    stack = stack_of(evidence, where)
    if stack is None:
        return NOT_YET
    entry = evidence["scales"][where.partition(" ")[0]]
    plain = stack["variants"].get(PLAIN) or next(iter(stack["variants"].values()))
    kind = f"{stack['experts']} experts in all layers but the first" if stack["experts"] else "dense"
    seeds = sorted({seed for variant in stack["variants"].values() for seed in variant["seeds"]})
    return (
        f"{stack['layers']} layers ({2 * stack['layers']} sublayers), {stack['width']} wide, {kind}, "
        f"{plain['parameters'] / 1e6:.2f}M parameters, vocabulary {entry['vocab_size']:,}; {stack['steps']} steps of "
        f"{stack['batch_tokens']:,} tokens in rows of {stack['context']}; {len(seeds)} seed(s); "
        f"{'products in bfloat16' if entry['bf16'] else 'float32'}. {machine_line(stack['machine'])}"
    )


def scale_table(evidence: dict[str, Any], where: str) -> str:
    """A row a variant: what it costs a token, what it reached, and beside the plain residual."""
    stack = stack_of(evidence, where)
    if stack is None:
        return NOT_YET
    plain = stack["variants"].get(PLAIN)
    rows = []
    for name, variant in stack["variants"].items():
        found = differences(stack, name) if name != PLAIN else None
        known = [bits for bits in variant["bits_per_byte"] if bits is not None]
        spent = f"{variant['flops'] / plain['flops'] - 1:+.2%}" if plain else ""
        rows.append([
            charts.named(name, stack), f"{3e-6 * variant['flops']:,.2f}", spent, f"{variant['inner']}",
            f"{variant['parameters'] / 1e6:.2f}M", f"{variant['rate']:g}",
            spelled(Sample(known), 4) if known else "diverged", told(found) if name != PLAIN else "",
            verdict(found) if name != PLAIN else "",
        ])  # fmt: skip
    head = ["residual", "MFLOP a token", "beside plain", "feed-forward width", "parameters", "rate", "bits per byte",
            "minus plain's, 95 %", ""]  # fmt: skip
    return markdown(head, rows)


def tuning_table(evidence: dict[str, Any], where: str) -> str:
    """Bits per byte on the tuning seed at every rate."""
    stack = stack_of(evidence, where)
    if stack is None:
        return NOT_YET
    rates = list(next(iter(stack["chosen"].values()))["tried"])
    rows = []
    for name, entry in stack["chosen"].items():
        cells = []
        for rate in rates:
            bits = entry["tried"][rate]
            text = "diverged" if bits is None else f"{bits:.4f}"
            cells.append(f"**{text}**" if float(rate) == entry["chosen"] else text)
        rows.append([charts.named(name, stack), *cells])
    return markdown(["residual", *rates], rows)


def depth_table(evidence: dict[str, Any], where: str) -> str:
    """What the profiles over depth come to in single numbers, after training."""
    stack = stack_of(evidence, where)
    if stack is None:
        return NOT_YET
    rows = []
    for name in charts.mains(stack):
        after = stack["variants"][name]["after"]
        if after is not None:
            rows.append([
                charts.named(name, stack), f"{growth(after['input_rms']):.1f}", f"{growth(after['output_rms']):.1f}",
                f"{growth(after['gradient']):.2f}", f"{unevenness(after['gradient']):.1f}",
                f"{after['neighbours']:.3f}", f"{after['pairs']:.3f}",
            ])  # fmt: skip
    head = ["residual", "read: last tenth over first", "added: the same", "gradient: the same",
            "gradient: largest over mean", "likeness of neighbours", "of any two layers"]  # fmt: skip
    return markdown(head, rows)


def cost_table(evidence: dict[str, Any], where: str) -> str:
    """Time and memory of a step, beside the plain residual's."""
    stack = stack_of(evidence, where)
    if stack is None:
        return NOT_YET
    costs = {name: v["cost"] for name, v in stack["variants"].items() if v["cost"]}
    if PLAIN not in costs:
        return NOT_YET
    plain, rows = costs[PLAIN], []
    for name, cost in costs.items():
        speed = stack["batch_tokens"] / cost["fastest_ms"] * 1e3
        rows.append([
            charts.named(name, stack), f"{cost['step_ms']:,.1f}", f"{cost['fastest_ms']:,.1f}",
            f"{cost['fastest_ms'] / plain['fastest_ms']:.2f}", f"{speed:,.0f}",
            f"{cost['kept_mb']:,.1f}", f"{cost['kept_mb'] / plain['kept_mb']:.2f}",
            "" if cost["peak_mb"] is None else f"{cost['peak_mb']:,.0f}",
        ])  # fmt: skip
    head = ["residual", "step, ms (median)", "fastest", "times plain's", "tokens a second",
            "kept for the backward, MB", "times plain's", "peak on the GPU, MB"]  # fmt: skip
    known = len(head) - (plain["peak_mb"] is None)
    return markdown(head[:known], [row[:known] for row in rows])


def pictures_table(evidence: dict[str, Any], where: str) -> str:
    """The pictures there are of a stack, each under what it shows."""
    stack = stack_of(evidence, where)
    if stack is None:
        return NOT_YET
    name = where.replace(" ", "-")
    return "\n\n".join(
        f"![{charts.FIGURES[key][0]}, {where.replace(' ', ', ')}](images/depth-{name}-{key}.png)"
        for key in charts.drawn(stack)
    )


TABLES: dict[str, publish.Table] = {
    "claims": claims_table, "setting": setting_table, "scale": scale_table, "tuning": tuning_table,
    "depth": depth_table, "cost": cost_table, "pictures": pictures_table,
}  # fmt: skip

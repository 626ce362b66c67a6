"""Everything that was found, put where it is read: one JSON, pictures, and the tables of the page."""

from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import publish
from experiments.balancing import charts, synthetic
from experiments.balancing.evidence import bits, chosen_runs, claims, collect, rules_of, situations_of
from experiments.publish import NOT_YET, ROOT, machine_line, markdown, spelled
from perilune.report.variants import Sample

RESULTS = ROOT / "benchmarks" / "results" / "balancing.json"
PAGE = ROOT / "docs" / "balancing-evidence.md"


def write(home: Path, console: Console) -> None:
    """From what is finished below `home`; what RESULTS has of other parts, from another machine say, stays."""
    about = "Every rule on the same router, text and seeds."
    publish.write(collect(home), RESULTS, PAGE, home, charts.figures, TABLES, "Expert balancing", about, "map", console)


def filled(text: str, evidence: dict[str, Any]) -> str:
    """The page with its tables as the evidence has them.  Raises DataError for a table that nobody makes."""
    return publish.filled(text, evidence, TABLES, PAGE.name)


def claims_table(evidence: dict[str, Any], _: str) -> str:
    return markdown(["claim", "where", "found", ""], [[*row[:3], f"**{row[3]}**"] for row in claims(evidence)])


def mending_table(evidence: dict[str, Any], _: str) -> str:
    """As section heads say: the routing after so many updates."""
    if not evidence["map"]:
        return NOT_YET
    updates = (0, 1, 2, 5, 10, 20, 60)
    rows = []
    for skew, rules in evidence["map"]["mending"]["skews"].items():
        for name, curve in rules.items():
            told = [f"{curve['gini'][t]:.3f} / {curve['dead'][t]}" if t < len(curve["gini"]) else "" for t in updates]
            rows.append([skew, charts.NAMED.get(name, name), *told])
    return markdown(["a", "Gini / dead after updates", *map(str, updates)], rows)


def map_table(evidence: dict[str, Any], _: str) -> str:
    """In how many cells each family is best, or as good within charts.TIE."""
    if not evidence["map"]:
        return NOT_YET
    rows = []
    for family in charts.FAMILIES:
        row = [charts.NAMED[family]]
        for key in ("step", "window"):
            for correlated in (False, True):
                cells = [c for c in evidence["map"]["cells"] if c["correlated"] == correlated]
                tables = [dict(synthetic.families(cell, key)) for cell in cells]
                best = sum(table[family] <= charts.TIE * min(table.values()) for table in tables)
                row.append(f"{best} of {len(cells)}")
        rows.append(row)
    head = ["best, or within 3 % of it", "steps, independent", "steps, documents", "window, independent",
            "window, documents"]  # fmt: skip
    return markdown(head, rows)


def scale_table(evidence: dict[str, Any], name: str) -> str:
    """A row a rule and situation; means over seeds, and their spread where there are several."""
    if name not in evidence["scales"]:
        return NOT_YET
    trained = evidence["scales"][name]
    rows = []
    for situation in situations_of(trained):
        for rule in rules_of(trained):
            found = chosen_runs(trained, situation, rule)
            if found:
                rows.append([situation, told(rule, situation, trained["chosen"]), *row_of(found, situation, trained)])
    head = [
        "situation", "rule", "Gini, late steps", f"Gini, last {trained['window']} steps", "MaxVio, same", "dead, same",
        "most dead in a step of the second half", "updates to its level", "bits per byte", "prose", "code",
    ]  # fmt: skip
    model = (
        f"{trained['experts']} experts, top-{trained['top_k']}, {len(trained['layers'])} MoE layers, "
        f"{trained['parameters'] / 1e6:,.1f}M parameters, {trained['steps']} steps of {trained['batch_tokens']:,} "
        f"tokens ({trained['mean_load']:g} an expert); by chance alone independent tokens would show Gini "
        f"{trained['floor']['step']:.3f} a step and {trained['floor']['window']:.3f} over {trained['window']}. "
        f"{len({run['seed'] for run in trained['runs']})} seed(s). {machine_line(trained['machine'])}"
    )
    picture = f"![Gini of single steps over training, by situation](images/balancing-{name}.png)"
    return f"{picture}\n\n{model}\n\n{markdown(head, rows)}"


def told(rule: str, situation: str, chosen: dict[str, Any]) -> str:
    """The rule's name, with what was chosen for it there."""
    if rule not in chosen:
        return rule
    entry = chosen[rule].get(situation) or next(iter(chosen[rule].values()))
    return f"{rule} {entry['chosen']:g}"


def row_of(found: list[dict[str, Any]], situation: str, trained: dict[str, Any]) -> list[str]:
    updates = "even_after_shift" if situation == "shift" else "even_after"
    steps = len(found[0]["curve"])
    each = {part: Sample([run["bits_per_byte"][part] for run in found]) for part in ("prose", "code")}
    return [
        layered([run["gini_step"] for run in found], 3),
        layered([run["gini_window"] for run in found], 3),
        layered([run["max_violation"] for run in found], 2),
        layered([run["dead"] for run in found], 0),
        f"{max(max(run['dead_step'][steps // 2 :]) for run in found)}",
        ", ".join("never" if run[updates] is None else str(run[updates]) for run in found),
        spelled(bits(found), 3),
        *(spelled(sample, 3) for sample in each.values()),
    ]


def layered(values: list[list[Any]], digits: int) -> str:
    """Mean, spread, and the layers where that was worst: `0.123 ± 0.004 (L1)`."""
    layers = ", ".join(sorted({f"L{layer}" for _, layer in values}))
    nothing = all(value == 0 for value, _ in values)
    return spelled(Sample([value for value, _ in values]), digits) + ("" if nothing else f" ({layers})")


def tuning_table(evidence: dict[str, Any], name: str) -> str:
    if name not in evidence["scales"]:
        return NOT_YET
    rows = []
    for rule, situations in evidence["scales"][name]["chosen"].items():
        for situation, entry in situations.items():
            for value, figures in entry["tried"].items():
                taken = "**taken**" if float(value) == entry["chosen"] else ""
                rows.append(
                    [situation, rule, value, f"{figures['gini']:.3f}", f"{figures['bits_per_byte']:.3f}", taken]
                )
    head = ["situation", "rule", "candidate", "Gini, late steps", "bits per byte", ""]
    return markdown(head, rows) if rows else NOT_YET


def time_table(evidence: dict[str, Any], name: str) -> str:
    if name not in evidence["scales"] or not evidence["scales"][name]["timing"]:
        return NOT_YET
    times = evidence["scales"][name]["timing"]
    none = times["rules"].get("none")
    rows = [
        [rule, f"{values['step_ms']:,.0f}", f"{values['balancers_ms']:.1f}", f"{values['share']:.2%}",
         f"{values['share'] - none['share']:.2%}" if none else ""]
        for rule, values in times["rules"].items()
    ]  # fmt: skip
    head = ["rule", "step, ms", "balancers, ms", "share of a step", "beyond counting loads"]
    return f"{machine_line(times['machine'])}\n\n{markdown(head, rows)}"


TABLES: dict[str, publish.Table] = {
    "claims": claims_table, "mending": mending_table, "map": map_table, "scale": scale_table, "tuning": tuning_table,
    "time": time_table,
}  # fmt: skip

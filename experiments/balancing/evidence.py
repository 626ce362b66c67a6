"""What all parts have found, as one JSON: figures of every run, the map, times, and whether the claims hold."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

from experiments.balancing import runs, synthetic, timing
from experiments.balancing.recipes import RULES, SCALES, SITUATIONS, TUNING_SEED, Scale
from perilune.nn.load import sampling_floor
from perilune.report.variants import Sample, apart

NEAR = 0.05  # of its own late level: that even a rule "is" from then on
SMALL_GINI, SMALL_SHARE, SMALL_DEAD = 0.1, 0.01, 0.01  # what is claimed of Gini, of a step's time, of dead experts
OURS = "quantile"
AFTER_SHIFT = 10  # steps in which to look for the worst


def collect(home: Path) -> dict[str, Any]:
    """Of everything finished below `home`; parts that are not there are left out."""
    found: dict[str, Any] = {"map": synthetic.read(home / "map"), "scales": {}}
    for name, scale in SCALES.items():
        if (trained := scale_figures(scale, home / name)) is not None:
            found["scales"][name] = trained
    return found


def scale_figures(scale: Scale, home: Path) -> dict[str, Any] | None:
    if not (home / "chosen.json").exists():
        return None
    chosen = json.loads((home / "chosen.json").read_text())
    made = []
    for situation, rule, seed in product(SITUATIONS, RULES, range(scale.seeds)):
        folder = runs.folder_of(home, situation, rule, None, seed)
        if (folder / "result.json").exists():
            made.append({"situation": situation, "rule": rule, "seed": seed, **run_figures(runs.read(folder))})
    if not made:
        return None
    model = scale.model()
    load = scale.batch_tokens * model.num_experts_per_token / model.num_experts
    results = [json.loads(path.read_text()) for path in sorted(home.glob("*/*/result.json"))]
    return {
        "experts": model.num_experts, "top_k": model.num_experts_per_token, "parameters": results[0]["parameters"],
        "layers": [short(name) for name in results[0]["layers"]],
        "steps": scale.steps, "batch_tokens": scale.batch_tokens, "mean_load": round(load, 2),
        "window": scale.load_window, "tuning_seed": TUNING_SEED, "chosen": chosen,
        "floor": {
            "step": round(sampling_floor(load, model.num_experts).gini, 4),
            "window": round(sampling_floor(load * scale.load_window, model.num_experts).gini, 4),
        },
        "machine": results[0]["machine"], "seconds": round(sum(result["seconds"] for result in results)),
        "gigabytes": max((result["gigabytes"] or 0 for result in results), default=0) or None,
        "runs": made, "timing": timing.read(home),
    }  # fmt: skip


def short(layer: str) -> str:
    """The number of a layer from its module's name: `model.layers.1.block_sparse_moe.balancer` is `1`."""
    return re.sub(r"\D+", "", layer) or layer


def run_figures(run: dict[str, Any]) -> dict[str, Any]:
    """Figures of one run, each of the layer where it is worst, with that layer's number."""
    layers, loads, result = [short(name) for name in run["result"]["layers"]], run["loads"], run["result"]
    curve = [max(line["gini"]) for line in loads]
    late, layer = runs.worst_late(loads, "gini")
    last = {name: worst(loads[-1][f"window_{name}"], layers) for name in ("gini", "max_violation", "dead")}
    middle = len(loads) // 2
    return {
        "gini_step": [round(late, 4), layers[layer]],
        "gini_window": last["gini"], "max_violation": last["max_violation"], "dead": last["dead"],
        "dead_step": [max(line["dead"]) for line in loads],
        "curve": [round(value, 4) for value in curve],
        "even_after": first(curve[:middle], late + NEAR),
        "shift_peak": round(max(curve[middle : middle + AFTER_SHIFT]), 4),
        "even_after_shift": first(curve[middle:], late + NEAR),
        "bits_per_byte": {name: round(bits, 4) for name, bits in result["bits_per_byte"].items()},
        "loss": [round(line["losses"]["next_token"], 4) for line in run["metrics"]],
    }  # fmt: skip


def worst(values: list[float], layers: list[str]) -> list[Any]:
    place = max(range(len(values)), key=values.__getitem__)
    return [values[place], layers[place]]


def first(curve: list[float], level: float) -> int | None:
    """After how many updates the curve is first at or below the level; the first entry is before any."""
    return next((i for i, value in enumerate(curve) if value <= level), None)


def chosen_runs(trained: dict[str, Any], situation: str, rule: str) -> list[dict[str, Any]]:
    return [run for run in trained["runs"] if run["situation"] == situation and run["rule"] == rule]


def rules_of(trained: dict[str, Any]) -> list[str]:
    return [rule for rule in RULES if any(run["rule"] == rule for run in trained["runs"])]


def situations_of(trained: dict[str, Any]) -> list[str]:
    return [name for name in SITUATIONS if any(run["situation"] == name for run in trained["runs"])]


def bits(found: list[dict[str, Any]]) -> Sample:
    """Bits per byte of runs, prose and code counting alike."""
    return Sample([runs.mean_bits(run) for run in found])


def claims(evidence: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(claim, where, what was found, whether it holds) for all that can be judged by now."""
    rows: list[tuple[str, str, str, str]] = []
    even = f"Gini below {SMALL_GINI} at 896 experts within a few steps"
    if evidence["map"]:
        for skew, rules in evidence["map"]["mending"]["skews"].items():
            curve = rules["pooled"]["gini"]
            after = first(curve, SMALL_GINI)
            text = f"{curve[0]:.3f} at first, {curve[1]:.3f} after one update, {curve[-1]:.3f} after {len(curve) - 1}"
            where = f"synthetic router, a = {skew}, 16,384 tokens a step"
            rows.append((even, where, text, holds(after is not None and after <= 5)))
    for name, trained in evidence["scales"].items():
        rows += trained_claims(name, trained, even)
    return rows


def trained_claims(name: str, trained: dict[str, Any], even: str) -> list[tuple[str, str, str, str]]:
    rows = []
    for situation in situations_of(trained):
        ours = chosen_runs(trained, situation, OURS)
        where = f"`{name}`, {situation}"
        if not ours:
            continue
        rows.append((even.replace("896", str(trained["experts"])), where, *even_claim(ours, trained)))
        dead = max(run["dead"][0] for run in ours) / trained["experts"]
        text = f"{dead:.2%} in the worst layer's last {trained['window']} steps"
        rows.append((f"fewer than {SMALL_DEAD:.0%} of experts dead", where, text, holds(dead < SMALL_DEAD)))
        rows.append(("a loss no worse than any other rule's", where, *loss_claim(trained, situation)))
    times = trained["timing"]["rules"] if trained["timing"] else {}
    if OURS in times and "none" in times:
        share = times[OURS]["share"] - times["none"]["share"]
        text = f"{share:.2%} more than counting loads takes ({times[OURS]['share']:.2%} in all)"
        rows.append((f"less than {SMALL_SHARE:.0%} of a step's time", f"`{name}`", text, holds(share < SMALL_SHARE)))
    return rows


def even_claim(ours: list[dict[str, Any]], trained: dict[str, Any]) -> tuple[str, str]:
    """Late Gini of single steps, and of the last window, beside what chance alone gives."""
    steps, windows = ([run[name][0] for run in ours] for name in ("gini_step", "gini_window"))
    text = (
        f"late, {', '.join(f'{value:.3f}' for value in steps)} a step (chance {trained['floor']['step']:.3f}), "
        f"{', '.join(f'{value:.3f}' for value in windows)} over {trained['window']} steps"
    )
    if max(steps) < SMALL_GINI or max(windows) >= SMALL_GINI:
        return text, holds(max(steps) < SMALL_GINI)
    return text, f"holds over {trained['window']} steps, not in single ones"


def loss_claim(trained: dict[str, Any], situation: str) -> tuple[str, str]:
    """Our rule's bits beside the best other's."""
    others = {rule: bits(chosen_runs(trained, situation, rule)) for rule in rules_of(trained) if rule != OURS
              and chosen_runs(trained, situation, rule)}  # fmt: skip
    ours = bits(chosen_runs(trained, situation, OURS))
    if not others:
        return f"{ours.mean:.3f} bits per byte, nothing beside it", "open"
    best = min(others, key=lambda rule: others[rule].mean)
    text = f"{ours.mean:.3f} bits per byte; best other {others[best].mean:.3f} ({best})"
    if ours.mean <= others[best].mean:
        return text, "holds" if ours.spread is not None else "holds, one seed"
    beyond = apart(ours, others[best])
    if beyond is None:
        return text, f"{ours.mean / others[best].mean - 1:.2%} behind, one seed: open"
    return text, "does not hold" if beyond else "holds, within the seeds' spread"


def holds(yes: bool) -> str:
    return "holds" if yes else "does not hold"

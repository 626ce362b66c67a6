"""What all runs have found, as one JSON: means over seeds with their spread, and how variants differ seed by seed."""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.depth import runs
from experiments.depth.recipes import SCALES, TUNING_SEED, Scale, Stack
from perilune.report.variants import STUDENT, Sample

PLAIN = "plain"
STRETCHES = 24  # that a run's losses are told in
LIKENESS_ROWS = 25  # layers that a map of likeness has at most
MAPPED = ("full", "block")  # variants whose depth attention is kept


def collect(home: Path) -> dict[str, Any]:
    """Of everything finished below `home`; scales and stacks that are not there are left out."""
    found: dict[str, Any] = {"scales": {}}
    for name, scale in SCALES.items():
        stacks = {
            stack.name: figures for stack in scale.stacks if (figures := stack_figures(scale, stack, home / name))
        }
        if stacks:
            found["scales"][name] = {
                "stacks": stacks, "vocab_size": scale.vocab_size, "judged_tokens": scale.judged_tokens,
                "bf16": scale.bf16, "tuning_seed": TUNING_SEED,
                "texts": json.loads((home / name / "texts" / "done.json").read_text()),
            }  # fmt: skip
    return found


def stack_figures(scale: Scale, stack: Stack, home: Path) -> dict[str, Any] | None:
    """None before any run is finished at the rate that was chosen."""
    if not (home / "chosen.json").exists():
        return None
    chosen = json.loads((home / "chosen.json").read_text()).get(stack.name, {})
    variants = {}
    for name, variant in stack.variants.items():
        if variant.tuned_as not in chosen:
            continue
        rate = chosen[variant.tuned_as]["chosen"]
        cases = [runs.Case(stack.name, name, rate, seed) for seed in range(scale.seeds)]
        made = [json.loads((home / case.file).read_text()) for case in cases if runs.finished(case, home)]
        if made:
            cost = runs.cost_file(home, stack.name, name)
            known = json.loads(cost.read_text()) if cost.exists() else None
            variants[name] = {"block": variant.block, **variant_figures(name, made), "cost": known}
    if not variants:
        return None
    config = stack.config()
    return {
        "layers": config.num_hidden_layers, "width": config.hidden_size, "experts": config.num_experts
        if config.is_moe(config.num_hidden_layers - 1) else 0,
        "eps": config.rms_norm_eps, "context": stack.context, "batch_tokens": stack.batch_tokens,
        "steps": stack.steps, "tuning_steps": stack.tuning_steps, "rank": stack.rank, "every": stack.every,
        "chosen": chosen, "variants": variants, "machine": next(iter(variants.values()))["machine"],
    }  # fmt: skip


def variant_figures(name: str, made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one variant's seeds."""
    whole = [run for run in made if run["after"] is not None]
    return {
        "seeds": [run["seed"] for run in made], "rate": made[0]["rate"], "parameters": made[0]["parameters"],
        "flops": made[0]["flops"], "inner": made[0]["inner"], "seconds": [run["seconds"] for run in made],
        "bits_per_byte": [run["bits_per_byte"] for run in made],
        "loss": [stretched(run["loss"]) for run in made],
        "before": depth_figures(name, [run["before"] for run in made]),
        "after": depth_figures(name, [run["after"] for run in whole]) if whole else None,
        "machine": made[0]["machine"],
    }  # fmt: skip


def depth_figures(name: str, looks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and standard deviations of what is drawn with a band.

    `input_rms` a value a sublayer; `output_rms` and `gradient` a value a layer: the squares of its two, summed.
    """
    found: dict[str, Any] = {}
    for figure, of in {"input_rms": list, "output_rms": by_layer, "gradient": by_layer}.items():
        columns = [Sample(list(values)) for values in zip(*(of(look[figure]) for look in looks))]
        found[figure] = [short(column.mean) for column in columns]
        found[f"{figure}_spread"] = [short(column.spread or 0.0) for column in columns]
    if name in MAPPED:
        found["attention"] = [[short(v) for v in mean(rows)] for rows in zip(*(look["attention"] for look in looks))]
    L = len(looks[0]["likeness"])
    kept = sorted({round(i * (L - 1) / max(1, min(L, LIKENESS_ROWS) - 1)) for i in range(min(L, LIKENESS_ROWS))})
    likeness = [mean(rows) for rows in zip(*(look["likeness"] for look in looks))]
    found["likeness_layers"] = kept
    found["likeness"] = [[round(likeness[i][j], 3) for j in kept] for i in kept]
    found["neighbours"] = short(sum(likeness[i][i + 1] for i in range(L - 1)) / (L - 1))
    found["pairs"] = short(sum(likeness[i][j] for i in range(L) for j in range(i)) / (L * (L - 1) / 2))
    return found


def by_layer(values: Sequence[float]) -> list[float]:
    """Attention and feed-forward of each layer together."""
    return [math.hypot(*pair) for pair in zip(values[::2], values[1::2])]


def mean(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*rows)]


def short(value: float) -> float:
    return float(f"{value:.4g}")


def stretched(losses: Sequence[float]) -> list[float]:
    """Means over STRETCHES parts of a run, or the losses themselves where there are fewer."""
    n = min(STRETCHES, len(losses))
    bounds = [round(i * len(losses) / n) for i in range(n + 1)]
    return [round(sum(losses[a:b]) / (b - a), 4) for a, b in itertools.pairwise(bounds)]


# how variants differ


def differences(stack: dict[str, Any], name: str) -> list[float] | None:
    """Bits per byte beside the plain residual's on the same seed, so on the same data in the same order."""
    plain = bits_by_seed(stack, PLAIN)
    own = bits_by_seed(stack, name)
    shared = [seed for seed in own if seed in plain]
    return [own[seed] - plain[seed] for seed in shared] or None


def bits_by_seed(stack: dict[str, Any], name: str) -> dict[int, float]:
    variant = stack["variants"].get(name)
    if variant is None:
        return {}
    return {seed: bits for seed, bits in zip(variant["seeds"], variant["bits_per_byte"]) if bits is not None}


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of their mean (Student's t); None for one value."""
    sample = Sample(list(values))
    if sample.spread is None:
        return None
    return STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * sample.spread / math.sqrt(len(values))


def verdict(values: Sequence[float] | None) -> str:
    """What differences say: fewer bits, more, or neither beyond what seeds explain."""
    if not values:
        return "nothing to compare with"
    half = interval(values)
    if half is None:
        return "one seed: open"
    centre = sum(values) / len(values)
    if abs(centre) <= half:
        return "not told apart"
    return "better" if centre < 0 else "worse"


def growth(values: Sequence[float]) -> float:
    """How many times the last tenth of a profile over depth is the first tenth."""
    n = max(1, len(values) // 10)
    first, last = sum(values[:n]) / n, sum(values[-n:]) / n
    return last / first if first else math.inf


def unevenness(values: Sequence[float]) -> float:
    """The largest of a profile over its mean."""
    return max(values) * len(values) / sum(values) if sum(values) else math.inf

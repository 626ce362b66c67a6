"""All runs of a scale: choose what a rule leaves open, train, time.  Done runs are kept, broken ones gone on with."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.balancing import skew, texts, timing
from experiments.balancing.recipes import LOSS_MARGIN, RULES, TUNING_SEED, Scale
from experiments.balancing.train import resolve
from perilune.cli.ablate import check_kept, train_all
from perilune.train.folder import write_json

PROGRAM = ("-m", "experiments.balancing.train")
MOST_PER_GPU = 6  # more wait for one another's launches
LATE = 0.25  # the share of a run's steps that "late" means


def train_scale(scale: Scale, home: Path, devices: list[str], jobs: int | None, console: Console) -> None:
    """Everything that a scale's figures need, below `home`."""
    jobs = jobs or places(scale, devices)
    with console.status("taking the library's prose and code apart, training the tokenizer"):
        texts.prepare(scale, home)
    for seed in skewed_seeds(scale):
        with console.status(f"skewing the routers of seed {seed}"):
            skew.prepare(scale, seed, home, devices[0])
        torch.cuda.empty_cache()  # for the runs, which are other processes; without a GPU it does nothing
    tuning = dict(command(scale, home, *case) for case in tuning_cases(scale))
    if tuning:
        console.print(f"{scale.name}: {len(tuning)} runs on seed {TUNING_SEED} choose steps and coefficients")
        train_all(tuning, jobs, devices, console, PROGRAM)
    chosen = kept_choices(home)
    for rule, situations in choose(scale, home).items():
        chosen[rule] = {**chosen.get(rule, {}), **situations}
    write_json(home / "chosen.json", chosen)
    runs = dict(command(scale, home, *case) for case in cases(scale, chosen))
    console.print(f"{scale.name}: {len(runs)} runs, {jobs} at a time on {', '.join(devices)}")
    train_all(runs, jobs, devices, console, PROGRAM)
    timing.time_rules(scale, chosen, home, devices[0], console)


def skewed_seeds(scale: Scale) -> list[int]:
    """Those that begin from a skewed router in some run."""
    tuned = any(RULES[rule].tuned for rule in scale.rules) and "skewed" in scale.tuned_in
    return [*(range(scale.seeds) if "skewed" in scale.situations else ()), *[TUNING_SEED] * tuned]


def kept_choices(home: Path) -> dict[str, Any]:
    """What was chosen before, for other rules or in other situations."""
    path = home / "chosen.json"
    return json.loads(path.read_text()) if path.exists() else {}


Case = tuple[str, str, float | None, int]
"""Situation, rule, what was chosen for it or is tried, seed."""


def tuning_cases(scale: Scale) -> Iterable[Case]:
    for situation in scale.tuned_in:
        for rule in scale.rules:
            for candidate in RULES[rule].candidates:
                yield situation, rule, candidate, TUNING_SEED


def cases(scale: Scale, chosen: dict[str, Any]) -> Iterable[Case]:
    """One seed of everything before the second of anything."""
    for seed in range(scale.seeds):
        for situation in scale.situations:
            for rule in scale.rules:
                yield situation, rule, chosen_for(rule, situation, chosen), seed


def chosen_for(rule: str, situation: str, chosen: dict[str, Any]) -> float | None:
    if rule not in chosen:
        return None
    by_situation = {where: entry["chosen"] for where, entry in chosen[rule].items()}
    return by_situation.get(situation, next(iter(by_situation.values())))


def folder_of(home: Path, situation: str, rule: str, candidate: float | None, seed: int) -> Path:
    told = f"-{candidate:g}" if seed == TUNING_SEED and candidate is not None else ""
    return home / situation / f"{rule.replace(' ', '-')}{told}-seed{seed}"


def command(scale: Scale, home: Path, *case: Any) -> tuple[Path, list[str]]:
    """The run's folder and the words that train it.  Raises ConfigError where another run is there."""
    situation, rule, candidate, seed = case
    words = [scale.name, situation, rule, "-" if candidate is None else str(candidate), str(seed), str(home)]
    folder = folder_of(home, *case)
    check_kept(folder, resolve(*words))
    return folder, ["train", *words, "--out", str(folder)]


def choose(scale: Scale, home: Path) -> dict[str, Any]:
    """For each rule that leaves something open, what was best in each situation it was tried in, and all candidates.

    The candidate with the lowest late Gini of single steps, worst layer, among those whose held-out bits are within
    LOSS_MARGIN of the best's.
    """
    chosen: dict[str, Any] = {}
    for rule in scale.rules:
        for situation in scale.tuned_in if RULES[rule].tuned else ():
            tried = {c: read(folder_of(home, situation, rule, c, TUNING_SEED)) for c in RULES[rule].candidates}
            bits = {c: mean_bits(run["result"]) for c, run in tried.items()}
            uneven = {c: worst_late(run["loads"], "gini")[0] for c, run in tried.items()}
            allowed = [c for c in tried if bits[c] <= (1 + LOSS_MARGIN) * min(bits.values())]
            table = {f"{c:g}": {"bits_per_byte": round(bits[c], 4), "gini": round(uneven[c], 4)} for c in tried}
            best = min(allowed, key=lambda c: uneven[c])
            chosen.setdefault(rule, {})[situation] = {"chosen": best, "tried": table}
    return chosen


def read(folder: Path) -> dict[str, Any]:
    """A finished run: its result, its loads and losses, a line a step."""
    texts = {name: (folder / f"{name}.jsonl").read_text() for name in ("loads", "metrics")}
    lines = {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}
    return {"result": json.loads((folder / "result.json").read_text()), **lines}


def mean_bits(result: dict[str, Any]) -> float:
    """Bits per byte, prose and code counting alike."""
    return sum(result["bits_per_byte"].values()) / len(result["bits_per_byte"])


def worst_late(loads: list[dict[str, Any]], figure: str) -> tuple[float, int]:
    """The mean over the last LATE of the steps in the layer where that is highest, and which layer that is."""
    late = loads[-max(1, round(LATE * len(loads))) :]
    means = [sum(layer) / len(late) for layer in zip(*(line[figure] for line in late))]
    worst = max(range(len(means)), key=means.__getitem__)
    return means[worst], worst


def places(scale: Scale, devices: list[str]) -> int:
    """How many runs at a time: as many as fit the GPUs' memory, at most six each and one a core; on a CPU one a core
    of the first two."""
    cores = os.cpu_count() or 1
    gpus = [torch.device(device) for device in devices if device.startswith("cuda")]
    if not gpus:
        return min(2, cores)
    fit = [int(0.9 * torch.cuda.mem_get_info(gpu)[0] / 1e9 / scale.gigabytes) for gpu in gpus]
    return max(1, min(cores, sum(min(MOST_PER_GPU, max(1, n)) for n in fit)))

"""What all runs have found, as one JSON: answers pooled over seeds, losses by position, jolts where stages begin."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.ladder.recipes import SCALES, VARIANTS, Scale
from experiments.ladder.train import case_file
from perilune.report.variants import Sample

Cell = dict[str, Any]


def collect(home: Path) -> dict[str, Any]:
    """Of everything finished below `home`; scales and variants that are not there are left out."""
    found: dict[str, Any] = {"scales": {}}
    for name, scale in SCALES.items():
        variants = {}
        for variant in VARIANTS:
            files = [case_file(home / name, variant, seed) for seed in range(scale.seeds)]
            made = [json.loads(file.read_text()) for file in files if file.exists()]
            if made:
                variants[variant] = variant_figures(made)
        if variants:
            found["scales"][name] = {**scale_figures(scale), "variants": variants}
    return found


def scale_figures(scale: Scale) -> dict[str, Any]:
    config = scale.model()
    return {
        "layers": config.num_hidden_layers, "width": config.hidden_size, "experts": config.num_experts,
        "vocab_size": scale.vocab_size, "words": scale.words, "lengths": list(scale.lengths), "bf16": scale.bf16,
        "position_rows": scale.position_rows, "look_tokens": scale.look_tokens,
        "stages": [
            {"context": s.context, "batch_tokens": s.batch_tokens, "steps": s.steps, "lr": s.lr, "lr_end": s.lr_end}
            for s in scale.stages
        ],
    }  # fmt: skip


def variant_figures(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one variant's seeds."""
    first = made[0]
    return {
        "seeds": [run["seed"] for run in made], "parameters": first["parameters"], "machine": first["machine"],
        "seconds": [round(run["seconds"], 1) for run in made],
        "half_life": [mean(values) for values in zip(*(run["half_life"] for run in made))],
        "stages": [stage_figures(stages) for stages in zip(*(run["stages"] for run in made))],
        "jolts": [[jolt(run, stage["name"]) for run in made] for stage in first["stages"][1:]],
        "looks": [
            {"tokens": looks[0]["tokens"], "nats": [look["nats"] for look in looks]}
            for looks in zip(*(run["looks"] for run in made))
        ],
        "rates": thinned([[step["tokens"], short(step["lr"])] for step in first["steps"]]),
    }  # fmt: skip


def stage_figures(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was asked after a stage, over seeds."""
    first = stages[0]
    return {
        "name": first["name"], "context": first["context"], "tokens": first["tokens"],
        "cells": [pooled(cells) for cells in zip(*(stage["cells"] for stage in stages))],
        "positions": [
            {
                "from": b[0]["from"], "to": b[0]["to"],
                **{key: [round(bucket[key], 4) for bucket in b] for key in ("nats", "fresh")},
            }
            for b in zip(*(stage["positions"] for stage in stages))
        ],
    }  # fmt: skip


def pooled(cells: Sequence[Cell]) -> Cell:
    """The same questions' answers of several seeds, together; `by_seed`, how many of them were right."""
    first = cells[0]
    return {
        **{key: first[key] for key in ("task", "form", "length", "chance")},
        "asked": sum(cell["asked"] for cell in cells), "right": sum(cell["right"] for cell in cells),
        "by_seed": [cell["right"] / cell["asked"] for cell in cells],
        "depths": summed([cell["depths"] for cell in cells]), "hops": summed([cell["hops"] for cell in cells]),
    }  # fmt: skip


def summed(tables: Sequence[list[list[int]]]) -> list[list[int]]:
    return [[sum(values) for values in zip(*pairs)] for pairs in zip(*tables)]


def jolt(run: dict[str, Any], stage: str) -> dict[str, float]:
    """What a stage's beginning did to a run: by how much the held-out loss rose above what it was at most, and what it
    had come to in the end; the largest gradient in the stage's first quarter, beside the median before."""
    looks = [look["nats"] for look in run["looks"] if look["stage"] == stage]
    names = [entry["name"] for entry in run["stages"]]
    before = [s["grad_norm"] for s in run["steps"] if s["stage"] == names[names.index(stage) - 1]]
    own = [s["grad_norm"] for s in run["steps"] if s["stage"] == stage]
    usual = statistics.median(before[-max(1, len(before) // 4) :])
    return {
        "rise": round(max(looks) - looks[0], 4), "change": round(looks[-1] - looks[0], 4),
        "gradient": round(max(own[: max(1, len(own) // 4)]) / usual, 3),
    }  # fmt: skip


def mean(values: Sequence[float]) -> float:
    return short(sum(values) / len(values))


def short(value: float) -> float:
    return float(f"{value:.4g}")


def thinned(points: list[list[float]], most: int = 200) -> list[list[float]]:
    every = -(-len(points) // most)
    return points[::every] + points[-1:] * (len(points) % every != 1 and every > 1)


# what it says


def accuracy(cell: Cell) -> float:
    return cell["right"] / cell["asked"]


def error(cell: Cell) -> float:
    """The standard error of `accuracy`: from how seeds differ, or of one seed from the number of questions, one right
    and one wrong answer added, for a few right ones are no certainty.  Of several seeds the larger of both."""
    likely = (cell["right"] + 1) / (cell["asked"] + 2)
    drawn = math.sqrt(likely * (1 - likely) / (cell["asked"] + 2))
    spread = Sample(cell["by_seed"]).spread
    return drawn if spread is None else max(drawn, spread / math.sqrt(len(cell["by_seed"])))


def cells_of(stage: dict[str, Any], task: str, form: str) -> list[Cell]:
    return [cell for cell in stage["cells"] if (cell["task"], cell["form"]) == (task, form)]


def beyond(stage: dict[str, Any], task: str, form: str) -> tuple[Cell | None, Cell | None]:
    """Answers at all lengths up to the trained one, and at all above; None where none was asked."""
    cells = cells_of(stage, task, form)
    parts = ([c for c in cells if (c["length"] > stage["context"]) is above] for above in (False, True))
    inside, outside = (together(part) for part in parts)
    return inside, outside


def together(cells: Sequence[Cell]) -> Cell | None:
    """Answers at several lengths as one cell."""
    if not cells:
        return None
    return {
        "asked": sum(cell["asked"] for cell in cells), "right": sum(cell["right"] for cell in cells),
        "by_seed": [sum(values) / len(values) for values in zip(*(cell["by_seed"] for cell in cells))],
    }  # fmt: skip


def position_rise(stage: dict[str, Any]) -> Sample | None:
    """Nats a token in all positions beyond the trained context, read in one go, less those of the same tokens read in
    pieces of that context: above 0 reading on does harm."""
    outside = [b for b in stage["positions"] if b["from"] >= stage["context"]]
    if not outside:
        return None
    tokens = [b["to"] - b["from"] for b in outside]
    return Sample([
        sum(n * (b["nats"][i] - b["fresh"][i]) for n, b in zip(tokens, outside)) / sum(tokens)
        for i in range(len(outside[0]["nats"]))
    ])  # fmt: skip

"""Whole run folders from seeded formulas, as training leaves them: a healthy one, a sick one, and seeds of variants."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

STAGES = (  # name, context, tokens, peak rate
    ("short 256", 256, 700_000, 8e-3),
    ("middle 1024", 1024, 350_000, 4e-3),
    ("long 4096", 4096, 150_000, 1.5e-3),
)
BATCH = 4096
HEADS, EXPERTS = 4, 64
KDA, MOE = (0, 1, 2, 4, 5, 6), (1, 2, 3, 4, 5, 6, 7)
LAYERS = 8
HOSTILE = '<script>alert("x")</script> & \'quoted\' "text" http://evil.example/x.js'


def config(seed: int = 0, kind: str = "quantile", block: int | None = 2) -> dict[str, Any]:
    return {
        "model": {
            "hidden_size": 128, "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "attn_res_block_size": block,
            "linear_attn_config": {"num_heads": HEADS, "gate_lower_bound": -5.0},
            "balance": {"kind": kind, "options": {}},
        },
        "stages": [
            {"name": name, "context": context, "tokens": tokens, "batch_tokens": BATCH, "lr": lr, "lr_end": lr / 4}
            for name, context, tokens, lr in STAGES
        ],
        "data": {"vocab_size": 2048},
        "seed": seed,
    }  # fmt: skip


def metrics(seed: int = 0, loss: float = 0.0, uneven: float = 0.05, dead: float = 0.0) -> list[dict[str, Any]]:
    """The lines of a run whose loss ends higher by `loss` and whose Gini ends near `uneven`."""
    rng = np.random.default_rng(seed)
    lines, tokens, step = [], 0, 0
    for place, (name, _, stage_tokens, peak) in enumerate(STAGES):
        steps = round(stage_tokens / BATCH)
        for i in range(steps):
            step, tokens = step + 1, tokens + BATCH
            u = (i + 1) / steps
            learned = 2.05 + loss + 5.5 * math.exp(-tokens / 60_000) + 1.1 * math.exp(-tokens / 500_000)
            nats = learned + 0.15 * (place > 0) * math.exp(-i / 6) + rng.normal(0, 0.06)
            lines.append(
                {
                    "step": step, "stage": name, "tokens": tokens,
                    "lr": peak * (0.25 + 0.375 * (1 + math.cos(math.pi * u))),
                    "seconds": (0.6 + 0.25 * place) * math.exp(rng.normal(0, 0.05)) * (5 if i == 0 else 1),
                    "losses": {"next_token": nats, "mtp": nats + 0.4 + 1.2 * math.exp(-tokens / 90_000)}
                    | ({"answers": 0.5 + 3.5 * math.exp(-tokens / 200_000)} if i % 3 else {}),
                    "grad_norm": 0.4 + 1.5 * math.exp(-step / 20) + abs(rng.normal(0, 0.05)),
                    "gini": uneven + 0.2 * math.exp(-step / 12) + abs(rng.normal(0, 0.004)),
                    "max_violation": 4 * uneven + 0.8 * math.exp(-step / 15) + abs(rng.normal(0, 0.03)), "dead": dead,
                }
            )  # fmt: skip
    return lines


def sublayers() -> list[str]:
    return [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("attention", "feed_forward")]


def depth_attention(rng: np.random.Generator, block: int | None) -> list[dict[str, Any]]:
    if block is None:
        return []
    rows = []
    for i, name in enumerate(sublayers()):
        n = 1 if i == 0 else 1 + -(-i // (2 * block))  # the embedding, finished blocks, the live sum
        scores = rng.normal(0, 0.7, n) + 0.8 * (np.arange(n) == n - 1)
        rows.append({"sublayer": name, "weights": (np.exp(scores) / np.exp(scores).sum()).tolist()})
    return rows


def snapshots(
    seed: int = 0, bits: float = 1.53, uneven: float = 0.05, dead: int = 0, block: int | None = 2
) -> list[dict[str, Any]]:
    lines, tokens, steps = [], 0, 0
    for place, (name, _, stage_tokens, _) in enumerate(STAGES):
        rng = np.random.default_rng([seed, place])
        steps += round(stage_tokens / BATCH)
        tokens = steps * BATCH
        loads = np.clip(rng.normal(1, 1.8 * uneven, (len(MOE), EXPERTS)), 0, None)
        loads[0, :dead] = 0
        growth = 1 if block else 1.35
        lines.append(
            {
                "step": steps, "stage": name, "tokens": tokens, "bits_per_byte": bits + 0.4 * 0.35**place,
                "expert_load": {str(layer): row.tolist() for layer, row in zip(MOE, loads)},
                "depth_attention": depth_attention(rng, block),
                "half_life": {
                    str(layer): [
                        [m / (2 + rng.random()), m, m * (2 + rng.random())]
                        for m in 10 ** (0.3 + 2.6 * np.sort(rng.random(HEADS)) + 0.15 * place)
                    ]
                    for layer in KDA
                },
                "activation_rms": [
                    {
                        "sublayer": s, "input": (0.5 + 0.03 * i) * growth**i,
                        "output": (0.3 + 0.05 * rng.random()) * growth**i,
                    }
                    for i, s in enumerate(sublayers())
                ],
                "state_rms": {str(layer): (0.05 + 0.1 * rng.random(HEADS)).tolist() for layer in KDA},
            }
        )  # fmt: skip
    return lines


def accuracies(rng: np.random.Generator, reach: float, chance: float) -> list[dict[str, Any]]:
    """A task that is solved up to a length near `reach` and fades beyond it."""
    rows = []
    for length in (256, 512, 1024, 2048, 4096, 8192, 16384):
        level = chance + (0.98 - chance) / (1 + (length / reach) ** 2)
        places = np.clip(level + rng.normal(0, 0.03, 8), 0, 1)
        rows.append(
            {
                "length": length, "chance": chance, "asked": 320, "accuracy": float(places.mean()),
                "positions": [
                    {"from": i / 8, "to": (i + 1) / 8, "asked": 40, "accuracy": float(p)} for i, p in enumerate(places)
                ],
            }
        )  # fmt: skip
    return rows


def loss_by_position(rng: np.random.Generator, rise: float) -> list[dict[str, Any]]:
    curves = []
    for context in (1024, 4096, 16384):
        edges = [0, *(2**k for k in range(4, int(math.log2(context)) + 1))]
        curves.append(
            {
                "context": context,
                "buckets": [
                    {
                        "from": a, "to": b, "tokens": 40 * (b - a),
                        "nats": 1.75 + 2.2 / math.sqrt(1 + b / 24) + rise * max(0, math.log2(b / 4096))
                        + rng.normal(0, 0.01),
                    }
                    for a, b in pairwise(edges)
                ],
            }
        )  # fmt: skip
    return curves


def result(
    seed: int = 0, bits: float = 1.53, gini: float = 0.06, dead: int = 0, reach: float = 60_000, rise: float = 0.0
) -> dict[str, Any]:
    rng = np.random.default_rng([seed, 99])
    return {
        "bits_per_byte": {"perilune": bits, "gzip -9": 1.958, "xz -9e": 1.662, "order-5 Kneser-Ney": 1.701},
        "expert_load": {"gini": gini, "max_violation": 4 * gini, "dead_experts": dead},
        "tokens": 1_200_128,
        "seed": seed,
        "seconds": 421.3,
        "parameters": 4_418_304,
        "machine": {"torch": "2.13.0", "python": "3.11.2", "device": "cpu", "threads": 2},
        "long_context": {
            "trained": 4096,
            "tasks": {
                "needle": accuracies(rng, reach, 1 / 64),
                "variables": accuracies(rng, reach / 4, 0.05),
                "aggregation": accuracies(rng, reach / 8, 0.1),
                "files": accuracies(rng, reach / 2, 0.02),
            },
            "loss_by_position": loss_by_position(rng, rise),
        },
        "samples": [
            {"prompt": "def ", "text": "read(self, size=-1):\n    if self._closed:\n        raise ValueError\n"},
            {"prompt": "class ", "text": "Reader:\n    def __init__(self, stream):\n        self.stream = 0\n"},
            {"prompt": "import ", "text": "os\nimport sys\nfrom collections import deque\n"},
        ],
    }  # fmt: skip


def write(folder: Path, files: dict[str, Any]) -> Path:
    """A run's folder with these files: a dict is JSON, a list is JSON lines, text is written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content)
        elif isinstance(content, dict):
            content = json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def healthy(folder: Path, seed: int = 0, kind: str = "quantile", block: int | None = 2, **worse: float) -> Path:
    """A run that went well; `worse` adds to its `bits` per byte and sets its `gini` and its `dead` experts."""
    noise = np.random.default_rng([seed, 7]).normal(0, 0.004)
    bits, uneven, dead = 1.53 + worse.get("bits", 0.0) + noise, worse.get("gini", 0.05), int(worse.get("dead", 0))
    return write(
        folder,
        {
            "run.json": config(seed, kind, block),
            "metrics.jsonl": metrics(seed, worse.get("bits", 0.0) * 2, uneven, dead / EXPERTS / len(MOE)),
            "snapshots.jsonl": snapshots(seed, bits, uneven, dead, block),
            "result.json": result(seed, bits, uneven, dead),
        },
    )


def sick(folder: Path) -> Path:
    """NaN losses, spikes, dead experts, a growing gradient, slow steps, saturated heads, hostile text, half a line."""
    steps = metrics(3, uneven=0.08)
    for i, line in enumerate(steps):
        line["gini"] = 0.08 + 0.4 * i / len(steps)
        line["grad_norm"] *= math.exp(3.5 * i / len(steps))
        line["dead"] = 0.15 if i > 150 else 0.0
        if i % 9 == 5:
            line["seconds"] *= 4
        if i in (60, 120, 150):
            line["losses"]["next_token"] += 2.5
        if i > 280:
            line["losses"] = {"next_token": math.nan, "mtp": math.nan}
    taken = snapshots(3, bits=2.1, uneven=0.3, dead=12)
    taken[-1]["bits_per_byte"] = 2.6
    taken[-1]["stage"] = HOSTILE
    taken[-1]["half_life"]["0"] = [[0.1387, 0.139, 0.14]] * HEADS
    for row in taken[-1]["depth_attention"]:
        if len(row["weights"]) > 1:
            row["weights"] = [0.01, *[0.01] * (len(row["weights"]) - 2), 0.99 - 0.01 * (len(row["weights"]) - 2)]
    for i, row in enumerate(taken[-1]["activation_rms"]):
        row["input"] *= 1.6**i
    ending = result(3, bits=2.2, gini=0.48, dead=67, reach=3000, rise=0.8)
    ending["samples"] = [{"prompt": HOSTILE, "text": HOSTILE + "\n</pre></main>"}]
    ending["machine"]["device"] = HOSTILE
    settings = config(3)
    settings["data"]["source"] = HOSTILE
    return write(
        folder,
        {
            "run.json": settings,
            "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in steps) + json.dumps(steps[-1])[:70],
            "snapshots.jsonl": taken,
            "result.json": ending,
        },
    )


def going(folder: Path, kind: str = "quantile") -> Path:
    """A run in the middle of its second stage, whose last line is half-written."""
    steps = metrics(1)[:215]
    text = "".join(json.dumps(line) + "\n" for line in steps[:-1]) + json.dumps(steps[-1])[:40]
    return write(folder, {"run.json": config(1, kind), "metrics.jsonl": text, "snapshots.jsonl": snapshots(1)[:1]})

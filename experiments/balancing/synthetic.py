"""Every rule on a synthetic router: how even it keeps loads, by tokens a step and number of experts; and how fast it
mends a skewed start.

    s_ij = sigmoid(a p_j + 0.7 (sqrt(c) d_{doc(i), j} + sqrt(1 - c) n_ij)),    p <- sqrt(1 - v^2) p + v w

p, d, n, w are drawn from N(0, 1): popularity of experts, the taste of a document, of a token, and a drift as training
has.  Tokens are independent (c = 0), or half of what they want is their document's (c = 1/2, four documents a step).
Of 896 experts, 16 taken by each of 16,384 tokens, 176 are dead without a bias at a = 0.7 (Gini 0.87), 711 at a = 1.8
(0.97).
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from perilune.nn.balancer import Balancer, BandBalancer, QuantileBalancer, SignBalancer
from perilune.nn.load import dead_experts, gini, max_violation, sampling_floor
from perilune.ops import quantile_bias
from perilune.report.words import duration
from perilune.train.folder import write_json

SKEW, NOISE, CORRELATION, DOCUMENTS, DRIFT = 1.8, 0.7, 0.5, 4, 0.005
EXPERTS = {16: 2, 64: 4, 256: 8, 896: 16}  # and how many a token takes
TOKENS = (128, 512, 2048, 8192)
STEPS, SETTLED = 40, 24  # of a cell, and how many of its last steps are judged
FEW_STEPS, FEW_SETTLED = 24, 12  # where a step is large and chance small
LARGE = 2**20  # scores a step
SIGN_STEPS = (1e-3, 3e-3, 1e-2)

Rule = Callable[[int, int], Balancer]
STEADY: dict[str, Rule] = {
    "plain": lambda E, k: QuantileBalancer(E, k, decay=None),
    "ema": lambda E, k: QuantileBalancer(E, k, decay=None, ema=0.9),
    "pooled": lambda E, k: QuantileBalancer(E, k),
    "both": lambda E, k: QuantileBalancer(E, k, ema=0.9),
    **{f"sign {s:g}": lambda E, k, s=s: SignBalancer(E, k, step=s) for s in SIGN_STEPS},
    "band": lambda E, k: BandBalancer(E, k),
}
"""What the map compares: quantile balancing plain, with its remedies for small steps, and the rules with a step."""
MENDING: dict[str, tuple[Rule, int]] = {
    "plain": (STEADY["plain"], 10),
    "pooled": (STEADY["pooled"], 10),
    "ema": (STEADY["ema"], 20),
    "sign 0.001": (STEADY["sign 0.001"], 60),
    "sign 0.01": (STEADY["sign 0.01"], 60),
    "sign 0.03": (lambda E, k: SignBalancer(E, k, step=3e-2), 60),
    "band": (STEADY["band"], 60),
}
"""For how many updates each is watched from a skewed start."""
MENDED = {"experts": 896, "top_k": 16, "tokens": 16_384}
MENDED_SKEWS = (0.7, 1.8)


@dataclass(frozen=True)
class Cell:
    experts: int
    top_k: int
    tokens: int
    correlated: bool

    @property
    def name(self) -> str:
        return f"{'correlated' if self.correlated else 'independent'}-{self.experts}-{self.tokens}"

    @property
    def scores(self) -> int:
        return self.experts * self.tokens

    @property
    def steps(self) -> tuple[int, int]:
        """All, and those judged at the end."""
        return (STEPS, SETTLED) if self.scores <= LARGE else (FEW_STEPS, FEW_SETTLED)

    @property
    def seeds(self) -> int:
        return max(1, min(3, 2**19 // self.scores))


CELLS = [Cell(E, k, m, c) for c in (False, True) for E, k in EXPERTS.items() for m in TOKENS]


class Router:
    """Batches of scores `[tokens, experts]`, one a step."""

    def __init__(
        self, experts: int, tokens: int, correlated: bool, drift: float, seed: int, skew: float = SKEW
    ) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.tokens, self.correlated, self.drift, self.skew = tokens, correlated, drift, skew
        self.popular = self._normal(experts)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)

    def batch(self) -> Tensor:
        """The step's scores; then popularity drifts."""
        scores = self._scores(self.tokens, DOCUMENTS if self.correlated else self.tokens)
        self.popular = math.sqrt(1 - self.drift**2) * self.popular + self.drift * self._normal(len(self.popular))
        return scores

    def _scores(self, tokens: int, documents: int) -> Tensor:
        wish = self._normal(tokens, len(self.popular))
        if documents < tokens:
            taste = self._normal(documents, len(self.popular)).repeat_interleave(tokens // documents, 0)
            wish.mul_(math.sqrt(1 - CORRELATION)).add_(taste, alpha=math.sqrt(CORRELATION))
        return wish.mul_(NOISE).add_(self.popular, alpha=self.skew).sigmoid_()

    def ideal(self, top_k: int) -> Tensor:
        """The bias that balances this router, from thousands of tokens of as many documents."""
        bias = torch.zeros(len(self.popular))
        for _ in range(6):
            bias = quantile_bias(self._scores(4096, 4096), bias, top_k)
        return bias


def step(balancer: Balancer, scores: Tensor) -> Tensor:
    """Routes, observes, updates; the loads `[experts]` that the bias of before gave."""
    balancer.observe(scores, (scores + balancer.bias).topk(balancer.top_k).indices)  # as `route`, but for ties
    balancer.update()
    return balancer.loads.clone()


def steady(cell: Cell, seed: int) -> dict[str, dict[str, float]]:
    """By rule: Gini of single steps (mean), and of all judged steps' loads together.

    All start from the bias that is right at first, so that what differs is how they hold it.
    """
    router = Router(cell.experts, cell.tokens, cell.correlated, DRIFT, seed)
    bias = router.ideal(cell.top_k)
    balancers = {name: rule(cell.experts, cell.top_k) for name, rule in STEADY.items()}
    for balancer in balancers.values():
        balancer.bias.copy_(bias)
    loads: dict[str, list[Tensor]] = {name: [] for name in balancers}
    steps, judged = cell.steps
    for _ in range(steps):
        scores = router.batch()
        for name, balancer in balancers.items():
            loads[name].append(step(balancer, scores))
    return {
        name: {
            "step": sum(map(gini, history[-judged:])) / judged,
            "window": gini(torch.stack(history[-judged:]).sum(0)),
        }
        for name, history in loads.items()
    }


def cell_figures(cell: Cell) -> dict[str, Any]:
    """A cell of the map: means over its seeds, and what chance alone shows of independent tokens."""
    found = [steady(cell, seed) for seed in range(cell.seeds)]
    mean_load = cell.tokens * cell.top_k / cell.experts
    return {
        "experts": cell.experts, "top_k": cell.top_k, "tokens": cell.tokens, "correlated": cell.correlated,
        "steps": cell.steps[1], "seeds": cell.seeds,
        "floor": {
            "step": round(sampling_floor(mean_load, cell.experts).gini, 4),
            "window": round(sampling_floor(mean_load * cell.steps[1], cell.experts).gini, 4),
        },
        "gini": {
            rule: {key: round(sum(one[rule][key] for one in found) / len(found), 4) for key in ("step", "window")}
            for rule in STEADY
        },
    }  # fmt: skip


def mending_file(folder: Path, name: str, skew: float) -> Path:
    return folder / f"mending-{skew:g}-{name.replace(' ', '-')}.json"


def mending(name: str, skew: float) -> dict[str, Any]:
    """From a skewed router without a bias: figures of the routing after 0, 1, 2, ... updates by the rule."""
    rule, updates = MENDING[name]
    router = Router(MENDED["experts"], MENDED["tokens"], correlated=False, drift=0.0, seed=0, skew=skew)
    balancer = rule(MENDED["experts"], MENDED["top_k"])
    history = [step(balancer, router.batch()) for _ in range(updates + 1)]
    return {
        "gini": [round(gini(loads), 4) for loads in history],
        "max_violation": [round(max_violation(loads), 3) for loads in history],
        "dead": [dead_experts(loads) for loads in history],
    }


def measure(folder: Path, console: Console) -> None:
    """All cells and all mending, a file each; those that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs: dict[Path, tuple[float, Callable[[], dict[str, Any]]]] = {}
    for cell in CELLS:
        work = cell.scores * cell.steps[0] * cell.seeds * len(STEADY)
        jobs[folder / f"{cell.name}.json"] = work, lambda cell=cell: cell_figures(cell)
    for skew, (name, (_, updates)) in product(MENDED_SKEWS, MENDING.items()):
        work = MENDED["experts"] * MENDED["tokens"] * (updates + 1)
        jobs[mending_file(folder, name, skew)] = work, lambda name=name, skew=skew: mending(name, skew)
    left = {path: job for path, job in jobs.items() if not path.exists()}
    if len(left) < len(jobs):
        console.print(f"map: {len(jobs) - len(left)} of {len(jobs)} parts are there already")
    total, done, start = sum(work for work, _ in left.values()), 0.0, time.monotonic()
    for number, (path, (work, job)) in enumerate(left.items(), 1):
        write_json(path, job())
        done += work
        seconds = time.monotonic() - start
        rest = duration(seconds / done * (total - done))
        console.print(f"map: {path.stem}, {number} of {len(left)}, {done / total:.0%}; {rest} left", highlight=False)


def read(folder: Path) -> dict[str, Any] | None:
    """What `measure` has written, if all of it is there."""
    paths = [folder / f"{cell.name}.json" for cell in CELLS]
    mended = {(skew, name): mending_file(folder, name, skew) for skew in MENDED_SKEWS for name in MENDING}
    if not all(path.exists() for path in (*paths, *mended.values())):
        return None
    starts: dict[str, Any] = {f"{skew:g}": {} for skew in MENDED_SKEWS}
    for (skew, name), path in mended.items():
        starts[f"{skew:g}"][name] = json.loads(path.read_text())
    return {
        "cells": [json.loads(path.read_text()) for path in paths],
        "mending": {"router": MENDED, "skews": starts},
    }


def families(cell: dict[str, Any], key: str) -> Iterator[tuple[str, float]]:
    """The rules of a cell with their Gini, the sign rule with the best of its steps."""
    found = {rule: values[key] for rule, values in cell["gini"].items()}
    yield from ((rule, value) for rule, value in found.items() if not rule.startswith("sign"))
    yield "sign", min(value for rule, value in found.items() if rule.startswith("sign"))

"""A training step as `perilune train` makes it: tokens a second, use of the machine, memory, where the time goes.

Beside it stands the same model composed from flash-linear-attention's layers and stock parts of PyTorch, on the same
batches.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, Protocol

import numpy as np
import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from perilune import recipes
from perilune.bench.case import DEVICE, Sheet
from perilune.bench.contest import reason, table_of
from perilune.bench.peer import parts
from perilune.bench.peer.trainer import PeerTrainer
from perilune.bench.progress import Steps, Tell, quiet
from perilune.bench.trace import GAPS, Spent, by_kind, read
from perilune.bench.versions import installed
from perilune.data.packing import Batch, packed
from perilune.models.k3.flops import TRAINING, flops_per_token
from perilune.ops.cross_entropy import IGNORED
from perilune.train.config import Run, Stage
from perilune.train.feed import Feed
from perilune.train.loop import Progress, Trainer
from perilune.train.metrics import Metrics

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations a second, by what a card's name contains."""
GIB = 2**30


@dataclass(frozen=True)
class Work:
    """A step of a recipe's first stage: documents as long as its context, so many tokens of them."""

    recipe: str
    context: int
    tokens: int
    compile_norms: bool = False
    by: str = "perilune"
    """Whose step: one of the contenders."""

    def __str__(self) -> str:
        name = f"{self.recipe}, {self.tokens // self.context} x {self.context:,} tokens"
        name += ", compiled norms" if self.compile_norms else ""
        return name if self.by == "perilune" else f"{name}, {self.by}"

    def run(self, steps: int) -> Run:
        """The recipe, for so many steps of this size."""
        made = recipes.get(self.recipe)
        stage: Stage = made.stages[0].replace(
            context=self.context, batch_tokens=self.tokens, tokens=self.tokens * steps, mix={"text": 1.0}, warmup=0.0
        )
        return made.replace(stages=(stage,), compile_norms=self.compile_norms)


class Loop(Protocol):
    """Trains a run's model."""

    def train(self, steps: int, watch: Callable[[float], None]) -> None:
        """So many steps more; `watch` is told the loss of each in turn."""


class Ours:
    """The loop that `perilune train` runs."""

    def __init__(self, run: Run, feed: Feed, device: torch.device) -> None:
        self.trainer = Trainer(run, feed, device=device)

    def train(self, steps: int, watch: Callable[[float], None]) -> None:
        last = self.trainer.steps_done + steps

        def told(progress: Progress) -> None:
            watch(progress.losses["next_token"])

        with tempfile.TemporaryDirectory() as folder, Metrics(Path(folder) / "metrics.jsonl") as metrics:
            self.trainer.train(metrics, told, stop=lambda: self.trainer.steps_done >= last)


@dataclass(frozen=True)
class Contender:
    """A way to train a recipe's model."""

    loop: Callable[[Run, Feed, torch.device], Loop]
    packages: Sequence[str]
    """Whose versions its figures belong to."""
    missing: Callable[[], str] = lambda: ""
    """Why it cannot take part, or nothing."""


CONTENDERS = {
    "perilune": Contender(Ours, ("perilune", "torch", "triton")),
    "flash-linear-attention": Contender(PeerTrainer, parts.PACKAGES, parts.missing),
}
"""The first is this library, whose faults are the benchmark's; another's are said, and the rest is timed."""

SHOWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "precision": lambda row: row["precision"],
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "ms a step": lambda row: f"{1e3 * row['median_s']:,.1f}",
    "spread of ms": lambda row: f"{1e3 * row['spread_s']:,.1f}",
    "slowest ms": lambda row: f"{1e3 * row['slowest_s']:,.1f}",
    "TFLOP/s": lambda row: f"{row['tflops']:.3g}",
    "of the peak": lambda row: "" if row["utilisation"] is None else f"{100 * row['utilisation']:.1f} %",
    "peak GiB": lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.1f}",
    "loss": lambda row: f"{row['losses'][0]:.2f} to {row['losses'][-1]:.2f}",
    "with": lambda row: "\n".join(f"{name} {version}" for name, version in row["versions"].items() if version),
}
"""What is said of a step, in the order of the table."""

ON_GPU = (
    Work("1b_8k", 8192, 8192),
    Work("1b_8k", 8192, 32_768),
    Work("1b_8k", 8192, 65_536),
    Work("1b_8k", 8192, 32_768, compile_norms=True),
    *(Work("1b_8k", 8192, tokens, by="flash-linear-attention") for tokens in (8192, 32_768, 65_536)),
)
ON_CPU = (Work("nano_128", 128, 512),)


class MadeUp(Feed):
    """Batches without text: tokens drawn by Zipf's law, anew at every step, in documents as long as the context.

    There is something to learn, how frequent each token is, so that a loss that does not fall shows a fault.
    """

    def __init__(self, run: Run) -> None:
        self._numbers = np.random.default_rng(run.seed)
        weight = 1 / np.arange(10, 10 + run.model.vocab_size)
        self._share = np.cumsum(weight / weight.sum())
        self._vocab_size = run.model.vocab_size

    def begin(self, stage: Stage) -> None:
        self._stage = stage

    def next(self) -> Batch:
        context, tokens = self._stage.context, self._stage.batch_tokens
        drawn = np.searchsorted(self._share, self._numbers.random(tokens + 1)).clip(max=self._vocab_size - 1)
        labels = drawn[1:].copy()
        labels[context - 1 :: context] = IGNORED
        return packed(drawn[:-1], labels, np.arange(0, tokens, context))


@dataclass(frozen=True)
class Training(Sheet):
    name: str = "train"
    title: str = "training steps"
    works: Sequence[Work] = field(default_factory=lambda: ON_GPU if DEVICE.type == "cuda" else ON_CPU)
    contenders: Mapping[str, Contender] = field(default_factory=lambda: dict(CONTENDERS))
    device: torch.device = DEVICE
    warmup: int = 5 if DEVICE.type == "cuda" else 2
    timed: int = 20 if DEVICE.type == "cuda" else 9
    profiled: int = 2

    def run(self, tell: Tell = quiet) -> dict[str, Any]:
        """Every amount of work in turn; one that the device has no memory for says so and the others go on, and so does
        a contender from elsewhere that is not there, fails or does not learn."""
        result: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "check": "passed",
            "passed": True,
            "times": [],
        }
        each = self.warmup + self.timed + self.profiled + 1
        steps = Steps(tell, len(self.works) * each)
        for number, work in enumerate(self.works, 1):
            ours = work.by == next(iter(self.contenders))
            row = self._row(work, steps, ours)
            steps.done = number * each
            result["times"].append({**asdict(work), "label": str(work), **row})
            gc.collect()  # a trainer is in circles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if wrong := row.get("wrong"):
                if ours:
                    return result | {"check": f"failed: {work}: {wrong}", "passed": False}
                result["times"][-1]["skipped"] = wrong
        return result

    def _row(self, work: Work, steps: Steps, ours: bool) -> dict[str, Any]:
        if why := self.contenders[work.by].missing():
            return {"skipped": why}
        try:
            return self._measured(work, steps)
        except torch.OutOfMemoryError as error:
            return {"skipped": str(error).split(". ")[0]}
        except Exception as error:
            if ours:
                raise
            return {"skipped": reason(error)}

    def _measured(self, work: Work, steps: Steps) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        steps.next(f"building {work}")
        made, contender = work.run(self.warmup + self.timed + self.profiled), self.contenders[work.by]
        loop = contender.loop(made, MadeUp(made), self.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        losses, seconds = self._timed(loop, steps)
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else None
        if wrong := fault(losses):
            return {"losses": losses, "wrong": wrong}
        kinds, wall = self._profiled(loop, steps)
        counted = {part: TRAINING * n for part, n in flops_per_token(made.model, work.context, kda_chunk=0).items()}
        middle = median(seconds)
        low, _, high = quantiles(seconds, n=4)
        flops = sum(counted.values()) * work.tokens / middle
        limit = next((limit for card, limit in PEAKS.items() if on_gpu and card in torch.cuda.get_device_name()), None)
        return {
            "precision": made.precision,
            "versions": {package: installed(package) for package in contender.packages},
            "losses": losses,
            "median_s": middle,
            "spread_s": high - low,
            "slowest_s": max(seconds),
            "runs": len(seconds),
            "tokens_per_s": work.tokens / middle,
            "flops_per_token": sum(counted.values()),
            "flops_by_part": counted,
            "tflops": flops / 1e12,
            "utilisation": None if limit is None else flops / limit,
            "peak_bytes": peak,
            "profiled_s": wall,
            "kinds": {
                kind: {
                    "seconds": spent.seconds / self.profiled,
                    "count": spent.count / self.profiled,
                    "longest": {
                        name: s / self.profiled for name, s in sorted(spent.longest.items(), key=lambda x: -x[1])[:8]
                    },
                }
                for kind, spent in kinds.items()
            },
        }

    def _timed(self, loop: Loop, steps: Steps) -> tuple[list[float], list[float]]:
        """Losses of the steps that count, and the time between their ends."""
        losses, ends = [], []

        def watch(loss: float) -> None:
            ends.append(time.perf_counter())
            losses.append(loss)
            steps.next(f"{'warming up' if len(ends) <= self.warmup else 'timing'}, step {len(ends)}")

        loop.train(self.warmup + self.timed, watch)
        begun = self.warmup - 1
        return losses[begun:], [b - a for a, b in zip(ends[begun:], ends[begun + 1 :])]

    def _profiled(self, loop: Loop, steps: Steps) -> tuple[dict[str, Spent], float]:
        """What further steps of the same loop were spent on, and their seconds; profiling slows the host a little."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with tempfile.TemporaryDirectory() as folder:
            with profile(activities=activities) as seen:
                start = time.perf_counter()
                loop.train(self.profiled, lambda loss: steps.next("profiling"))
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                wall = time.perf_counter() - start
            path = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(path))
            return by_kind(read(path), wall), wall

    def parts(self, result: dict[str, Any]) -> Iterator[Table | str]:
        if not result["passed"]:
            yield f"{self.name}: check {result['check']}\nnot timed"
            return
        timed = [row for row in result["times"] if "median_s" in row]
        for row in result["times"]:
            if "skipped" in row:
                yield f"{row['label']}: skipped: {row['skipped']}"
        if not timed:
            return
        table = table_of(f"{self.title}: medians; operations by formula", "", *(row["label"] for row in timed))
        for what, shown in SHOWN.items():
            table.add_row(what, *(shown(row) for row in timed))
        yield table
        yield from compared(timed)
        for row in timed:
            kinds = table_of(f"{row['label']}: where a step's time goes", "", "ms", "share", "number", "most of it")
            wall = row["profiled_s"] / self.profiled
            for kind, spent in row["kinds"].items():
                names = ", ".join(name.split("(")[0].split("#")[0][-28:] for name in list(spent["longest"])[:2])
                number = "" if kind == GAPS else f"{spent['count']:,.0f}"
                share = f"{100 * spent['seconds'] / wall:.1f} %"
                kinds.add_row(kind, f"{1e3 * spent['seconds']:.2f}", share, number, names)
            yield kinds


def compared(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How each of ours does beside the others at the same work."""
    for row in rows:
        for own in rows:
            same = all(row[name] == own[name] for name in ("recipe", "context", "tokens"))
            if same and own["by"] == "perilune" != row["by"]:
                ratio = own["tokens_per_s"] / row["tokens_per_s"]
                yield f"{own['label']}: {ratio:.2f} times the tokens a second of {row['by']}"


def fault(losses: Sequence[float]) -> str:
    """What is wrong with the losses of steps one after the other, or nothing: a third of them at either end is
    compared, for batches differ."""
    if not all(isfinite(loss) for loss in losses):
        return f"expected finite losses, got {losses}"
    third = max(len(losses) // 3, 1)
    first, last = mean(losses[:third]), mean(losses[-third:])
    return "" if last < first else f"expected a loss that falls, got {first:.4f}, then {last:.4f}"

"""A training step as `perilune train` makes it: tokens a second, use of the machine, memory, where the time goes."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from perilune import recipes
from perilune.bench.case import DEVICE, Sheet
from perilune.bench.contest import table_of
from perilune.bench.progress import Steps, Tell, quiet
from perilune.bench.trace import GAPS, Spent, by_kind, read
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

    def __str__(self) -> str:
        name = f"{self.recipe}, {self.tokens // self.context} x {self.context:,} tokens"
        return name + (", compiled norms" if self.compile_norms else "")

    def run(self, steps: int) -> Run:
        """The recipe, for so many steps of this size."""
        made = recipes.get(self.recipe)
        stage: Stage = made.stages[0].replace(
            context=self.context, batch_tokens=self.tokens, tokens=self.tokens * steps, mix={"text": 1.0}, warmup=0.0
        )
        return made.replace(stages=(stage,), compile_norms=self.compile_norms)


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
}
"""What is said of a step, in the order of the table."""

ON_GPU = (
    Work("1b_8k", 8192, 8192),
    Work("1b_8k", 8192, 32_768),
    Work("1b_8k", 8192, 65_536),
    Work("1b_8k", 8192, 32_768, compile_norms=True),
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
    device: torch.device = DEVICE
    warmup: int = 5 if DEVICE.type == "cuda" else 2
    timed: int = 20 if DEVICE.type == "cuda" else 9
    profiled: int = 2

    def run(self, tell: Tell = quiet) -> dict[str, Any]:
        """Every amount of work in turn; one that the device has no memory for says so and the others go on."""
        result: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "check": "passed",
            "passed": True,
            "times": [],
        }
        steps = Steps(tell, len(self.works) * (self.warmup + self.timed + self.profiled + 1))
        for work in self.works:
            try:
                row = self._measured(work, steps)
            except torch.OutOfMemoryError as error:
                row = {"skipped": str(error).split(". ")[0]}
            result["times"].append({**asdict(work), "label": str(work), **row})
            gc.collect()  # a trainer is in circles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if wrong := row.get("wrong"):
                return result | {"check": f"failed: {work}: {wrong}", "passed": False}
        return result

    def _measured(self, work: Work, steps: Steps) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        steps.next(f"building {work}")
        made = work.run(self.warmup + self.timed + self.profiled)
        trainer = Trainer(made, MadeUp(made), device=self.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        losses, seconds = self._timed(trainer, steps)
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else None
        if wrong := fault(losses):
            return {"losses": losses, "wrong": wrong}
        kinds, wall = self._profiled(trainer, steps)
        counted = {part: TRAINING * n for part, n in flops_per_token(made.model, work.context, kda_chunk=0).items()}
        middle = median(seconds)
        low, _, high = quantiles(seconds, n=4)
        flops = sum(counted.values()) * work.tokens / middle
        limit = next((limit for card, limit in PEAKS.items() if on_gpu and card in torch.cuda.get_device_name()), None)
        return {
            "precision": made.precision,
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

    def _timed(self, trainer: Trainer, steps: Steps) -> tuple[list[float], list[float]]:
        """Losses of the steps that count, and the time between their ends: the loop that `perilune train` runs."""
        losses, ends = [], []
        last = self.warmup + self.timed

        def watch(progress: Progress) -> None:
            ends.append(time.perf_counter())
            losses.append(progress.losses["next_token"])
            steps.next(f"{'warming up' if progress.step <= self.warmup else 'timing'}, step {progress.step}")

        with tempfile.TemporaryDirectory() as folder, Metrics(Path(folder) / "metrics.jsonl") as metrics:
            trainer.train(metrics, watch, stop=lambda: trainer.steps_done >= last)
        begun = self.warmup - 1
        return losses[begun:], [b - a for a, b in zip(ends[begun:], ends[begun + 1 :])]

    def _profiled(self, trainer: Trainer, steps: Steps) -> tuple[dict[str, Spent], float]:
        """What further steps of the same loop were spent on, and their seconds; profiling slows the host a little."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        for _ in range(self.profiled):
            steps.next("profiling")
        with tempfile.TemporaryDirectory() as folder, Metrics(Path(folder) / "metrics.jsonl") as metrics:
            with profile(activities=activities) as seen:
                start = time.perf_counter()
                trainer.train(metrics)
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
        for row in timed:
            kinds = table_of(f"{row['label']}: where a step's time goes", "", "ms", "share", "number", "most of it")
            wall = row["profiled_s"] / self.profiled
            for kind, spent in row["kinds"].items():
                names = ", ".join(name.split("(")[0].split("#")[0][-28:] for name in list(spent["longest"])[:2])
                number = "" if kind == GAPS else f"{spent['count']:,.0f}"
                share = f"{100 * spent['seconds'] / wall:.1f} %"
                kinds.add_row(kind, f"{1e3 * spent['seconds']:.2f}", share, number, names)
            yield kinds


def fault(losses: Sequence[float]) -> str:
    """What is wrong with the losses of steps one after the other, or nothing: a third of them at either end is
    compared, for batches differ."""
    if not all(isfinite(loss) for loss in losses):
        return f"expected finite losses, got {losses}"
    third = max(len(losses) // 3, 1)
    first, last = mean(losses[:third]), mean(losses[-third:])
    return "" if last < first else f"expected a loss that falls, got {first:.4f}, then {last:.4f}"

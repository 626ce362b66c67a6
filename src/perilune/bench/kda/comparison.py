"""The benchmark: everything is checked first, then timed, one contender at a time alone in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from math import isfinite
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from perilune.bench.case import DEVICE, Sheet
from perilune.bench.contest import reason, table_of
from perilune.bench.kda import decode
from perilune.bench.kda.check import ALLOWED, SHAPES, Verdict, check
from perilune.bench.kda.contenders import CONTENDERS, Contender
from perilune.bench.kda.drift import drift, worst
from perilune.bench.kda.problem import REGIMES, Shape, forward_backward, make, path
from perilune.bench.meter import Meter, TooSlow
from perilune.bench.progress import Steps, Tell, quiet

MIB = 2**20
LONG = Shape(1, 1 << 20, 1)


@dataclass(frozen=True)
class Comparison(Sheet):
    name: str = "kda"
    title: str = "Kimi Delta Attention, bf16, heads of 128"
    shapes: Sequence[Shape] = (Shape(1, 8192, 96), Shape(1, 65536, 32), Shape(8, 4096, 16), Shape(1, 32768, 8))
    checked: Sequence[Shape] = SHAPES
    long: Shape = LONG
    sizes: Sequence[decode.Size] = (decode.Size(64, 32), decode.Size(256, 96))
    contenders: Sequence[Contender] = CONTENDERS
    device: torch.device = DEVICE
    meter: Meter = field(default_factory=Meter)

    def run(self, tell: Tell = quiet) -> dict[str, Any]:
        present = [contender for contender in self.contenders if not contender.missing]
        rounds = len(self.checked) + 1 + len(self.shapes) * len(present) + len(self.sizes)
        steps = Steps(tell, 1 + len(REGIMES) * rounds)
        verdicts = check(present, self.device, self.checked, steps)
        ours = [contender.label for contender in present if contender.package is None]
        wrong = [f"{label}: {verdicts[label].failed}" for label in ours if verdicts[label].failed]
        steps.next("checking decoding")
        failed = "; ".join(wrong) or decode.check(self.device)
        along = {} if failed else drift(self.long, self.device, steps=steps)
        failed = failed or worst(along)
        result = {
            "name": self.name,
            "title": self.title,
            "check": f"failed: {failed}" if failed else "passed",
            "backend": path(make(self.checked[0], REGIMES[0], self.device)),
            "contenders": [self.standing(contender, verdicts.get(contender.label)) for contender in self.contenders],
            "drift": {"T": self.long.T, "errors": {} if failed else along},
            "times": [],
            "decode": [],
            "passed": not failed,
        }
        if not failed:
            able = [contender for contender in present if not verdicts[contender.label].broken]
            steps.total -= len(REGIMES) * len(self.shapes) * (len(present) - len(able))
            pairs = product(self.shapes, able)
            result["times"] = [self.time(contender, shape, steps) for shape, contender in pairs]
            result["decode"] = [self.time_step(size, steps) for size in self.sizes]
        return result

    def standing(self, contender: Contender, verdict: Verdict | None) -> dict[str, Any]:
        """How a contender came through its check."""
        if verdict is None:
            return {"label": contender.label, "skipped": contender.missing, "timed": False}
        errors = {name: off if isfinite(off) else None for name, off in verdict.errors.items()}
        return {"label": contender.label, "errors": errors, "failed": verdict.failed, "timed": not verdict.broken}

    def time(self, contender: Contender, shape: Shape, steps: Steps) -> dict[str, Any]:
        """Figures by gates, up to those at which it is too slow or fails."""
        row: dict[str, Any] = {"B": shape.B, "T": shape.T, "H": shape.H, "label": contender.label}
        row |= {"forward_ms": {}, "both_ms": {}, "peak_bytes": {}}
        if contender.graph:
            row |= {"graph_forward_ms": {}, "graph_both_ms": {}}
        end = steps.done + len(REGIMES)
        for regime in REGIMES:
            steps.next(f"timing {contender.label} at {shape_of(row)}, {regime} gates")
            try:
                self.measure(contender, shape, regime, row)
            except Exception as stop:
                if contender.package is None and not isinstance(stop, TooSlow | torch.OutOfMemoryError):
                    raise
                steps.done = end  # the other gates are left out
                return row | {"skipped": reason(stop)}
        return row

    def measure(self, contender: Contender, shape: Shape, regime: str, row: dict[str, Any]) -> None:
        """Medians of inference and of training, and what training holds, inputs and gradients included."""
        held = self.meter.held()
        problem = make(shape, regime, self.device)
        if contender.activated:
            problem = problem.activate()

        def forward() -> Tensor:
            with torch.inference_mode():
                return contender.run(problem)

        def both() -> tuple[Tensor, ...]:
            return forward_backward(contender.run, problem)

        for name, call in (("forward", forward), ("both", both)):
            row[f"{name}_ms"][regime] = self.meter.median_ms(call)
            if name == "both":
                row["peak_bytes"][regime] = self.meter.peak(call) - held
            if contender.graph:
                row[f"graph_{name}_ms"][regime] = self.meter.median_ms(self.meter.captured(call))

    def time_step(self, size: decode.Size, steps: Steps) -> dict[str, Any]:
        """Medians of a replayed step by gates."""
        ms = {}
        for regime in REGIMES:
            steps.next(f"timing a decoding step for {size.N} x {size.H} heads, {regime} gates")
            step = decode.make(size, regime, self.device)
            ms[regime] = self.meter.median_ms(self.meter.captured(step))
        return {"N": size.N, "H": size.H, "state_bytes": size.state_bytes, "ms": ms}

    def parts(self, result: dict[str, Any]) -> Iterator[Table | str]:
        if not result["passed"]:
            yield f"{self.name}: check {result['check']}\nnot timed"
            return
        yield errors_table(result["contenders"])
        for row in result["contenders"]:
            if why := row.get("skipped") or row["failed"]:
                yield f"{row['label']} is {'timed although' if row['timed'] else 'not timed:'} {why}"
        yield drift_table(result["drift"])
        yield times_table(f"{self.title}: ms; perilune on {result['backend']}", result["times"])
        for row in result["times"]:
            if why := row.get("skipped"):
                yield f"{row['label']} at {shape_of(row)}: {why}"
        yield steps_table(result["decode"])


def errors_table(standings: list[dict[str, Any]]) -> Table:
    table = table_of("largest errors, thousandths of the norm", "", *ALLOWED)
    for row in standings:
        if errors := row.get("errors"):
            table.add_row(row["label"], *(thousandths(errors[name]) if name in errors else "" for name in ALLOWED))
    table.add_row("allowed", *map(thousandths, ALLOWED.values()))
    return table


def drift_table(found: dict[str, Any]) -> Table:
    """A line for every kind of gates: outputs, then all gradients of tokens, the largest in each window."""
    by_regime = found["errors"]
    windows = len(next(iter(by_regime.values()))["o"])
    title = f"largest errors along {found['T']:,} tokens, thousandths of the norm"
    table = table_of(title, "", *(f"{i + 1}/{windows}" for i in range(windows)))
    for regime, along in by_regime.items():
        table.add_row(f"o, {regime}", *map(thousandths, along["o"]))
        grads = zip(*(errors for name, errors in along.items() if name != "o"))
        table.add_row(f"gradients, {regime}", *(thousandths(max(window)) for window in grads))
    return table


def times_table(title: str, times: list[dict[str, Any]]) -> Table:
    """A line for every shape, and under it one or two for every contender."""
    heads = (f"{what} {regime}" for what in ("fwd", "f+b") for regime in REGIMES)
    table = table_of(title, "B, T, H", *heads, "MiB")
    for shape, rows in groupby(times, shape_of):
        table.add_row(shape)
        for row in rows:
            peak = max(row["peak_bytes"].values(), default=None)
            memory = "" if peak is None else f"{peak / MIB:,.0f}"
            for graph, cells in (("", [memory]), ("graph_", [])):
                if f"{graph}both_ms" in row:
                    by_regime = (row[f"{graph}{what}_ms"] for what in ("forward", "both"))
                    medians = (milliseconds(ms.get(regime)) for ms in by_regime for regime in REGIMES)
                    table.add_row("  as a CUDA graph" if graph else row["label"], *medians, *cells)
    return table


def steps_table(steps: list[dict[str, Any]]) -> Table:
    table = table_of("one decoding step, us", "sequences x heads", *REGIMES, "TB/s of states")
    for row in steps:
        rate = row["state_bytes"] / max(row["ms"].values()) / 1e9
        table.add_row(f"{row['N']} x {row['H']}", *(f"{1e3 * ms:.1f}" for ms in row["ms"].values()), f"{rate:.2f}")
    return table


def shape_of(row: dict[str, Any]) -> str:
    return f"{row['B']}, {row['T']}, {row['H']}"


def thousandths(off: float | None) -> str:
    return "inf" if off is None else f"{1e3 * off:.1f}"


def milliseconds(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.2f}"

"""Runs benchmarks: nothing is timed before it is proven right, candidates take turns in one process."""

import json
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from perilune import __version__
from perilune.bench.case import DEVICE, Candidate, Case, Sheet
from perilune.bench.cases import find
from perilune.bench.progress import Steps, Tell, quiet, watching
from perilune.bench.versions import installed
from perilune.core.errors import ConfigError, nearest

ROUNDS = 15
BUDGET_S = 4.0
"""A candidate takes part in further rounds until it has run this long, so a slow baseline may run once."""
PACKAGES = ("triton", "transformers", "flash-linear-attention", "nvidia-cudnn-frontend")
"""Whose versions matter to the times."""
WIDE = 1000
"""Columns, so that no line of a Markdown table is broken."""


def main(
    names: Sequence[str],
    *,
    json_path: str | Path | None = None,
    threads: int | None = None,
    markdown: bool = False,
    cases: Mapping[str, Case | Sheet] | None = None,
) -> int:
    """Runs the named cases (all if none is named), prints a table for each, shows on stderr what is going on.

    json_path: a file for the results, written anew as each case ends.
    threads: of torch on the CPU, for this process.  markdown: tables as a page holds them.
    Returns 1 if a check or a gate failed, else 0.
    Raises ConfigError for an unknown name.
    """
    cases = find() if cases is None else cases
    for name in names:
        if name not in cases:
            raise ConfigError(f"{name}: expected the name of a benchmark; {nearest(name, cases)}")
    if threads is not None:
        torch.set_num_threads(threads)
    results = []
    for name in names or cases:
        case = cases[name]
        with watching(name, Console(stderr=True)) as tell:
            result = run(case, tell) if isinstance(case, Case) else case.run(tell)
        show(parts(result) if isinstance(case, Case) else case.parts(result), markdown)
        results.append(result)
        if json_path is not None:
            write(Path(json_path), {"environment": environment(), "cases": results})
    return 0 if all(result["passed"] for result in results) else 1


def write(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all, but to what is no file, as a pipe, as it comes."""
    text = json.dumps(results, indent=1) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays one
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def run(case: Case, tell: Tell = quiet) -> dict[str, Any]:
    """The result of one case as plain data; without times if its check fails."""
    result: dict[str, Any] = {"name": case.name, "title": case.title, "check": "passed", "times": [], "gates": []}
    steps = Steps(tell, 2 + ROUNDS)
    steps.next("checking")
    try:
        case.check()
    except AssertionError as error:
        return result | {"check": f"failed: {error}", "passed": False}
    steps.next("making inputs")
    candidates = case.build()
    seconds, peaks = take_turns([c for c in candidates if not c.skipped], steps)
    for candidate in candidates:
        row: dict[str, Any] = {"label": candidate.label}
        if candidate.skipped:
            row["skipped"] = candidate.skipped
        else:
            row |= summary(seconds[candidate.label]) | {"peak_bytes": peaks[candidate.label]}
        result["times"].append(row)
    for gate in case.gates:
        if gate.faster in seconds and gate.slower in seconds:
            ratio = median(seconds[gate.slower]) / median(seconds[gate.faster])
            row = {"ratio": ratio, "passed": ratio >= gate.ratio}
        else:
            row = {"skipped": "one side did not run"}
        result["gates"].append({"faster": gate.faster, "slower": gate.slower, "required": gate.ratio} | row)
    return result | {"passed": all(gate.get("passed", True) for gate in result["gates"])}


def take_turns(candidates: Sequence[Candidate], steps: Steps) -> tuple[dict[str, list[float]], dict[str, int | None]]:
    """Seconds of every run and peak memory (on a GPU) by label.

    Rounds, in which every candidate runs once: what disturbs the machine for a while disturbs all alike.  The first
    run of a candidate warms it up and does not count, unless it alone uses up the budget.
    """
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int | None] = {}
    steps.total += len(candidates)
    for candidate in candidates:
        steps.next(f"first run of {candidate.label}")
        elapsed, peaks[candidate.label] = time_once(candidate)
        seconds[candidate.label] = [elapsed] if elapsed > BUDGET_S else []
    for i in range(ROUNDS):
        steps.next(f"round {i + 1}")
        for candidate in candidates:
            if sum(seconds[candidate.label]) < BUDGET_S:
                seconds[candidate.label].append(time_once(candidate)[0])
    return seconds, peaks


def time_once(candidate: Candidate) -> tuple[float, int | None]:
    """Seconds and, on a GPU, peak bytes of one run."""
    on_gpu = DEVICE.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    candidate.run()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() if on_gpu else None


def summary(seconds: list[float]) -> dict[str, Any]:
    """Median and interquartile range."""
    low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    return {"median_s": median(seconds), "spread_s": high - low, "runs": len(seconds)}


def parts(result: dict[str, Any]) -> Iterator[Table | str]:
    """What the result of one case says."""
    table = Table("", "median", "spread", "runs", "times the baseline", title=f"{result['name']}: {result['title']}")
    timed = [row for row in result["times"] if "median_s" in row]
    for row in result["times"]:
        if "skipped" in row:
            table.add_row(row["label"], f"skipped: {row['skipped']}")
        else:
            speed = f"{timed[0]['median_s'] / row['median_s']:.1f}x"
            cells = f"{1e3 * row['median_s']:.1f} ms", f"{1e3 * row['spread_s']:.1f} ms", str(row["runs"]), speed
            table.add_row(row["label"], *cells)
    yield table if result["check"] == "passed" else f"{result['name']}: check {result['check']}\nnot timed"
    for gate in result["gates"]:
        line = f"{gate['faster']} against {gate['slower']}: expected {gate['required']:g}x, "
        yield line + (
            f"got {gate['ratio']:.1f}x: {'pass' if gate['passed'] else 'FAIL'}" if "ratio" in gate else "skipped"
        )


def show(parts: Iterable[Table | str], markdown: bool) -> None:
    """Prints tables and lines, for the eye or for a page."""
    console = Console(width=WIDE) if markdown else Console()
    for part in parts:
        if markdown and isinstance(part, Table):
            console.print(part.title, markup=False)
            part.title, part.box = None, box.MARKDOWN
        console.print(part, markup=False)


def environment() -> dict[str, Any]:
    """Where the numbers were made."""
    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": {
            "perilune": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{package: installed(package) for package in PACKAGES},
        },
    }


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of these sources, with `-dirty` where they differ from it; None outside a repository of theirs."""
    here = Path(__file__)
    tracked = git(here.parent, "ls-files", "--error-unmatch", here.name)
    return git(here.parent, "describe", "--always", "--dirty", "--exclude=*") if tracked else None


def git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None

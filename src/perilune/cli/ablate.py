"""Train a recipe and its variants over several seeds, each a run of its own, and set them side by side.

perilune ablate nano                                        base, sign, aux and plain, three seeds each
perilune ablate nano --variants base,plain --seeds 5 --jobs 2

Runs that are finished are kept, broken ones are gone on with: the same command again does what is left.  A run there
of another configuration is refused.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from perilune.cli.numbers import at_least
from perilune.cli.train import absolute, device_name
from perilune.core.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.train.config import Run

POLL_SECONDS = 0.5
LINE_SECONDS = 30.0
PERILUNE = ("-c", "from perilune.cli.main import entry; entry()")
"""What Python is given to run `perilune`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from perilune.recipes import RECIPES
    from perilune.recipes.ablations import ABLATIONS

    parser.add_argument("recipe", help=", ".join(RECIPES))
    parser.add_argument("changes", nargs="*", default=[], metavar="key=value", help="changes to all variants")
    parser.add_argument("--variants", default=",".join(ABLATIONS), help=f"which ({','.join(ABLATIONS)})")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="how many of each, from seed 0 on (3)")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="runs at a time, each on its share of cores (1)")
    parser.add_argument(
        "--device", action="append", type=device_name, help="auto, cpu or cuda:N; several share the runs (auto)"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="where the runs and compare.html go (runs/RECIPE-ablation)"
    )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from perilune import recipes
    from perilune.report import check_pages, write_comparison

    check_changes(args.changes)
    base = recipes.get(args.recipe)
    check_pages()  # this and what cannot be built show before anything is trained
    folder = args.out or Path("runs") / f"{args.recipe}-ablation"
    commands: dict[Path, list[str]] = {}
    for seed in range(args.seeds):  # so that every variant has one before any has two
        for variant in args.variants.split(","):
            changes = [*args.changes, *changes_of(variant), f"seed={seed}"]
            out = folder / f"{variant}-seed{seed}"
            check_kept(out, absolute(base.override(changes)))
            commands[out] = ["train", args.recipe, *changes, "--out", str(out)]
    if len(commands) < 2:
        raise ConfigError(f"--variants: expected two runs or more, got {len(commands)}; name another, or raise --seeds")
    console = Console()
    train_all(commands, args.jobs, args.device or ["auto"], console)
    page = folder / "compare.html"
    write_comparison(list(commands), page)
    console.print(f"{page}: {len(commands)} runs side by side", markup=False, soft_wrap=True)
    return 0


def check_changes(changes: list[str]) -> None:
    """Raises ConfigError for a seed among them, which the runs' own would take the place of."""
    for change in changes:
        if change.partition("=")[0] == "seed":
            raise ConfigError(f"seed: expected none for all variants, got {change}; say how many, from 0 on: --seeds N")


def changes_of(variant: str) -> tuple[str, ...]:
    from perilune.recipes.ablations import ABLATIONS

    if variant not in ABLATIONS:
        raise ConfigError(f"--variants: there is none called {variant!r}; {nearest(variant, ABLATIONS)}")
    return ABLATIONS[variant]


def check_kept(folder: Path, wanted: "Run") -> None:
    """Raises ConfigError if the run that is there already has another configuration."""
    from perilune.train.folder import differences, read_run, spell

    if (folder / "run.json").exists():
        found = differences(wanted.to_dict(), read_run(folder).to_dict())
        if found:
            raise ConfigError(f"{folder}: expected the same run or none, got {spell(found)}; choose another --out")


def train_all(
    commands: dict[Path, list[str]],
    jobs: int,
    devices: list[str],
    console: "Console",
    program: Sequence[str] = PERILUNE,
) -> None:
    """Runs the commands, `jobs` at a time; DataError once one has failed, after those at work have ended.

    Each goes where the fewest are at work.  `program`: what Python is given to run a command.
    """
    waiting = deque(folder for folder in commands if not (folder / "result.json").exists())
    total, start = len(waiting), time.monotonic()
    if total < len(commands):
        console.print(f"{len(commands) - total} of {len(commands)} runs are finished already")
    active: dict[Path, subprocess.Popen[bytes]] = {}
    places: dict[Path, str] = {}
    failed: list[Path] = []
    said = 0.0
    with stopped(active):
        while active or (waiting and not failed):
            while waiting and not failed and len(active) < jobs:
                folder = waiting.popleft()
                taken = [places[other] for other in active]
                places[folder] = min(devices, key=taken.count)
                active[folder] = begin(folder, commands[folder], jobs, places[folder], program)
            time.sleep(POLL_SECONDS)
            for folder in [folder for folder, child in active.items() if child.poll() is not None]:
                if active.pop(folder).returncode:
                    failed.append(folder)
                console.print(f"{folder}: {'failed' if folder in failed else 'done'}", markup=False, soft_wrap=True)
            if active and time.monotonic() - said > LINE_SECONDS:
                said = time.monotonic()
                console.print(state(active, total, len(waiting), said - start), markup=False, soft_wrap=True)
    if failed:
        log = failed[0].with_name(failed[0].name + ".log")
        raise DataError(f"{log}: expected a finished run, got {last_line(log)}; mend that, then give the command again")


def begin(
    folder: Path, command: list[str], jobs: int, device: str, program: Sequence[str] = PERILUNE
) -> "subprocess.Popen[bytes]":
    """Starts, or goes on with, one run in a process of its own; what it prints goes to a `.log` beside its folder."""
    words = ["train", "--resume", str(folder)] if (folder / "run.json").exists() else command
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    env = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
    log = folder.with_name(folder.name + ".log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *program, *words, "--device", device],
            env=env, stdout=output, stderr=output, process_group=0,  # `stopped` alone ends it: Ctrl-C would be a second
        )  # fmt: skip


@contextmanager
def stopped(active: dict[Path, "subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Ends the processes that are left, also on a polite kill: they keep a checkpoint and go on another time."""
    before = [(number, signal.signal(number, _leave)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for child in active.values():
            child.terminate()
        for child in active.values():
            child.wait()
        for number, handler in before:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def state(active: dict[Path, "subprocess.Popen[bytes]"], total: int, waiting: int, seconds: float) -> str:
    """A line on how far everything is, and how long it will take."""
    parts = [progress(folder) for folder in active]
    done = total - waiting - len(active) + sum(parts)
    left = f"{seconds / done * (total - done) / 60:.0f} min left" if done > 0.05 else "time left unknown yet"
    where = ", ".join(f"{folder.name} {part:.0%}" for folder, part in zip(active, parts))
    return f"{total - waiting - len(active)} of {total} runs done; {where}; {left}"


def progress(folder: Path) -> float:
    """The share of its steps that a run has done."""
    import json

    from perilune.train.folder import read_run

    try:
        steps = sum(stage.steps for stage in read_run(folder).stages)
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().splitlines()
        return json.loads(lines[-2])["step"] / steps
    except (OSError, ValueError, IndexError, KeyError):  # it has not begun
        return 0.0


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")

"""All runs of a scale, several at a time in processes of their own; what is finished stays, and time is kept."""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from experiments.depth import texts, timing
from experiments.depth.recipes import MAIN, SCALES, TUNING_SEED, Scale, Stack
from experiments.depth.train import OutOfTime, Place, train, use_backend
from perilune.train.folder import write_json


@dataclass(frozen=True)
class Case:
    """A run, by what decides it."""

    stack: str
    variant: str
    rate: float
    seed: int

    @property
    def file(self) -> str:
        rate = f"-{self.rate:g}" if self.seed == TUNING_SEED else ""
        return f"{self.stack}/{self.variant.replace(' ', '-')}{rate}-seed{self.seed}.json"


@dataclass(frozen=True)
class Work:
    """What worker processes have to know."""

    scale: str
    home: Path
    place: Place
    backend: str
    deadline: float
    """In `time.time()`'s seconds."""
    threads: int


def run_scale(
    scale: Scale, home: Path, place: Place, backend: str, jobs: int, minutes: float | None,
    variants: tuple[str, ...] | None, console: Console,
) -> bool:  # fmt: skip
    """Costs, then rates, then runs, below `home`; whether all of it is there now."""
    start = time.time()
    deadline = start + 60 * minutes if minutes else float("inf")
    with console.status("reading the library, training the tokenizer"):
        texts.prepare(scale, home)
    work = Work(scale.name, home, place, backend, deadline, max(1, torch.get_num_threads() // jobs))
    wanted = {s.name: [v for v in s.variants if variants is None or v in variants] for s in scale.stacks}
    costs = measure_costs(scale, wanted, work, console)
    context = multiprocessing.get_context("spawn")
    tuning = list(tuning_cases(scale, wanted))
    with ended(), ProcessPoolExecutor(jobs, mp_context=context, initializer=begin, initargs=(work,)) as pool:
        try:
            done = work_through(scale, tuning, work, costs, pool, jobs, "rates", console)
            if done:
                chosen = choose(scale, home)
                write_json(home / "chosen.json", chosen)
                cases = list(main_cases(scale, wanted, chosen))
                done = work_through(scale, cases, work, costs, pool, jobs, "runs", console)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    left = "all done" if done else "time is up; the same command does the rest"
    console.print(f"{scale.name}: {left}, after {(time.time() - start) / 60:.1f} min", highlight=False)
    return done


@contextmanager
def ended() -> Iterator[None]:
    """A polite kill ends the command as Ctrl-C does, its worker processes too."""
    before = [(number, signal.signal(number, leave)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def measure_costs(
    scale: Scale, wanted: dict[str, list[str]], work: Work, console: Console
) -> dict[tuple[str, str], dict[str, Any]]:
    """What a step of each variant costs, measured one after the other before anything else is at work."""
    use_backend(work.backend)
    torch.set_num_threads(work.threads)  # as runs have; more wait for one another where cores are shared
    found = {}
    for stack in scale.stacks:
        rows = None
        for name in wanted[stack.name]:
            path = work.home / stack.name / "cost" / f"{name.replace(' ', '-')}.json"
            if not path.exists():
                rows = rows or texts.load(work.home, stack.context, scale.judged_tokens, work.place.device)
                path.parent.mkdir(parents=True, exist_ok=True)
                entry = timing.cost(scale, stack, stack.variants[name], rows, work.place)
                write_json(path, entry)
                console.print(f"{stack.name}, {name}: {entry['step_ms']:,.0f} ms a step", highlight=False)
            found[stack.name, name] = json.loads(path.read_text())
    torch.cuda.empty_cache()  # for the workers, which are other processes; without a GPU it does nothing
    return found


def tuning_cases(scale: Scale, wanted: dict[str, list[str]]) -> Iterator[Case]:
    """Every main variant that is wanted, or whose rate another takes, at every rate."""
    for stack in scale.stacks:
        used = {stack.variants[name].tuned_as for name in wanted[stack.name]}
        for name in (name for name in MAIN if name in used):
            for rate in stack.rates:
                yield Case(stack.name, name, rate, TUNING_SEED)


def main_cases(scale: Scale, wanted: dict[str, list[str]], chosen: dict[str, Any]) -> Iterator[Case]:
    """One seed of everything before the second of anything."""
    for seed in range(scale.seeds):
        for stack in scale.stacks:
            for name in wanted[stack.name]:
                yield Case(stack.name, name, chosen[stack.name][stack.variants[name].tuned_as]["chosen"], seed)


def choose(scale: Scale, home: Path) -> dict[str, Any]:
    """For each stack and main variant: the rate with the fewest held-out bits on the tuning seed, and all tried."""
    chosen: dict[str, Any] = {}
    for stack in scale.stacks:
        for name in MAIN:
            paths = {rate: home / Case(stack.name, name, rate, TUNING_SEED).file for rate in stack.rates}
            if not all(path.exists() for path in paths.values()):
                continue
            bits = {rate: json.loads(path.read_text())["bits_per_byte"] for rate, path in paths.items()}
            best = min(stack.rates, key=lambda rate: float("inf") if bits[rate] is None else bits[rate])
            tried = {f"{rate:g}": value for rate, value in bits.items()}
            chosen.setdefault(stack.name, {})[name] = {"chosen": best, "tried": tried}
    return chosen


def work_through(
    scale: Scale, cases: list[Case], work: Work, costs: dict[tuple[str, str], dict[str, Any]],
    pool: ProcessPoolExecutor, jobs: int, what: str, console: Console,
) -> bool:  # fmt: skip
    """Whether all cases are finished; those that are already are passed over."""
    left = [case for case in cases if not finished(case, work.home)]
    if len(left) < len(cases):
        console.print(f"{scale.name}: {len(cases) - len(left)} of {len(cases)} {what} are finished already")

    def weight(case: Case) -> float:  # seconds, had it the device to itself
        return costs.get((case.stack, case.variant), {"step_ms": 1.0})["step_ms"] * steps_of(scale, case) / 1e3

    total, done, start = sum(map(weight, left)), 0.0, time.time()
    waiting = {pool.submit(run_case, case, weight(case)): case for case in left}
    complete, number = True, 0
    while waiting:
        ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in ended:
            case = waiting.pop(future)
            number += 1
            done += weight(case)
            told = tell(future)
            complete &= told is not None
            seconds = time.time() - start
            rest = seconds / done * (total - done)
            console.print(
                f"{what} {number} of {len(left)}: {case.stack}, {case.variant}, {case.rate:g}, seed {case.seed}: "
                f"{told or 'no time'}; {seconds:.0f} s gone, {rest:.0f} s left",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
    return complete


def tell(future: "Future[str | None]") -> str | None:
    return future.result()


def steps_of(scale: Scale, case: Case) -> int:
    stack = scale.stack(case.stack)
    return stack.tuning_steps if case.seed == TUNING_SEED else stack.steps


def finished(case: Case, home: Path) -> bool:
    """Whether it is there, at that rate; a run at another rate, chosen anew, is made again."""
    path = home / case.file
    return path.exists() and json.loads(path.read_text())["rate"] == case.rate


# in a worker process

WORK: list[Work] = []


def begin(work: Work) -> None:
    WORK[:] = [work]
    torch.set_num_threads(work.threads)
    use_backend(work.backend)
    if work.place.device.type == "cuda":
        torch.cuda.set_device(work.place.device)


@cache
def rows_of(stack: Stack, judged_tokens: int) -> texts.Rows:
    work = WORK[0]
    return texts.load(work.home, stack.context, judged_tokens, work.place.device)


def run_case(case: Case, seconds: float) -> str | None:
    """Trains one case and keeps its figures; what to say of it, or None where time does not suffice."""
    work = WORK[0]
    scale = SCALES[work.scale]
    stack = scale.stack(case.stack)
    if time.time() + seconds > work.deadline:
        return None
    try:
        result = train(
            scale, stack, stack.variants[case.variant], case.rate, case.seed, steps_of(scale, case),
            rows=rows_of(stack, scale.judged_tokens), place=work.place, deadline=work.deadline,
            look=case.seed != TUNING_SEED,
        )  # fmt: skip
    except OutOfTime:
        return None
    path = work.home / case.file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    bits = result["bits_per_byte"]
    return f"{'diverged' if bits is None else f'{bits:.4f} bits per byte'} in {result['seconds']:.0f} s"

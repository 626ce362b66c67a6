"""All runs of a scale, several at a time in processes of their own; what is finished stays, and time is kept."""

import json
import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
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
from experiments.depth.train import Net, OutOfTime, Place, train, use_backend
from perilune.train.folder import write_json

COMPILING, TIMING = 120.0, 60.0
"""Seconds that all kernels may take to compile, and one variant to be timed."""
GRACE = 5.0
"""Seconds after the deadline that a run may take to notice it."""


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
    deadline = math.inf if minutes is None else start + 60 * minutes
    with console.status("reading the library, training the tokenizer"):
        texts.prepare(scale, home)
    work = Work(scale.name, home, place, backend, deadline, max(1, torch.get_num_threads() // jobs))
    wanted = {s.name: [v for v in s.variants if variants is None or v in variants] for s in scale.stacks}
    if place.device.type == "cuda":
        with pool_of(jobs, work) as pool:
            compile_all(wanted, work, pool, console)
    costs = measure_costs(wanted, work, console)
    with pool_of(jobs, work) as pool:
        done = work_through(scale, list(tuning_cases(scale, wanted)), work, costs, pool, "rates", console)
        chosen = choose(scale, home)
        write_json(home / "chosen.json", chosen)
        done &= work_through(scale, list(main_cases(scale, wanted, chosen)), work, costs, pool, "runs", console)
    left = "all done" if done else "not all done; the same command does the rest"
    console.print(f"{scale.name}: {left}, after {(time.time() - start) / 60:.1f} min", highlight=False)
    return done


@contextmanager
def pool_of(jobs: int, work: Work) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, which end with the block, whatever they are at; a polite kill ends it as Ctrl-C does."""
    before = [(number, signal.signal(number, leave)) for number in (signal.SIGTERM, signal.SIGHUP)]
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=begin, initargs=(work,))
    try:
        yield pool
    finally:
        children = multiprocessing.active_children()
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.terminate()
        for child in children:
            child.join()
        for number, handler in before:
            signal.signal(number, handler)


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def untimed(wanted: dict[str, list[str]], home: Path) -> list[tuple[str, str]]:
    """(stack, variant) of all that have yet to be timed."""
    return [
        (stack, name) for stack, names in wanted.items() for name in names if not cost_file(home, stack, name).exists()
    ]


def cost_file(home: Path, stack: str, variant: str) -> Path:
    return home / stack / "cost" / f"{variant.replace(' ', '-')}.json"


def compile_all(wanted: dict[str, list[str]], work: Work, pool: ProcessPoolExecutor, console: Console) -> None:
    """Has every variant that is yet to be timed compute once; a stack where that does not end is taken out."""
    waiting = {pool.submit(compile_kernels, stack, name): stack for stack, name in untimed(wanted, work.home)}
    start = time.time()
    done, late = wait(waiting, timeout=max(0.0, min(COMPILING, work.deadline - start)))
    for future in done:
        future.result()
    for stack in {waiting[future] for future in late}:
        wanted[stack].clear()
        console.print(f"{stack}: left out, for its kernels did not compile in time", highlight=False)
    if done:
        console.print(f"kernels compiled in {time.time() - start:.0f} s", highlight=False)


def measure_costs(wanted: dict[str, list[str]], work: Work, console: Console) -> dict[tuple[str, str], dict[str, Any]]:
    """What a step of each variant costs, measured one after the other before anything else is at work."""
    left = untimed(wanted, work.home)
    while left:  # a new process after one that stands still: that would be at work beside the others
        with pool_of(1, work) as pool:
            left = measure_some(left, work, pool, console)
    cases = [(stack, name) for stack, names in wanted.items() for name in names]
    files = {case: cost_file(work.home, *case) for case in cases}
    return {case: json.loads(path.read_text()) for case, path in files.items() if path.exists()}


def measure_some(
    cases: list[tuple[str, str]], work: Work, pool: ProcessPoolExecutor, console: Console
) -> list[tuple[str, str]]:
    """Measures as far as time suffices and none stands still; what is left after that one."""
    for i, (stack, name) in enumerate(cases):
        rest = work.deadline - time.time()
        if rest < 0:
            return []
        try:
            entry = pool.submit(measure_cost, stack, name).result(timeout=min(TIMING, rest + GRACE))
        except TimeoutError:
            console.print(f"{stack}, {name}: not timed, for that did not end", highlight=False)
            return cases[i + 1 :]
        console.print(f"{stack}, {name}: {entry['step_ms']:,.0f} ms a step", highlight=False)
    return []


def tuning_cases(scale: Scale, wanted: dict[str, list[str]]) -> Iterator[Case]:
    """Every main variant that is wanted, or whose rate another takes, at every rate."""
    for stack in scale.stacks:
        used = {stack.variants[name].tuned_as for name in wanted[stack.name]}
        for name in (name for name in MAIN if name in used):
            for rate in stack.rates:
                yield Case(stack.name, name, rate, TUNING_SEED)


def main_cases(scale: Scale, wanted: dict[str, list[str]], chosen: dict[str, Any]) -> Iterator[Case]:
    """What has a rate: main variants before others, of each one seed of everything before the second of anything."""
    for main in (True, False):
        for seed in range(scale.seeds):
            for stack in scale.stacks:
                rates = chosen.get(stack.name, {})
                for variant in (stack.variants[name] for name in wanted[stack.name] if (name in MAIN) is main):
                    if variant.tuned_as in rates:
                        yield Case(stack.name, variant.name, rates[variant.tuned_as]["chosen"], seed)


def choose(scale: Scale, home: Path) -> dict[str, Any]:
    """For each stack and main variant: the rate with the fewest held-out bits on the tuning seed, and all tried."""
    chosen: dict[str, Any] = {}
    for stack in scale.stacks:
        for name in MAIN:
            paths = {rate: home / Case(stack.name, name, rate, TUNING_SEED).file for rate in stack.rates}
            if not all(path.exists() for path in paths.values()):
                continue
            bits = {rate: json.loads(path.read_text())["bits_per_byte"] for rate, path in paths.items()}
            best = min(stack.rates, key=lambda rate: math.inf if bits[rate] is None else bits[rate])
            tried = {f"{rate:g}": value for rate, value in bits.items()}
            chosen.setdefault(stack.name, {})[name] = {"chosen": best, "tried": tried}
    return chosen


def work_through(
    scale: Scale, cases: list[Case], work: Work, costs: dict[tuple[str, str], dict[str, Any]],
    pool: ProcessPoolExecutor, what: str, console: Console,
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
        rest = work.deadline + GRACE - time.time()
        ended, _ = wait(waiting, timeout=None if rest == math.inf else max(0.0, rest), return_when=FIRST_COMPLETED)
        if not ended:  # a worker stands still
            return False
        for future in ended:
            case = waiting.pop(future)
            number += 1
            done += weight(case)
            told = future.result()
            complete &= told is not None
            seconds = time.time() - start
            rest = seconds / done * (total - done)
            console.print(
                f"{what} {number} of {len(left)}: {case.stack}, {case.variant}, {case.rate:g}, seed {case.seed}: "
                f"{told or 'no time'}; {seconds:.0f} s gone, {rest:.0f} s left",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
    return complete


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


def measure_cost(stack_name: str, variant: str) -> dict[str, Any]:
    """Times one variant and keeps that."""
    work = WORK[0]
    scale = SCALES[work.scale]
    stack = scale.stack(stack_name)
    entry = timing.cost(scale, stack, stack.variants[variant], rows_of(stack, scale.judged_tokens), work.place)
    path = cost_file(work.home, stack_name, variant)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, entry)
    if work.place.device.type == "cuda":
        torch.cuda.empty_cache()
    return entry


def compile_kernels(stack_name: str, variant: str) -> None:
    """One pass, after which kernels of these sizes lie in Triton's cache for all processes."""
    work = WORK[0]
    scale = SCALES[work.scale]
    stack = scale.stack(stack_name)
    rows = rows_of(stack, scale.judged_tokens).train[: stack.rows]
    Net(stack, stack.variants[variant], 0, work.place).loss(rows[:, :-1], rows[:, 1:]).backward()
    torch.cuda.empty_cache()


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

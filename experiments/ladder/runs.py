"""All runs of a scale, several seeds at a time in processes of their own; what is finished stays, and time is kept."""

import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console

from experiments.ladder import probes, texts
from experiments.ladder.recipes import SCALES, Scale
from experiments.ladder.train import OutOfTime, Place, case_file, train
from perilune.data.tokenizer import ByteBPE


def run_scale(
    scale: Scale, home: Path, device: torch.device, jobs: int, minutes: float | None, variants: tuple[str, ...],
    console: Console,
) -> bool:  # fmt: skip
    """Every variant of every seed, below `home`; whether all of it is there now."""
    start = time.time()
    deadline = math.inf if minutes is None else start + 60 * minutes
    with console.status("reading the library, training the tokenizer"):
        texts.prepare(scale, home)
    left = [seed for seed in range(scale.seeds) if missing(home, variants, seed)]
    asked = [(scale.name, home, str(device), deadline, variants, seed) for seed in left]
    if jobs > 1 and len(left) > 1:
        threads = max(1, torch.get_num_threads() // jobs)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,)
        ) as pool:
            told = [line for lines in pool.map(told_of_seed, asked) for line in lines]
        for line in told:
            console.print(line, highlight=False, soft_wrap=True)
    else:
        for words in asked:
            for line in run_seed(*words):
                console.print(f"{line}; {time.time() - start:.0f} s gone", highlight=False, soft_wrap=True)
    done = not any(missing(home, variants, seed) for seed in range(scale.seeds))
    said = "all done" if done else "not all done; the same command does the rest"
    console.print(f"{scale.name}: {said}, after {(time.time() - start) / 60:.1f} min", highlight=False)
    return done


def missing(home: Path, variants: tuple[str, ...], seed: int) -> list[str]:
    return [name for name in variants if not case_file(home, name, seed).exists()]


def told_of_seed(words: tuple[str, Path, str, float, tuple[str, ...], int]) -> list[str]:
    return list(run_seed(*words))


def run_seed(
    scale_name: str, home: Path, device: str, deadline: float, variants: tuple[str, ...], seed: int
) -> Iterator[str]:
    """What is left of a seed, a line for each variant; what does not fit into the time is left undone."""
    scale = SCALES[scale_name]
    place = Place(scale, home, torch.device(device), deadline)
    exam = probes.Exam(scale, ByteBPE.load(home))
    for name in missing(home, variants, seed):
        try:
            figures = train(place, exam, name, seed)
        except OutOfTime as error:
            yield f"{name}, seed {seed}: {error}"
            return
        yield f"{name}, seed {seed}: {figures['looks'][-1]['nats']:.4f} nats a held-out token"

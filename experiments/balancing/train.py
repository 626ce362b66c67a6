"""One run in its folder, with every layer's loads at every step; what `runs` starts in processes of its own.

    python -m experiments.balancing.train train SCALE SITUATION RULE CHOSEN SEED HOME --out FOLDER
    python -m experiments.balancing.train train --resume FOLDER

The folder is that of `perilune train` with two files more: `loads.jsonl`, a line a step, and a shorter `result.json`.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from experiments.balancing.recipes import RULES, SCALES, run
from perilune.cli.interrupt import Interrupt
from perilune.cli.result import machine, seconds_trained
from perilune.cli.train import device_name, find_device
from perilune.nn.load import dead_experts, gini, max_violation
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import Run
from perilune.train.evaluate import bits_per_byte, sample_texts
from perilune.train.folder import read_run, start_folder, write_json
from perilune.train.lock import claimed
from perilune.train.loop import Progress, Trainer
from perilune.train.metrics import Metrics

JUDGED_BYTES = 60_000  # of held-out prose and of code, each, at most
FIGURES = {"gini": gini, "max_violation": max_violation, "dead": dead_experts}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["train"])
    parser.add_argument("case", nargs="*", help="SCALE SITUATION RULE CHOSEN SEED HOME")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--device", type=device_name, default="auto")
    args = parser.parse_args(words)
    device = find_device(args.device)
    if args.resume is not None:
        return train(args.resume, read_run(args.resume), device)
    with claimed(args.out):
        start_folder(args.out, resolve(*args.case))
    return train(args.out, read_run(args.out), device)


def resolve(scale: str, situation: str, rule: str, chosen: str, seed: str, home: str) -> Run:
    """The run that these words name; `chosen` is `-` for a rule with nothing to choose."""
    value = None if chosen == "-" else float(chosen)
    return run(SCALES[scale], situation, RULES[rule].changes(value), int(seed), Path(home))


def train(folder: Path, recipe: Run, device: str) -> int:
    """What is left of the run; returns the exit code."""
    with claimed(folder), Interrupt() as interrupt:
        if (folder / "result.json").exists():
            return 0
        checkpoints = Checkpoints(folder) if recipe.checkpoint_every < sum(s.steps for s in recipe.stages) else None
        trainer = Trainer(recipe, device=device, checkpoint=checkpoints.latest() if checkpoints else None)
        with (
            Metrics(folder / "metrics.jsonl", after=trainer.steps_done) as metrics,
            Metrics(folder / "loads.jsonl", after=trainer.steps_done) as lines,
        ):
            trainer.train(
                metrics,
                lambda progress: lines.write(**loads_line(trainer, progress)),
                lambda stage: lines.sync(),
                checkpoints=checkpoints,
                stop=lambda: interrupt.asked,
            )
        if interrupt.asked:
            return interrupt.exit_code
        write_json(folder / "result.json", judged(trainer, folder))
    return 0


def loads_line(trainer: Trainer, progress: Progress) -> dict[str, Any]:
    """The figures of the step's own loads, a value a layer, and those of the last `load_window` steps together."""
    windows = [window.stack() for window in trainer.loads.values()]
    line: dict[str, Any] = {"step": progress.step}
    for name, figure in FIGURES.items():
        line[name] = [round(figure(window[-1]), 5) for window in windows]
        line[f"window_{name}"] = [round(figure(window.sum(0)), 5) for window in windows]
    return line


def judged(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """What `result.json` keeps: held-out bits per byte of prose and code, and where and how long it ran."""
    start = time.monotonic()
    bits = {
        name: bits_per_byte(
            trainer.model,
            trainer.feed.tokenizer,
            sample_texts([document.text for document in corpus.held_out], JUDGED_BYTES),
            context=trainer.run.stages[-1].context,
        )
        for name, corpus in trainer.feed.corpora.items()
    }
    on_gpu = trainer.device.type == "cuda"
    return {
        "bits_per_byte": bits,
        "layers": list(trainer.loads),
        "seconds": seconds_trained(folder),
        "judging_seconds": round(time.monotonic() - start, 2),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "gigabytes": round(torch.cuda.max_memory_allocated(trainer.device) / 1e9, 2) if on_gpu else None,
        "machine": machine(trainer),
    }


if __name__ == "__main__":
    from perilune.core.errors import PeriluneError

    try:
        raise SystemExit(main())
    except PeriluneError as error:
        raise SystemExit(str(error)) from None

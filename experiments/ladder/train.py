"""One seed of all ways up: the first stage once for each gate, then every variant from there."""

import json
import math
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.ladder import probes, texts
from experiments.ladder.recipes import TEXT, VARIANTS, Scale, Variant
from perilune.core.errors import PeriluneError
from perilune.data.tokenizer import ByteBPE
from perilune.train import state
from perilune.train.config import Run
from perilune.train.feed import Feed
from perilune.train.folder import write_json
from perilune.train.loop import Trainer

LOOKED_AT = 4
"""Steps at a stage's start that are all looked at."""


class OutOfTime(PeriluneError):
    """The time given ended before the run."""


@dataclass
class Record:
    """What is kept of a run."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    """The held-out loss on the way; a stage's first is of the weights it begins with."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """What was asked after each."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    scale: Scale
    home: Path
    device: torch.device
    deadline: float = math.inf
    """In `time.time()`'s seconds."""

    def trainer(self, run: Run, checkpoint: Path | None = None) -> Trainer:
        feed = Feed(run, ByteBPE.load(self.home), {TEXT: texts.corpus_of(self.scale.text_bytes)})
        made = Trainer(run, feed, device=self.device, checkpoint=checkpoint)
        made.ahead = False  # a look is of the step before it
        return made


def trunk(place: Place, exam: probes.Exam, variant: Variant, seed: int) -> Path:
    """The folder of a trained first stage: a checkpoint at the second's beginning, and its record; made unless there.

    Raises OutOfTime.
    """
    folder = place.home / f"trunk-{variant.trunk}-seed{seed}"
    if (folder / "record.json").exists():
        return folder
    trainer, record = place.trainer(place.scale.run(variant, seed)), Record()
    stretch(trainer, exam, record, place.deadline)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    state.write(trainer, folder)
    write_json(folder / "record.json", vars(record))  # last: with it the folder counts
    return folder


def case_file(home: Path, variant: str, seed: int) -> Path:
    return home / f"{variant.replace(' ', '-')}-seed{seed}.json"


def train(place: Place, exam: probes.Exam, name: str, seed: int) -> dict[str, Any]:
    """Trains one variant from its trunk on and keeps its figures.  Raises OutOfTime."""
    variant = VARIANTS[name]
    begun = trunk(place, exam, variant, seed)
    run = place.scale.run(variant, seed)
    start = place.home / f"start-{seed}-{name.replace(' ', '-')}"
    try:
        shutil.copytree(begun, start, dirs_exist_ok=True)
        values = json.loads((start / state.VALUES).read_text(encoding="utf-8"))
        write_json(start / state.VALUES, values | {"run": run.to_dict()})  # what lies behind is the same in both
        trainer = place.trainer(run, start)
    finally:
        shutil.rmtree(start, ignore_errors=True)
    record = Record(**json.loads((begun / "record.json").read_text()))
    while trainer.steps_done < trainer.steps:
        stretch(trainer, exam, record, place.deadline)
    figures = {
        "variant": name, "seed": seed, "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "half_life": probes.half_lives(trainer.model, exam.rows, place.scale.look_tokens),
        "machine": machine(place.device), **vars(record),
    }  # fmt: skip
    write_json(case_file(place.home, name, seed), figures)
    return figures


def stretch(trainer: Trainer, exam: probes.Exam, record: Record, deadline: float) -> None:
    """One stage to its end, where the next one is begun; then the exam.  Raises OutOfTime."""
    start, stage = time.monotonic(), trainer.stage

    def look() -> None:
        nats = round(exam.look(trainer.model), 4)
        record.looks.append({"tokens": trainer.tokens_done, "stage": stage.name, "step": done, "nats": nats})

    for done in range(stage.steps):
        if done <= LOOKED_AT or done % exam.scale.look_every == 0:
            look()
        if time.time() > deadline:
            raise OutOfTime(f"out of time in stage {stage.name}, at step {done} of {stage.steps}")
        update = trainer.step(trainer.feed.next())
        record.steps.append({
            "tokens": trainer.tokens_done, "stage": stage.name, "lr": trainer.optimizer.param_groups[0]["lr"],
            "grad_norm": update.grad_norm, **{name: round(loss, 4) for name, loss in update.losses.items()},
        })  # fmt: skip
    done = stage.steps
    look()
    trainer.feed.begin(trainer.stage)
    found = exam.after_stage(trainer.model, stage.context)
    record.stages.append({
        "name": stage.name, "context": stage.context, "tokens": trainer.tokens_done, "lr": stage.lr, **found,
    })  # fmt: skip
    record.seconds += time.monotonic() - start


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}

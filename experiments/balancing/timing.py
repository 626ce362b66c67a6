"""What a rule costs: the time in its balancers' `observe` and `update`, and whole steps, measured alone."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.balancing.recipes import RULES, Scale, run
from perilune.cli.result import machine
from perilune.train.config import Run
from perilune.train.folder import write_json
from perilune.train.loop import Trainer

WARM = 3  # steps before the first that counts


def time_rules(scale: Scale, chosen: dict[str, Any], home: Path, device: str, console: Console) -> None:
    """Adds the scale's rules to `timing.json` below `home`; nothing else should be at work on the device."""
    times: dict[str, Any] = read(home) or {"rules": {}}
    missing = [rule for rule in scale.rules if rule not in times["rules"]]
    for number, rule in enumerate(missing, 1):
        value = next(iter(chosen[rule].values()))["chosen"] if rule in chosen else None
        with console.status(f"timing {rule}, {number} of {len(missing)}"):
            recipe = run(scale, "normal", RULES[rule].changes(value), 0, home)
            times["rules"][rule], times["machine"] = time_run(recipe, device, scale.timed_steps)
    if missing:
        rules = {rule: times["rules"][rule] for rule in RULES if rule in times["rules"]}
        write_json(home / "timing.json", {"machine": times["machine"], "rules": rules})


def time_run(recipe: Run, device: str, steps: int) -> tuple[dict[str, float], dict[str, Any]]:
    """`timed`, and of which machine; the model is gone when this returns, before the next one is built."""
    trainer = Trainer(recipe, device=device)
    return timed(trainer, steps), machine(trainer)


class Clock:
    """Adds up the time inside functions: on a GPU what passes on its stream, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # which need not be the current device's
        return event

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = self.mark()
            result = function(*args, **options)
            self._spans.append((start, self.mark()))
            return result

        return timed

    def take(self) -> float:
        """Seconds since the last call."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        spans, self._spans = self._spans, []
        return sum(a.elapsed_time(b) / 1e3 if self._gpu else b - a for a, b in spans)


def timed(trainer: Trainer, steps: int) -> dict[str, float]:
    """Medians over `steps` steps: milliseconds of a step, of its balancers, and the latter's share of the former."""
    clock = Clock(trainer.device)
    for balancer in trainer.balancers.values():
        balancer.observe = clock.around(balancer.observe)  # type: ignore[method-assign]
        balancer.update = clock.around(balancer.update)  # type: ignore[method-assign]
    whole, own = [], []
    for step in range(WARM + steps):
        batch = trainer.feed.next()
        start = time.perf_counter()
        trainer.step(batch)
        inside = clock.take()  # waits for a GPU
        if step >= WARM:
            whole.append(time.perf_counter() - start)
            own.append(inside)
    share = statistics.median(a / b for a, b in zip(own, whole))
    return {
        "step_ms": round(1e3 * statistics.median(whole), 3),
        "balancers_ms": round(1e3 * statistics.median(own), 3),
        "share": round(share, 6),
    }


def read(home: Path) -> dict[str, Any] | None:
    path = home / "timing.json"
    return json.loads(path.read_text()) if path.exists() else None

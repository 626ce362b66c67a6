"""The fastest layout that fits, and why it is as it is."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import add
from typing import get_args

from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Config
from perilune.models.k3.config import Recompute
from perilune.plan.gpus import SERVER, Gpu
from perilune.plan.layout import Layout, Sharding, Stage, Work, stages
from perilune.plan.memory import Memory, floor, memory
from perilune.plan.rates import FILLED
from perilune.plan.sizes import Sizes, sizes
from perilune.plan.time import Time, step_seconds, time_of

ROWS = (1, 2, 4, 8)
KINDS: tuple[Recompute, ...] = get_args(Recompute)
MOST_STAGES = 16
LEAST_TOKENS = 1024  # that a part of a sequence has, for its products to fill a GPU
MOST_TRIES = 10  # of numbers of GPUs, to say how many are needed


@dataclass(frozen=True)
class Proposal:
    """A layout, with what its most loaded stage needs."""

    layout: Layout
    memory: Memory
    """Of the stage that needs most."""
    time: Time | None
    """Of the stage that takes longest; None for a layout that does not fit."""
    seconds: float
    """Of a step; infinity for a layout that does not fit."""

    @property
    def fits(self) -> bool:
        return self.time is not None


@dataclass(frozen=True)
class Plan:
    """The proposal for one stretch of training."""

    work: Work
    proposal: Proposal
    reasons: tuple[str, ...]
    gpus: int

    @property
    def tokens_per_second(self) -> float:
        return self.work.batch_tokens / self.proposal.seconds

    @property
    def seconds(self) -> float:
        """Of the whole stretch."""
        return self.work.steps * self.proposal.seconds


def plan(config: K3Config, work: Work, gpus: int, gpu: Gpu, counted: Sizes | None = None) -> Plan:
    """The fastest layout over all those GPUs that fits; ConfigError, with how many are needed, where none does.

    counted: `sizes(config)`, for who makes several plans.
    """
    counted = counted or sizes(config)
    tried = judged(config, counted, work, gpus, gpu)
    if not any(proposal.fits for proposal in tried):
        raise ConfigError(_too_few(config, counted, work, gpus, gpu))
    best = min(tried, key=_rank)
    return Plan(work, best, tuple(reasons(best, tried, work)), gpus)


def judged(config: K3Config, counted: Sizes, work: Work, gpus: int, gpu: Gpu) -> list[Proposal]:
    """Every layout, and what it needs; what it takes is asked of those that fit."""
    cut: dict[int, list[Stage]] = {}
    proposals = []
    for layout in layouts(config, work, gpus):
        if layout.pipeline not in cut:
            cut[layout.pipeline] = stages(config, counted, layout.pipeline)
        proposals.append(judge(config, cut[layout.pipeline], layout, work, gpu))
    return proposals


def judge(config: K3Config, made: list[Stage], layout: Layout, work: Work, gpu: Gpu) -> Proposal:
    needs = _needs(config, made, layout, work)
    if needs.peak > FILLED * gpu.memory:
        return Proposal(layout, needs, None, math.inf)
    times = [time_of(config, stage, layout, work, gpu) for stage in made]
    slowest = max(times, key=lambda t: step_seconds(t, layout, work))
    return Proposal(layout, needs, slowest, step_seconds(slowest, layout, work))


def _rank(proposal: Proposal) -> tuple[float, ...]:
    """By time, then by how little is done about it."""
    x = proposal.layout
    return proposal.seconds, x.pipeline, x.context, x.expert, KINDS.index(x.recompute), x.rows


def layouts(config: K3Config, work: Work, gpus: int) -> Iterator[Layout]:
    """Every layout over exactly so many GPUs; experts go to GPUs in equal numbers, sequences in equal parts."""
    experts = config.num_experts if any(config.is_moe(i) for i in range(config.num_hidden_layers)) else 1
    for pipeline in divisors(gpus):
        if pipeline > min(config.num_hidden_layers, MOST_STAGES):
            break
        for context in divisors(gpus // pipeline):
            if context > 1 and (work.context % context or work.context // context < LEAST_TOKENS):
                continue
            data = gpus // pipeline // context
            spread = [e for e in divisors(data * context) if experts % e == 0]
            rows = [r for r in ROWS if r == 1 or data * r <= work.sequences]
            sharding: tuple[Sharding, ...] = ("weights", "states") if data * context > 1 else ("weights",)
            kinds = KINDS if config.residual_period is not None else KINDS[:-1]
            for expert, kind, again, many in product(spread, sharding, kinds, rows):
                yield Layout(data, context, pipeline, expert, kind, again, many)


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _needs(config: K3Config, made: list[Stage], layout: Layout, work: Work) -> Memory:
    """Of the stage that needs most."""
    return max((memory(config, stage, layout, work) for stage in made), key=lambda m: m.peak)


DEGREES = {
    "pipeline": "all layers in one stage",
    "context": "whole sequences on a GPU",
    "expert": "all experts of a layer on every GPU",
}


def reasons(best: Proposal, tried: list[Proposal], work: Work) -> Iterator[str]:
    """For every degree above 1 and every other choice, what the best layout without it would be."""
    x = best.layout
    for name, otherwise in DEGREES.items():
        if getattr(x, name) > 1:
            yield f"{name} {getattr(x, name)}: {otherwise} {_instead(best, tried, name, 1)}"
    if x.recompute != "none":
        yield f"{x.recompute} recomputed: to keep all activations {_instead(best, tried, 'recompute', 'none')}"
    if x.sharding == "states":
        yield f"weights whole: to gather them layer by layer {_instead(best, tried, 'sharding', 'weights')}"
    elif x.shards > 1:
        yield f"weights sharded: to keep them whole {_instead(best, tried, 'sharding', 'states')}"
    if (idle := x.idle(work)) > 0.005:
        yield f"idle {idle:.0%}: {work.sequences:,} sequences a step do not divide among {x.data} replicas"


def _instead(best: Proposal, tried: list[Proposal], name: str, value: object) -> str:
    """What comes of the best layout with that value instead."""
    others = [proposal for proposal in tried if getattr(proposal.layout, name) == value]
    if not others:
        return "is no layout over so many GPUs"
    other = min(others, key=_rank)
    if not other.fits:
        return f"needs {min(proposal.memory.peak for proposal in others) / 1e9:,.0f} GB a GPU"
    ratio = other.seconds / best.seconds
    return "takes as long" if ratio < 1.005 else f"takes {ratio:.3g} times as long"


def _too_few(config: K3Config, counted: Sizes, work: Work, gpus: int, gpu: Gpu) -> str:
    """The line that says below which number nothing can fit, and a number that does."""
    share = reduce(add, (counted.first, *counted.layers, counted.last))
    least = math.ceil(floor(share) / (FILLED * gpu.memory))
    room = FILLED * gpu.memory
    for n in _numbers(max(least, gpus + 1)):
        cut = {d: stages(config, counted, d) for d in divisors(n) if d <= min(MOST_STAGES, len(counted.layers))}
        small = [
            x for x in layouts(config, work, n) if x.recompute != "none" and x.rows == 1 and x.sharding == "weights"
        ]
        needs = [_needs(config, cut[x.pipeline], x, work) for x in small]
        smallest = min(needs, key=lambda m: m.peak)
        if smallest.peak <= room:
            return f"--gpus: expected at least {max(least, gpus + 1):,} for stage {work.name}, got {gpus:,}; {n:,} fit"
    part, size = max({**smallest.states, **smallest.passes}.items(), key=lambda item: item[1])
    return (
        f"--gpus: expected far more than {n:,} for stage {work.name}, got {gpus:,}: even there {part} take "
        f"{size / 1e9:,.0f} GB a GPU; shorten the context"
    )


def _numbers(least: int) -> Iterator[int]:
    """Some to try from there on: every one in a server, then whole servers, in steps of a tenth or so."""
    yield from range(least, SERVER)
    servers = -(-max(least, SERVER) // SERVER)
    for _ in range(MOST_TRIES):
        step = 1 << max(0, (servers // 10).bit_length() - 1)  # numbers with many divisors
        servers = -(-servers // step) * step
        yield SERVER * servers
        servers += step

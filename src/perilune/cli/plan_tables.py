"""A plan as tables for people, and as values for programs."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from perilune.cli.numbers import human
from perilune.models.k3 import K3Config
from perilune.models.k3.flops import training_flops_per_token
from perilune.plan.gpus import Gpu
from perilune.plan.propose import Plan

DAY = 86_400
MWH = 3.6e9  # joules


def as_values(name: str, kind: str, gpu: Gpu, config: K3Config, plans: Sequence[Plan]) -> dict[str, Any]:
    """All that the tables say, in bytes and seconds."""
    seconds = sum(plan.seconds for plan in plans)
    return {
        "name": name,
        "gpu": kind,
        "gpus": plans[0].gpus,
        "tokens": sum(plan.work.tokens for plan in plans),
        "seconds": seconds,
        "joules": seconds * plans[0].gpus * gpu.watts,
        "joules_of_servers": seconds * plans[0].gpus * gpu.server_watts,
        "stages": [_stage_values(plan, gpu, config) for plan in plans],
    }


def _stage_values(plan: Plan, gpu: Gpu, config: K3Config) -> dict[str, Any]:
    best, work = plan.proposal, plan.work
    assert best.time is not None
    layout = best.layout
    return {
        "name": work.name,
        "context": work.context,
        "batch_tokens": work.batch_tokens,
        "tokens": work.tokens,
        "layout": {
            "data": layout.data,
            "context": layout.context,
            "pipeline": layout.pipeline,
            "expert": layout.expert,
            "sharding": layout.sharding,
            "recompute": layout.recompute,
            "rows": layout.rows,
            "micro_batches": layout.micro_batches(work),
        },
        "reasons": list(plan.reasons),
        "bytes": {"states": best.memory.states, "passes": best.memory.passes, "step": best.memory.step},
        "peak_bytes": best.memory.peak,
        "micro_batch_seconds": best.time.micro_batch,
        "beside_seconds": best.time.beside,
        "once_seconds": best.time.once,
        "step_seconds": best.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "utilization": utilization(plan, gpu, config),
        "seconds": plan.seconds,
    }


def utilization(plan: Plan, gpu: Gpu, config: K3Config) -> float:
    """Of the GPUs' peak, what the model's own operations take: nothing that is recomputed counts."""
    needed = training_flops_per_token(config, plan.work.context) * plan.tokens_per_second
    return needed / (plan.gpus * gpu.peak)


def show(name: str, kind: str, gpu: Gpu, config: K3Config, plans: Sequence[Plan]) -> None:
    console = Console()
    gpus = plans[0].gpus
    console.print(_overview(f"{name} on {gpus:,} x {kind}", gpu, config, plans))
    console.print(_memory_table(gpu, plans))
    console.print(_time_table(plans))
    for plan in plans:
        for reason in plan.reasons:
            console.print(f"{plan.work.name}: {reason}", soft_wrap=True, highlight=False)
    if gpus == 1:
        for plan in plans:
            layout = plan.proposal.layout
            changes = f"micro_tokens={layout.micro_tokens(plan.work)} recompute={layout.recompute}"
            console.print(
                f"{plan.work.name}, as its stage says it to train: {changes}", soft_wrap=True, highlight=False
            )
    seconds = sum(plan.seconds for plan in plans)
    console.print(
        f"{human(sum(plan.work.tokens for plan in plans))} tokens in {days(seconds)}, "
        f"{energy(seconds * gpus * gpu.watts)} by GPUs at full power, "
        f"{energy(seconds * gpus * gpu.server_watts)} by servers at theirs",
        soft_wrap=True,
        highlight=False,
    )


def _overview(title: str, gpu: Gpu, config: K3Config, plans: Sequence[Plan]) -> Table:
    """A column for every stage: its layout, and what comes of it."""
    table = _table(title, "stage", plans)
    layouts = [plan.proposal.layout for plan in plans]
    works = [plan.work for plan in plans]
    rows: list[tuple[str, list[Any]]] = [
        ("tokens", [human(work.tokens) for work in works]),
        ("tokens of a sequence", [f"{work.context:,}" for work in works]),
        ("tokens of a step", [human(work.batch_tokens) for work in works]),
        ("data x context x pipeline", [f"{x.data} x {x.context} x {x.pipeline}" for x in layouts]),
        ("experts over", [f"{x.expert} GPUs" if x.expert > 1 else "none" for x in layouts]),
        ("sharded", ["nothing" if x.shards == 1 else x.sharding for x in layouts]),
        ("activations", ["kept" if x.recompute == "none" else f"{x.recompute} recomputed" for x in layouts]),
        ("micro-batches x sequences", [f"{x.micro_batches(work)} x {x.rows}" for x, work in zip(layouts, works)]),
        ("GB a GPU", [f"{plan.proposal.memory.peak / 1e9:.1f} of {gpu.memory / 1e9:.0f}" for plan in plans]),
        ("tokens a second", [f"{plan.tokens_per_second:,.0f}" for plan in plans]),
        ("of the peak", [f"{utilization(plan, gpu, config):.0%}" for plan in plans]),
        ("time", [days(plan.seconds) for plan in plans]),
    ]
    for label, cells in rows:
        table.add_row(label, *cells)
    return table


def _memory_table(gpu: Gpu, plans: Sequence[Plan]) -> Table:
    """What stays, and of the passes and the optimizer's step, which come one after the other, the larger."""
    table = _table("GB on the GPU that needs most", "part", plans)
    memories = [plan.proposal.memory for plan in plans]
    for title, group in (
        ("from step to step", [m.states for m in memories]),
        ("in a pass", [m.passes for m in memories]),
        ("or in the optimizer's step", [m.step for m in memories]),
    ):
        _add_group(table, title, group, 1e9, "{:,.2f}")
    table.add_row("[bold]at the peak", *(f"[bold]{m.peak / 1e9:,.1f}" for m in memories))
    return table


def _time_table(plans: Sequence[Plan]) -> Table:
    table = _table("milliseconds on the slowest stage of the pipeline", "part", plans)
    times = [plan.proposal.time for plan in plans]
    found = [time for time in times if time is not None]
    _add_group(table, "a micro-batch", [time.micro_batch for time in found], 1e-3, "{:,.1f}")
    beside = [{"sharded weights and gradients": time.beside} if time.beside else {} for time in found]
    if any(beside):
        _add_group(table, "beside it", beside, 1e-3, "{:,.1f}")
    _add_group(table, "once a step", [time.once for time in found], 1e-3, "{:,.1f}")
    table.add_row("[bold]a step", *(f"[bold]{plan.proposal.seconds / 1e-3:,.0f}" for plan in plans))
    return table


def _table(title: str, first: str, plans: Sequence[Plan]) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for plan in plans:
        table.add_column(plan.work.name, justify="right", no_wrap=True)
    return table


def _add_group(table: Table, title: str, columns: list[dict[str, float]], unit: float, form: str) -> None:
    """A row for each part that any column has, the sum of all in the group's own."""
    table.add_row(title, *(form.format(sum(column.values()) / unit) for column in columns), style="bold")
    for part in dict.fromkeys(part for column in columns for part in column):
        table.add_row(f"  {part}", *(form.format(c[part] / unit) if part in c else "" for c in columns))
    table.add_section()


def days(seconds: float) -> str:
    """In the unit that suits."""
    for unit, size in (("days", DAY), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


def energy(joules: float) -> str:
    for unit, size in (("GWh", 1000 * MWH), ("MWh", MWH), ("kWh", MWH / 1000)):
        if joules >= size:
            return f"{joules / size:,.1f} {unit}"
    return f"{joules / MWH * 1e6:,.1f} Wh"

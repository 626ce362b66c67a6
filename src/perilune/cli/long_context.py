"""What a model finds in long texts, as tables."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show(figures: dict[str, Any], console: Console) -> None:
    """Accuracy by task and length, by length and depth where that is known, and loss by position."""
    trained = figures["trained"]
    lengths = sorted({row["length"] for rows in figures["tasks"].values() for row in rows})
    table = Table(title="right answers, with their standard error", caption=f"* longer than trained on ({trained:,})")
    table.add_column("task")
    table.add_column("chance", justify="right")
    for length in lengths:
        table.add_column(heading(length, trained), justify="right")
    for name, rows in figures["tasks"].items():
        by_length = {row["length"]: row for row in rows}
        chance = percent(rows[0]["chance"]) if rows else ""
        table.add_row(name, chance, *(accuracy(by_length[n]) if n in by_length else "" for n in lengths))
    console.print(table)
    for name, rows in figures["tasks"].items():
        if any(row["positions"] for row in rows):
            console.print(by_depth(name, rows, trained))
    if figures["loss_by_position"]:
        console.print(by_position(figures["loss_by_position"], trained))


def by_depth(name: str, rows: Sequence[dict[str, Any]], trained: int) -> Table:
    """A line a length, a column for each stretch of the text that an answer can stand in."""
    starts = sorted({place["from"] for row in rows for place in row["positions"]})
    table = Table(title=f"{name}: right answers by where in the text they stand, from")
    table.add_column("tokens", justify="right")
    for start in starts:
        table.add_column(percent(start), justify="right")
    for row in rows:
        found = {place["from"]: percent(place["accuracy"]) for place in row["positions"]}
        table.add_row(heading(row["length"], trained), *(found.get(start, "") for start in starts))
    return table


def by_position(curves: Sequence[dict[str, Any]], trained: int) -> Table:
    """A line for each stretch of positions, a column for each context."""
    table = Table(title="loss by position, nats a token")
    table.add_column("position", justify="right")
    for curve in curves:
        table.add_column(f"texts of {heading(curve['context'], trained)}", justify="right")
    found = [{bucket["from"]: bucket for bucket in curve["buckets"]} for curve in curves]
    for start in sorted(set().union(*found)):
        table.add_row(f"{start:,}", *(f"{buckets[start]['nats']:.3f}" if start in buckets else "" for buckets in found))
    return table


def heading(length: int, trained: int) -> str:
    return f"{length:,}{' *' if length > trained else ''}"


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def accuracy(row: dict[str, Any]) -> str:
    """With its standard error, one right and one wrong answer added: a few right ones are no certainty."""
    share, asked = row["accuracy"], row["asked"]
    likely = (share * asked + 1) / (asked + 2)
    return f"{percent(share)} ±{100 * math.sqrt(likely * (1 - likely) / (asked + 2)):.2g}"

"""Count a preset's parameters, part by part: all of them, and those one token uses; or list how each is optimised."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli.folders import model_folder
from perilune.cli.numbers import human

if TYPE_CHECKING:
    from perilune.models.k3 import K3Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from perilune.models.k3 import presets

    parser.add_argument("preset", help=f"{', '.join(presets.PRESETS)}; or the path of a config.json, a model or a run")
    parser.add_argument("--roles", action="store_true", help="list what the optimizer does with every parameter")


def run(args: argparse.Namespace) -> int:
    config = find_config(args.preset)
    if args.roles:
        show_roles(config)
    else:
        show_audit(args.preset, config)
    return 0


def show_roles(config: "K3Config") -> None:
    """One line a parameter: name, shape, Muon or AdamW, the matrices Muon sees, weight decay."""
    import torch

    from perilune.models.k3 import K3Model

    with torch.device("meta"):
        rows = K3Model(config).parameter_roles().table()
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def show_audit(name: str, config: "K3Config") -> None:
    """The table of parts, and the sums in a line."""
    from rich.console import Console
    from rich.table import Table

    from perilune.models.k3.audit import audit

    counted = audit(config)
    table = Table(title=f"{name}: parameters", show_footer=True)
    table.add_column("part", "total")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("parameters", f"{counted.total:,}", justify="right", no_wrap=True)
    table.add_column("active for a token", f"{counted.active:,}", justify="right", no_wrap=True)
    for line in counted.lines:
        table.add_row(line.part, f"{line.count:,}", f"{line.total:,}", f"{line.active:,}")
    console = Console()
    console.print(table)
    console.print(
        f"{human(counted.total)} parameters, {human(counted.active)} active for a token (the head counted, the "
        f"embedding table not); {counted.tensors:,} text tensors in a checkpoint",
        soft_wrap=True,
    )


def find_config(name: str) -> "K3Config":
    """The preset of that name, or the configuration in a file or folder."""
    from perilune.models.k3 import K3Config, presets
    from perilune.models.k3.convert import read_config

    path = Path(name)
    if name in presets.PRESETS or not (path.suffix == ".json" or path.is_dir()):
        return presets.get(name)
    return K3Config.from_hf(read_config(model_folder(path) / "config.json" if path.is_dir() else path))

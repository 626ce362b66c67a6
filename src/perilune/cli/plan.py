"""Count a preset's parameters, part by part: all of them, and those one token uses."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from perilune.models.k3 import presets

    parser.add_argument("preset", help=f"{', '.join(presets.PRESETS)}; or the path of a config.json")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from perilune.core.errors import ConfigError
    from perilune.models.k3 import K3Config, presets
    from perilune.models.k3.audit import audit

    path = Path(args.preset)
    if path.suffix == ".json":
        try:
            config = K3Config.from_hf(json.loads(path.read_text()))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"{path}: expected a readable config.json, got {error}; mend the path or the file"
            ) from None
    else:
        config = presets.get(args.preset)
    counted = audit(config)
    table = Table(title=f"{args.preset}: parameters", show_footer=True)
    table.add_column("part", "total")
    table.add_column("count", justify="right")
    table.add_column("parameters", f"{counted.total:,}", justify="right")
    table.add_column("active for a token", f"{counted.active:,}", justify="right")
    for line in counted.lines:
        table.add_row(line.part, f"{line.count:,}", f"{line.total:,}", f"{line.active:,}")
    console = Console()
    console.print(table)
    console.print(
        f"{human(counted.total)} parameters, {human(counted.active)} active for a token (the head counted, the "
        f"embedding table not); {counted.tensors:,} text tensors in a checkpoint"
    )
    return 0


def human(n: float) -> str:
    """Three digits and a letter: 2.78T."""
    for unit in ("", "K", "M", "B", "T"):
        if n < 1000 or unit == "T":
            return f"{n:.4g}{unit}" if n >= 100 else f"{n:.3g}{unit}"
        n /= 1000
    raise AssertionError

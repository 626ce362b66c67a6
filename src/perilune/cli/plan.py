"""Count a preset's parameters, part by part: all of them, and those one token uses; or list how each is optimised.

With --gpus: what a run of a recipe or preset needs on so many, how it would lie on them, how long it takes.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli.folders import model_folder
from perilune.cli.numbers import at_least, human
from perilune.core.errors import ConfigError

if TYPE_CHECKING:
    from perilune.models.k3 import K3Config
    from perilune.plan.layout import Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from perilune.models.k3 import presets
    from perilune.plan.gpus import GPUS

    parser.add_argument(
        "preset",
        help=f"{', '.join(presets.PRESETS)}; or the path of a config.json, a model or a run; "
        "with --gpus any recipe that `perilune train` knows, too",
    )
    parser.add_argument("--roles", action="store_true", help="list what the optimizer does with every parameter")
    parser.add_argument("--gpus", type=at_least(1), help="plan a run on so many GPUs")
    parser.add_argument("--gpu", default="h200", help=f"of which kind: {', '.join(GPUS)} (h200)")
    parser.add_argument("--tokens", type=at_least(1), help="to train on; else the recipe's, or 20 an active parameter")
    parser.add_argument("--context", type=at_least(1), help="tokens of a sequence; else the recipe's, or 8192")
    parser.add_argument("--batch-tokens", type=at_least(1), help="tokens of a step; else the recipe's, or 2097152")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")


def run(args: argparse.Namespace) -> int:
    if args.gpus is not None:
        show_plan(args)
        return 0
    for name in ("tokens", "context", "batch_tokens", "json"):
        if getattr(args, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option}: expected --gpus beside it, got none; say on how many GPUs")
    config = find_config(args.preset)
    if args.roles:
        show_roles(config)
    else:
        show_audit(args.preset, config)
    return 0


def show_plan(args: argparse.Namespace) -> None:
    """A plan for each stage, as tables or JSON."""
    from perilune.cli.plan_tables import as_values, show
    from perilune.plan.gpus import gpu_called
    from perilune.plan.propose import plan
    from perilune.plan.sizes import sizes

    gpu = gpu_called(args.gpu)
    config, works = what_to_do(args)
    counted = sizes(config)
    plans = [plan(config, work, args.gpus, gpu, counted) for work in works]
    if args.json:
        print(json.dumps(as_values(args.preset, args.gpu, gpu, config, plans), indent=1))
    else:
        show(args.preset, args.gpu, gpu, config, plans)


def what_to_do(args: argparse.Namespace) -> "tuple[K3Config, list[Work]]":
    """The model, and the stretches of training: a recipe's stages, or one by options and defaults."""
    from perilune import recipes
    from perilune.models.k3.flops import flops_per_token
    from perilune.plan.layout import Work

    recipe = recipes.get(args.preset) if args.preset in recipes.RECIPES else None
    if recipe is not None and args.tokens is args.context is args.batch_tokens is None:
        return recipe.model, [Work(s.name, s.context, s.batch_tokens, s.tokens) for s in recipe.stages]
    config = find_config(args.preset) if recipe is None else recipe.model
    first = None if recipe is None else recipe.stages[0]
    context = args.context or (first.context if first else 8192)
    batch = args.batch_tokens or max(context, first.batch_tokens if first else 2**21)
    if batch < context:
        raise ConfigError(f"--batch-tokens: expected at least the context, {context}, got {batch}; a step holds one")
    budget = sum(s.tokens for s in recipe.stages) if recipe else round(10 * sum(flops_per_token(config, 1).values()))
    return config, [Work(f"{context:,}", context, batch, max(batch, args.tokens or budget))]


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

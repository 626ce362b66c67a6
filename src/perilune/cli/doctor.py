"""What this machine has, and which backend each operation will run on."""

import argparse

OPS = ("kda", "short_conv", "attn_res", "situ_glu", "grouped_experts", "quantile_bias", "cross_entropy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    import os
    import platform

    import torch
    from rich.console import Console
    from rich.table import Table

    from perilune import __version__

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    rows = {
        "perilune": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CPU": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "CUDA": cuda,
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    for name, backends in _backends().items():
        table.add_row(f"ops.{name}", ", ".join(backends))
    Console().print(table)
    return 0


def _backends() -> dict[str, tuple[str, ...]]:
    """Each operation's backends, best first."""
    from importlib import import_module

    from perilune.core.backends import Backends

    found = {}
    for op in OPS:
        for value in vars(import_module(f"perilune.ops.{op}.api")).values():
            if isinstance(value, Backends):
                found[value.op] = value.names
    return found

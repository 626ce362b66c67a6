"""What the experiments' commands share: parts to be done one after the other, and one line for what cannot be."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from perilune.cli.numbers import at_least
from perilune.core.errors import PeriluneError


def parser_of(name: str, what: str | None, parts: Sequence[str], home: Path, jobs: str) -> argparse.ArgumentParser:
    """Of `python -m experiments.NAME PART ...`, with the options that all have.  jobs: how many without the option."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}", description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--out", type=Path, default=home, help=f"where runs go ({home})")
    parser.add_argument("--jobs", type=at_least(1), help=f"runs at a time ({jobs})")
    parser.add_argument("--seeds", type=at_least(1), help="how many of a scale's seeds (all)")
    return parser


def do_parts(args: argparse.Namespace, do: Callable[[str, argparse.Namespace, Console], None]) -> int:
    """Each part in turn; returns the exit code."""
    try:
        for part in args.parts:
            do(part, args, Console())
    except PeriluneError as error:
        print(error, file=sys.stderr)
        return 2
    return 0

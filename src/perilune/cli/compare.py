"""Set runs side by side on one HTML page: runs that differ by their seed alone are one variant, and are averaged.

perilune compare runs/quantile-seed0 runs/quantile-seed1 runs/sign-seed0 runs/sign-seed1
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, help="two runs or more")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="the page (compare.html)")


def run(args: argparse.Namespace) -> int:
    from perilune.report import write_comparison

    print(write_comparison(args.folders, args.out))
    return 0

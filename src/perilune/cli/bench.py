"""Time the operations against their baselines, in one process and on the same inputs; wrong results are not timed."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="which; all if none is named")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (all cores)")


def run(args: argparse.Namespace) -> int:
    from perilune.bench.runner import main

    return main(args.names, json_path=args.json, threads=args.threads)

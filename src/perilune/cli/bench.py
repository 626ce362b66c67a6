"""Time the operations against their baselines, in one process and on the same inputs; wrong results are not timed."""

import argparse
from pathlib import Path

from perilune.cli.folders import check_file
from perilune.cli.numbers import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", default=[], help="which; all if none is named")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    parser.add_argument("--threads", type=at_least(1), default=None, help="CPU threads (all cores)")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown, as pages hold them")


def run(args: argparse.Namespace) -> int:
    check_file(args.json, "--json")
    from perilune.bench.runner import main  # not quick to load

    return main(args.names, json_path=args.json, threads=args.threads, markdown=args.markdown)

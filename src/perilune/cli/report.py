"""Show what a run's model learned: one HTML page, made from the run's files, that works offline.

perilune report runs/demo
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run, finished or still going (runs/demo)")
    parser.add_argument("--out", type=Path, default=None, help="the page (report.html in the run's folder)")


def run(args: argparse.Namespace) -> int:
    from perilune.report import write_report

    print(write_report(args.folder, args.out))
    return 0

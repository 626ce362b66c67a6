"""The model of a run or a checkpoint as a folder of safetensors with the released names.

perilune export runs/small --out small                                     its newest whole checkpoint
perilune export runs/small/checkpoints/step-00000100 --out small-at-100    one process wrote it, or many
"""

import argparse
from pathlib import Path

from perilune.core.errors import CheckpointError, DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")


def run(args: argparse.Namespace) -> int:
    from perilune.train.checkpoint import Checkpoints, check_whole
    from perilune.train.folder import check_writable
    from perilune.train.parallel.checkpoint import export

    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise DataError(f"{args.out}: expected a new or empty folder, found another; choose another name")
    check_writable(args.out)
    one = args.source.parent.name == "checkpoints"
    checkpoint = check_whole(args.source) if one else Checkpoints(args.source).latest()
    if checkpoint is None:
        raise CheckpointError(f"{args.source}: expected a run with a checkpoint, found none; train first")
    export(checkpoint, args.out)
    print(f"{checkpoint.name} of {checkpoint.parent.parent} is in {args.out}")
    return 0

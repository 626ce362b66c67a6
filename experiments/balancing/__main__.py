"""The command: see the package's docstring."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from experiments.balancing import __doc__ as what
from experiments.command import do_parts, parser_of
from perilune.cli.train import device_name, find_device

HOME = Path("runs/balancing")


def main(words: list[str] | None = None) -> int:
    from experiments.balancing.recipes import SCALES

    parts = ("map", *SCALES, "page")
    parser = parser_of("balancing", what, parts, HOME, jobs="as many as fit")
    parser.add_argument("--device", action="append", type=device_name, help="auto, cpu or cuda:N; several share (auto)")
    parser.add_argument("--rules", help="which of a scale's rules, by commas (all)")
    parser.add_argument("--situations", help="which of a scale's situations, by commas (all)")
    return do_parts(parser.parse_args(words), do)


def do(part: str, args: argparse.Namespace, console: Console) -> None:
    if part == "map":
        from experiments.balancing import synthetic

        synthetic.measure(args.out / "map", console)
    elif part == "page":
        from experiments.balancing import page

        page.write(args.out, console)
    else:
        from experiments.balancing.recipes import SCALES
        from experiments.balancing.runs import train_scale

        scale = SCALES[part].limited(args.seeds, args.rules, args.situations)
        devices = [find_device(device) for device in args.device or ["auto"]]
        train_scale(scale, args.out / part, devices, args.jobs, console)


if __name__ == "__main__":
    sys.exit(main())

"""The command: see the package's docstring."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from experiments.balancing import __doc__ as what
from perilune.cli.numbers import at_least
from perilune.cli.train import device_name, find_device
from perilune.core.errors import PeriluneError

HOME = Path("runs/balancing")


def main(words: list[str] | None = None) -> int:
    from experiments.balancing.recipes import SCALES

    parts = ("map", *SCALES, "page")
    parser = argparse.ArgumentParser(
        prog="python -m experiments.balancing", description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--out", type=Path, default=HOME, help=f"where runs go ({HOME})")
    parser.add_argument("--device", action="append", type=device_name, help="auto, cpu or cuda:N; several share (auto)")
    parser.add_argument("--jobs", type=at_least(1), help="runs at a time (as many as fit)")
    parser.add_argument("--seeds", type=at_least(1), help="how many of a scale's seeds (all)")
    parser.add_argument("--rules", help="which of a scale's rules, by commas (all)")
    parser.add_argument("--situations", help="which of a scale's situations, by commas (all)")
    args = parser.parse_args(words)
    try:
        for part in args.parts:
            do(part, args, Console())
    except PeriluneError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


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

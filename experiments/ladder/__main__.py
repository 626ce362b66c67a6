"""The command: see the package's docstring."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from experiments.command import do_parts, parser_of
from experiments.ladder import __doc__ as what
from experiments.ladder.recipes import SCALES, chosen_variants
from perilune.cli.train import device_name, find_device

HOME = Path("runs/ladder")


def main(words: list[str] | None = None) -> int:
    parser = parser_of("ladder", what, (*SCALES, "page"), HOME, jobs="one seed")
    parser.add_argument("--device", type=device_name, default="auto", help="auto, cpu or cuda:N (auto)")
    parser.add_argument("--variants", help="which ways up, by commas (all)")
    parser.add_argument("--minutes", type=float, help="ends in that time, keeping what is finished (none)")
    return do_parts(parser.parse_args(words), do)


def do(part: str, args: argparse.Namespace, console: Console) -> None:
    if part == "page":
        from experiments.ladder import page

        page.write(args.out, console)
        return
    import torch

    from experiments.ladder.runs import run_scale

    scale = SCALES[part].limited(args.seeds)
    variants = chosen_variants(scale, args.variants)
    device = torch.device(find_device(args.device))
    run_scale(scale, args.out / part, device, args.jobs or scale.jobs, args.minutes, variants, console)


if __name__ == "__main__":
    sys.exit(main())

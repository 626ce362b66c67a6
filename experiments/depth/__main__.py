"""The command: see the package's docstring."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from experiments.command import do_parts, parser_of
from experiments.depth import __doc__ as what
from experiments.depth.recipes import SCALES, chosen_variants
from perilune.cli.train import device_name, find_device

HOME = Path("runs/depth")


def main(words: list[str] | None = None) -> int:
    parser = parser_of("depth", what, (*SCALES, "page", "bank"), HOME, jobs="what the scale says")
    parser.add_argument("--device", type=device_name, default="auto", help="auto, cpu or cuda:N (auto)")
    parser.add_argument("--variants", help="which forms of the residual, by commas (all)")
    parser.add_argument("--minutes", type=float, help="ends in that time, keeping what is finished (none)")
    parser.add_argument(
        "--attn-res", choices=("auto", "triton", "chunked", "reference"), default="auto",
        help="how mixers compute; chunked is plain torch (auto)",
    )  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="on a GPU: launch every kernel anew, record no graphs")
    return do_parts(parser.parse_args(words), do)


def do(part: str, args: argparse.Namespace, console: Console) -> None:
    if part == "page":
        from experiments.depth import page

        page.write(args.out, console)
        return
    if part == "bank":
        from experiments.depth import bank

        bank.measure(args.out / "bank", args.seeds or 2, console)
        return
    import torch

    from experiments.depth.runs import run_scale
    from experiments.depth.train import Place

    scale = SCALES[part].limited(args.seeds)
    device = torch.device(find_device(args.device))
    place = Place(device, bf16=scale.bf16, graphs=device.type == "cuda" and not args.eager)
    jobs, variants = args.jobs or scale.jobs, chosen_variants(scale, args.variants)
    run_scale(scale, args.out / part, place, args.attn_res, jobs, args.minutes, variants, console)


if __name__ == "__main__":
    sys.exit(main())

"""Held-out bits per byte of a trained model; with --long-context also what it finds in long texts."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli.folders import check_file, load_model
from perilune.cli.numbers import at_least
from perilune.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from perilune.train.config import Run

CONTEXT = 2048  # where no run says


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run (runs/demo) or a model folder")
    parser.add_argument("--text", type=Path, default=None, help="judge on this file instead of the run's held-out text")
    parser.add_argument(
        "--context",
        type=at_least(1),
        default=None,
        help=f"tokens a document may span (as in the run's last stage; {CONTEXT} for a model folder)",
    )
    parser.add_argument("--long-context", action="store_true", help="ask for what stands far back in long texts")
    parser.add_argument(
        "--lengths",
        type=lengths,
        default=None,
        metavar="N,N,...",
        help="of those texts, in tokens (128,512,2048,8192,16384)",
    )
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file as well")


def lengths(text: str) -> tuple[int, ...]:
    """`128,512` as numbers."""
    return tuple(map(at_least(1), text.split(",")))


def run(args: argparse.Namespace) -> int:
    from perilune.train.evaluate import bits_per_byte
    from perilune.train.folder import read_run, write_json

    check_file(args.json, "--json")
    if args.lengths and not args.long_context:
        raise ConfigError("--lengths: expected --long-context beside it, got none; add it")
    model, tokenizer = load_model(args.folder)
    trained = read_run(args.folder) if args.text is None or (args.folder / "run.json").exists() else None
    context = args.context or (trained.stages[-1].context if trained else CONTEXT)
    if args.text is not None:
        texts = [read_text(args.text)]
    else:
        assert trained is not None
        texts = held_out(trained)
    size = sum(len(text.encode()) for text in texts)
    bits = bits_per_byte(model, tokenizer, texts, context=context)
    print(f"{bits:.4f} bits per byte over {size:,} bytes")
    figures: dict[str, Any] = {"bits_per_byte": bits, "bytes": size, "context": context}
    if args.long_context:
        from rich.console import Console

        from perilune.cli.long_context import show
        from perilune.train.probes import LENGTHS, long_context

        console = Console()
        with console.status("long texts") as status:
            figures["long_context"] = long_context(
                model,
                tokenizer,
                texts,
                trained=max(stage.context for stage in trained.stages) if trained else context,
                lengths=args.lengths or LENGTHS,
                progress=status.update,
            )
        show(figures["long_context"], console)
    if args.json is not None:
        write_json(args.json, figures)
    return 0


def held_out(run: "Run") -> list[str]:
    """The texts of all of a run's sources that it never learns from."""
    from perilune.data.source import open_source

    corpora = [open_source(source) for source in run.data.sources.values()]
    return [document.text for corpus in corpora for document in corpus.held_out]


def read_text(path: Path) -> str:
    """The text of a file, line ends as they are; DataError if it has none."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text, got {error}; give another file") from None
    if not text:
        raise DataError(f"{path}: expected some text, got an empty file; give another")
    return text

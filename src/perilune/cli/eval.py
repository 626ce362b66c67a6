"""Held-out bits per byte of a trained model."""

import argparse
from pathlib import Path

from perilune.cli.folders import load_model
from perilune.cli.numbers import at_least

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


def run(args: argparse.Namespace) -> int:
    from perilune.train.evaluate import bits_per_byte
    from perilune.train.folder import read_run
    from perilune.train.loop import open_corpus

    model, tokenizer = load_model(args.folder)
    trained = read_run(args.folder) if args.text is None or (args.folder / "run.json").exists() else None
    context = args.context or (trained.stages[-1].context if trained else CONTEXT)
    if args.text is not None:
        texts = [read_text(args.text)]
    else:
        assert trained is not None
        texts = [document.text for document in open_corpus(trained.data).held_out]
    bits = bits_per_byte(model, tokenizer, texts, context=context)
    print(f"{bits:.4f} bits per byte over {sum(len(text.encode()) for text in texts):,} bytes")
    return 0


def read_text(path: Path) -> str:
    """The text of a file, line ends as they are; DataError if it has none."""
    from perilune.core.errors import DataError

    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text, got {error}; give another file") from None
    if not text:
        raise DataError(f"{path}: expected some text, got an empty file; give another")
    return text

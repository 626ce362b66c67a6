"""Held-out bits per byte of a trained model."""

import argparse
from pathlib import Path

from perilune.cli.folders import model_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run (runs/demo) or a model folder")
    parser.add_argument("--text", type=Path, default=None, help="judge on this file instead of the run's held-out text")
    parser.add_argument("--context", type=int, default=2048, help="tokens a document may span (2048)")


def run(args: argparse.Namespace) -> int:
    from perilune.core.errors import DataError
    from perilune.data.tokenizer import ByteBPE
    from perilune.models.k3 import K3Model
    from perilune.train.evaluate import bits_per_byte

    folder = model_folder(args.folder)
    if args.text is None:
        texts = held_out(args.folder)
    else:
        try:
            texts = [args.text.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{args.text}: expected readable UTF-8 text, got {error}; give another file") from None
        if not texts[0]:
            raise DataError(f"{args.text}: expected some text, got an empty file; give another")
    bits = bits_per_byte(K3Model.from_pretrained(folder), ByteBPE.load(folder), texts, context=args.context)
    print(f"{bits:.4f} bits per byte over {sum(len(t.encode()) for t in texts):,} bytes")
    return 0


def held_out(folder: Path) -> list[str]:
    """The texts the run in `folder` did not see."""
    import json

    from perilune.core.errors import CheckpointError
    from perilune.train.config import Run
    from perilune.train.loop import open_corpus

    path = folder / "run.json"
    try:
        run = Run.from_dict(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path}: expected a run's configuration, got {error}; give --text FILE instead"
        ) from None
    return [document.text for document in open_corpus(run.data).held_out]

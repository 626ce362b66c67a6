"""Write a text in turns with a trained model.

A line is added to the text as it is and the model goes on from there; an empty line lets it go on.  Ctrl-C stops a
reply, /reset forgets the text, /exit or Ctrl-D ends.  Lines may also come through a pipe.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli.folders import load_model, model_folder
from perilune.cli.numbers import at_least

if TYPE_CHECKING:
    from perilune.infer.text import TextSession

BASE_MODEL = "a base model: it continues text and does not answer"
CHAT_MODEL = "a chat model, but its chat template is not applied: it continues text"
KEYS = "Ctrl-C stops a reply, /reset forgets, /exit ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run (runs/demo) or a model folder")
    parser.add_argument("--tokens", type=at_least(1), default=200, help="of a reply at most (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (0.8)")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw among the likeliest up to this probability (0.95)"
    )
    parser.add_argument("--seed", type=at_least(0), default=None, help="for the same replies every time")


def run(args: argparse.Namespace) -> int:
    from perilune.infer.sampler import Sampling
    from perilune.infer.text import TextSession

    sampling = Sampling(temperature=args.temperature, top_p=args.top_p)
    model, tokenizer = load_model(args.folder)
    session = TextSession(model, tokenizer, sampling=sampling, seed=args.seed)
    kind = CHAT_MODEL if has_chat_template(model_folder(args.folder)) else BASE_MODEL
    print(f"{args.folder}: {kind}.  {KEYS}.", file=sys.stderr, flush=True)
    for line in read_lines():
        if line == "/exit":
            break
        if line == "/reset":
            session.reset()
            continue
        session.write(line if session.at_line_start or not line else "\n" + line)
        show_reply(session, args.tokens)
    return 0


def has_chat_template(folder: Path) -> bool:
    """Whether the model comes with the form that its conversations have, as other libraries keep it."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = None
    return (folder / "chat_template.jinja").exists() or (isinstance(settings, dict) and "chat_template" in settings)


def read_lines() -> Iterator[str]:
    """What is typed, line by line, up to Ctrl-D; or what comes through a pipe."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.removesuffix("\n")
        return
    with suppress(ImportError):  # lines can be edited and called back
        import readline  # noqa: F401

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def show_reply(session: "TextSession", tokens: int) -> None:
    """Prints a reply as it is made; Ctrl-C ends it after the token that is being made."""
    with interrupts() as interrupted:
        for piece in session.reply(tokens):
            print(piece, end="", flush=True)
            if interrupted:
                break
    print(flush=True)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C leaves a mark in the list, nothing else: a model stopped halfway has half a cache."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)

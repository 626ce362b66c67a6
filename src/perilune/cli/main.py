"""`perilune VERB ...`"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from perilune import __version__
from perilune.core.errors import ConfigError, PeriluneError, nearest
from perilune.core.logs import show_logs
from perilune.core.text import has_half_pair

VERBS = {  # verb: its one line of help; each is a module beside this one
    "train": "train a recipe; a run folder keeps everything it made",
    "prepare": "text made ready to be streamed: without copies, near copies and what is no text",
    "eval": "held-out bits per byte of a trained model, and what it makes of long texts",
    "generate": "continue a prompt with a trained model",
    "chat": "write a text in turns with a trained model",
    "ablate": "train a recipe and its variants over several seeds, side by side",
    "report": "one page that shows what a run's model learned",
    "compare": "one page that sets runs side by side, seeds averaged",
    "plan": "count a preset's parameters, part by part; or plan a run on so many GPUs",
    "bench": "time the operations against their baselines",
    "export": "a checkpoint's model, whoever wrote it, as a folder of safetensors",
    "doctor": "what this machine has, which backends run on it, and why",
}


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and that takes no shortened options for the whole ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser_for(verb: str | None) -> argparse.ArgumentParser:
    """The parser of one verb, or the one that lists them."""
    if verb is None:
        parser = Parser(
            prog="perilune",
            usage="perilune VERB ...",
            description="Build, train and run K3-class models.",
            epilog="perilune VERB --help says more about one of them.",
        )
        parser.add_argument("--version", action="version", version=f"perilune {__version__}")
        verbs = parser.add_argument_group("verbs")
        for name, line in VERBS.items():
            verbs.add_argument(name, help=line, nargs="?")
        return parser
    module = import_module(f"perilune.cli.{verb}")
    parser = Parser(prog=f"perilune {verb}", description=module.__doc__)
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show what is decided, and the trace of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 a check failed, 2 the call was wrong, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None:
        words.remove(verb)
    try:
        return run(verb, words)
    except SystemExit as stop:  # what argparse ends with
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print(f"perilune {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        return 0


def run(verb: str | None, words: list[str]) -> int:
    """Runs `verb` with the rest of the line, and puts into one line what went wrong."""
    if verb is None:
        parser_for(None).parse_args(words)
        parser_for(None).print_help()
        return 0
    if verb not in VERBS:
        print(f"perilune: there is no verb {verb!r}; {nearest(verb, VERBS)}", file=sys.stderr)
        return 2
    args = parser_for(verb).parse_intermixed_args(words)
    if args.debug:
        show_logs(debug=True)
    try:
        check_words(words)
        code = import_module(f"perilune.cli.{verb}").run(args)
        print(end="", flush=True)  # what cannot be written is an error here, not at exit
        return code
    except BrokenPipeError:
        raise
    except (PeriluneError, OSError, MemoryError, RuntimeError) as error:
        line = one_line(error)
        if line is None:
            raise
        if args.debug:
            traceback.print_exc()
        else:
            print(f"perilune {verb}: {line}", file=sys.stderr)
        return 2


def check_words(words: Sequence[str]) -> None:
    """Raises ConfigError for bytes that are no UTF-8: they could be neither shown nor kept."""
    for word in filter(has_half_pair, words):
        raise ConfigError(f"command line: expected UTF-8, got {word!r}; rename the file, or type it in UTF-8")


def one_line(error: Exception) -> str | None:
    """What went wrong, in a line; None where the mistake is ours, and the trace says more."""
    text = " ".join(str(error).split())
    if isinstance(error, PeriluneError):
        return text
    if isinstance(error, OSError):  # such as a full disk
        reason = error.strerror or text
        return f"{error.filename}: {reason}" if error.filename else reason
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return "memory: expected enough for this model, got less; choose smaller sizes"
    return None


def entry() -> NoReturn:
    """The installed command."""
    code = main()
    try:
        print(end="", flush=True)
    except OSError:  # said above; Python would say it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)

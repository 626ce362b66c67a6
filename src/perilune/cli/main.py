"""`perilune VERB ...`"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from perilune import __version__
from perilune.core.errors import PeriluneError, nearest

VERBS = {  # verb: its one line of help; each is a module beside this one
    "train": "train a recipe; a run folder keeps everything it made",
    "eval": "held-out bits per byte of a trained model",
    "generate": "continue a prompt with a trained model",
    "plan": "count a preset's parameters, part by part",
    "bench": "time the operations against their baselines",
    "doctor": "what this machine has and which backends will run",
}


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

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
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="version", version=f"perilune {__version__}")
        verbs = parser.add_argument_group("verbs")
        for name, line in VERBS.items():
            verbs.add_argument(name, help=line, nargs="?")
        return parser
    module = import_module(f"perilune.cli.{verb}")
    parser = Parser(
        prog=f"perilune {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the full trace of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 done, 1 a check failed, 2 the call was wrong, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is None:
        parser_for(None).parse_args(words)
        parser_for(None).print_help()
        return 0
    if verb not in VERBS:
        print(f"perilune: there is no verb {verb!r}; {nearest(verb, VERBS)}", file=sys.stderr)
        return 2
    words.remove(verb)
    args = parser_for(verb).parse_intermixed_args(words)
    try:
        return import_module(f"perilune.cli.{verb}").run(args)
    except PeriluneError as error:
        if debug:
            raise
        print(f"perilune {verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"perilune {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def entry() -> NoReturn:
    sys.exit(main())

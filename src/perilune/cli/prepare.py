"""Text made ready once, to be streamed: without copies, near copies and what is no text, as Parquet shards.

perilune prepare texts --pattern '*.jsonl.gz' --near-duplicates 0.8 --clean --out ready
perilune prepare /data/web /data/more --against /data/judged --out ready           and nothing that is in there
perilune prepare hf://datasets/OWNER/NAME --subset en --text-key content --out ready
perilune train nano data.sources.text='{"path":"ready","pattern":"*.parquet","streamed":true}'
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from perilune.core.errors import DataError

LEFT = "prepared.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="+", help="a folder, a file or a dataset of the Hub; of equal texts the first stays"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="a new or empty folder for the shards"
    )
    parser.add_argument("--pattern", default="*", help="which files of folders, at any depth (*)")
    parser.add_argument("--text-key", default="text", help="the field or column that holds the text (text)")
    parser.add_argument("--subset", default=None, help="which part of a dataset of the Hub that has several")
    parser.add_argument(
        "--near-duplicates", type=float, default=None, metavar="J", help="from what similarity on (0.8)"
    )
    parser.add_argument("--clean", action="store_true", help="leave out what is no text: blobs, logs, repetition")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="PATH", help="texts to leave out, and their copies: all files there"
    )


def run(args: argparse.Namespace) -> int:
    import time

    from rich.console import Console

    from perilune.cli.numbers import human
    from perilune.data.prepare import Selection, documents, write_shards
    from perilune.data.source import HUB, STANDARD_LIBRARY, TextSource
    from perilune.train.folder import write_json

    def source(path: str, pattern: str) -> TextSource:
        if path == STANDARD_LIBRARY:
            return TextSource()
        if path.startswith(HUB):
            return TextSource(path=path, subset=args.subset, text_key=args.text_key)
        return TextSource(path=path, pattern=pattern, text_key=args.text_key).resolved()

    sources = [source(path, args.pattern) for path in args.path]
    against = [source(path, "*") for path in args.against]  # what is passed over there would be kept here
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise DataError(f"{args.out}: expected a new or empty folder, found another; choose another name")
    selection = Selection(clean=args.clean, near_duplicates=args.near_duplicates)
    args.out.mkdir(parents=True, exist_ok=True)
    console, start = Console(), time.monotonic()

    def kept() -> Iterator[tuple[str, str]]:
        for text in (text for one in sources for text in documents(one)):
            if selection.keeps(*text):
                yield text

    with console.status("reading"):
        for one in against:
            for name, text in documents(one):
                selection.know(name, text)
        shards = write_shards(kept(), args.out)
    count, seconds = selection.count, time.monotonic() - start
    asked = {key: getattr(args, key) for key in ("path", "pattern", "text_key", "subset", "near_duplicates", "clean")}
    write_json(args.out / LEFT, {**asked, "against": args.against, **count.to_dict()})
    if not count.kept:
        raise DataError(
            f"{args.path[0]}: expected a document to keep, got none of {count.read:,}; {args.out / LEFT} says why"
        )
    console.print(
        f"{count.kept:,} of {count.read:,} documents, {human(count.kept_bytes)} bytes, in {shards:,} shards of "
        f"{args.out}; {seconds:,.0f} s",
        markup=False,
        soft_wrap=True,
    )
    for reason, number in count.dropped.most_common():
        console.print(f"left out {number:,}: {reason}, such as {count.examples[reason]}", markup=False, soft_wrap=True)
    return 0

"""Prose and code from this machine's own Python library: its documentation, and its sources without that."""

import ast
from collections.abc import Iterator
from pathlib import Path

from experiments.balancing.recipes import Scale
from perilune.core.errors import DataError
from perilune.data.corpus import Document, standard_library, text_files
from perilune.data.tokenizer import ByteBPE
from perilune.train.folder import write_json

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TOPICS = "pydoc_data/topics.py"
SHORTEST = 200  # characters of a document


def prepare(scale: Scale, home: Path) -> None:
    """Writes `texts/prose`, `texts/code` and `texts/tokenizer` below `home`, unless they are there whole."""
    folder = home / "texts"
    if (folder / "done.json").exists():
        return
    sizes = {"prose": 0, "code": 0}
    for name, kind, text in documents():
        if len(text) < SHORTEST or sizes[kind] + len(text.encode()) > scale.text_bytes:
            continue
        path = folder / kind / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sizes[kind] += len(text.encode())
        if all(scale.text_bytes - size < SHORTEST for size in sizes.values()):  # nothing more fits
            break
    training = [document.text for kind in sizes for document in text_files(folder / kind).train]
    ByteBPE.train(training, scale.vocab_size).save(folder / "tokenizer")
    write_json(folder / "done.json", {"bytes": sizes})


def documents() -> Iterator[tuple[str, str, str]]:
    """(name, `prose` or `code`, text), files from all over the library first to last by their hashes' order.

    A file's prose and its code have the same name, so that both are held out or neither is.
    """
    corpus = standard_library(held_out=0.05)
    for document in corpus._mixed() + list(corpus.held_out):
        name = document.name.removesuffix(".py")
        if document.name == TOPICS:
            for topic, text in topics(document):
                yield f"topics/{topic}", "prose", text
            continue
        try:
            prose, code = taken_apart(document.text)
        except SyntaxError:  # files of another version, as in lib2to3's examples
            continue
        yield name, "prose", prose
        yield name, "code", code


def topics(document: Document) -> Iterator[tuple[str, str]]:
    """What `help()` knows of the language, topic by topic."""
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, ast.Dict):
            yield from ast.literal_eval(node).items()
            return
    raise DataError(f"{TOPICS}: expected a dict of topics, found none; use another Python")


def taken_apart(source: str) -> tuple[str, str]:
    """The docstrings of a module, joined, and its lines without them.

    >>> taken_apart('x = 1\\ndef f():\\n    "Adds."\\n    return x\\n')
    ('Adds.', 'x = 1\\ndef f():\\n    return x\\n')
    """
    prose, dropped = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            first = node.body[0]
            prose.append(text)
            dropped |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = source.splitlines(keepends=True)
    return "\n\n".join(prose), "".join(line for i, line in enumerate(lines, 1) if i not in dropped)

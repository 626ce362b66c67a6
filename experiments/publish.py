"""What an experiment found, put where it is read: one JSON, pictures, and the tables of its page."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import pictures
from perilune.core.errors import DataError
from perilune.report.draw import Figure, single
from perilune.report.page import Section, document, section_html, write_page
from perilune.report.variants import Sample
from perilune.train.folder import write_whole

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
BLOCK = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 240
"""Of lines in JSON, keys apart: as wide as an answer with all its counts."""
NOT_YET = "*Not run yet.*"

Table = Callable[[dict[str, Any], str], str]
"""Of the evidence, and of what stands behind the table's name on the page."""


def write_evidence(path: Path, evidence: dict[str, Any]) -> None:
    """As JSON, in lines that differ where the evidence does."""
    write_whole(path, (dense(evidence) + "\n").encode())


def dense(value: Any, indent: int = 0) -> str:
    """JSON of what fits on a line of WIDTH on one; else a line for each of an object's entries, and as many of a
    list's as fit."""
    whole = json.dumps(value)
    if len(whole) <= WIDTH - indent or not isinstance(value, (list, dict)):
        return whole
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {dense(entry, indent + 1)}" for key, entry in value.items()]
    else:
        lines = [""]
        for text in (dense(entry, indent + 1) for entry in value):
            longer = f"{lines[-1]}, {text}" if lines[-1] else text
            if "\n" in longer or len(longer) > WIDTH - indent - 2:
                lines.append(text)
            else:
                lines[-1] = longer
        lines = lines[not lines[0] :]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    inner = ",\n".join(" " * (indent + 1) + line for line in lines)
    return f"{opening}\n{inner}\n{' ' * indent}{closing}"


def draw(
    drawn: Mapping[str, tuple[str, Figure]], name: str, what: str, about: str, html: Path, console: Console
) -> None:
    """All figures, title and figure by name: in one page to be moved about in, and as `IMAGES/NAME-FIGURE.png`."""
    charts = [single(key, title, figure, wide=True) for key, (title, figure) in drawn.items()]
    section = Section("figures", what, about, "nothing.", list(charts), "Nothing yet.")
    html.parent.mkdir(parents=True, exist_ok=True)
    write_page(html, document(what, [], section_html(section)))
    browser = pictures.find_browser()
    if browser is None:
        console.print(f"no pictures: none of {', '.join(pictures.BROWSERS)} is there; {html} has them", markup=False)
        return
    for key, (_, figure) in drawn.items():
        with console.status(f"drawing {key}"):
            pictures.write_png(figure, IMAGES / f"{name}-{key}.png", browser)


def filled(text: str, evidence: dict[str, Any], tables: Mapping[str, Table], page: str) -> str:
    """The page's text with its tables as the evidence has them.  Raises DataError for a table that nobody makes."""

    def table(found: re.Match[str]) -> str:
        kind, _, rest = found[2].partition(" ")
        if kind not in tables:
            raise DataError(f"{page}: expected one of {', '.join(tables)}, got the table {found[2]!r}; mend it")
        return f"{found[1]}{tables[kind](evidence, rest)}\n{found[3]}"

    return BLOCK.sub(table, text)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def spelled(sample: Sample, digits: int) -> str:
    """Mean, and the seeds' standard deviation where there are several."""
    spread = f" ± {sample.spread:.{digits}f}" if sample.spread is not None else ""
    return f"{sample.mean:.{digits}f}{spread}"


def machine_line(machine: dict[str, Any]) -> str:
    return f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}."


def write(
    found: dict[str, Any], results: Path, page: Path, home: Path, figures_of: Callable[[dict[str, Any]], Any],
    tables: Mapping[str, Table], what: str, about: str, first: str, console: Console,
) -> None:  # fmt: skip
    """An experiment's JSON, pictures and page, of what it found below `home`.

    What `results` has of scales and of other entries that are not found, from another machine say, stays.  first: the
    part to begin with, for who has none yet.  Raises DataError where there is nothing.
    """
    before = json.loads(results.read_text()) if results.exists() else {"scales": {}}
    evidence = {key: value or before.get(key) for key, value in found.items()}
    evidence["scales"] = {**before["scales"], **found["scales"]}
    evidence["scales"].pop("tiny", None)  # shows that the harness works, and nothing else
    if not any(evidence.values()):
        raise DataError(f"{home}: expected finished runs, found none; run a part first, such as `{first}`")
    write_evidence(results, evidence)
    html = home / f"{results.stem}.html"
    draw(figures_of(evidence), results.stem, what, about, html, console)
    write_whole(page, filled(page.read_text(encoding="utf-8"), evidence, tables, page.name).encode())
    for path in (results, html, page):
        console.print(str(path), markup=False, soft_wrap=True)

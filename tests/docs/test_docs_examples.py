"""The documentation says what is true: its examples run and print what stands below them, its excerpts are the code,
its links lead somewhere.

A ```python block runs, all of a file in one namespace; a ```text block right after it is what it prints.  Above a block
`<!-- no-run -->` keeps it from running, `<!-- from PATH -->` says that it stands word for word in that file.
"""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MARK = re.compile(r"<!--\s*(no-run|from\s+\S+)\s*-->")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")


@dataclass
class Block:
    language: str
    code: str
    line: int
    """Of the first line of code, from 1."""
    mark: str
    printed: str | None = None
    """The ```text block right after it."""


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    blocks: list[Block] = []
    lines = text.split("\n")
    after_block, mark, i = False, "", 0
    while i < len(lines):
        line = lines[i]
        if line.startswith("```"):
            end = next(j for j in range(i + 1, len(lines)) if lines[j].rstrip() == "```")
            block = Block(line[3:].strip(), "\n".join(lines[i + 1 : end]), i + 2, mark)
            if block.language == "text" and after_block and blocks[-1].language == "python":
                blocks[-1].printed = block.code
            blocks.append(block)
            after_block, mark, i = True, "", end + 1
            continue
        if line.strip():
            found = MARK.fullmatch(line.strip())
            mark = found[1] if found else ""
            after_block = False
        i += 1
    return blocks


def prose_of(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def lines_of(code: str) -> list[str]:
    """What of a code is compared with an excerpt: indentation and blank lines aside."""
    return [line.strip() for line in code.split("\n") if line.strip()]


def anchor(heading: str) -> str:
    """The name by which GitHub lets one link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.fixture(params=PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_examples_print_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.use_deterministic_algorithms(False)  # as it is for a reader
    namespace: dict[str, object] = {"__name__": "example"}
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language != "python" or block.mark:
            continue
        where = f"{page.relative_to(ROOT)}:{block.line}"
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")  # so that a traceback shows its line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.printed is not None:
            got = [line.rstrip() for line in printed.getvalue().rstrip("\n").split("\n")]
            assert got == block.printed.split("\n"), where


def test_excerpts_are_the_code(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.mark.startswith("from"):
            source = page.parent / block.mark.split()[1]
            wanted, there = lines_of(block.code), lines_of(source.read_text(encoding="utf-8"))
            found = any(there[i : i + len(wanted)] == wanted for i in range(len(there)))
            assert found, f"{page.relative_to(ROOT)}:{block.line} is not in {source}"


def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings exist, and a link `name` to a file of code finds that name there."""
    for text, link in LINK.findall(prose_of(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if heading and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in map(anchor, headings), f"{page.name}: {link}"
        if target.suffix == ".py" and (name := NAME.fullmatch(text)):
            word = name[1].split(".")[-1]
            assert word == target.stem or re.search(rf"\b{word}\b", target.read_text(encoding="utf-8")), (
                f"{page.name}: {text} in {link}"
            )


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {link.partition("#")[0] for _, link in LINK.findall(index)}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert pages - {"index.md"} <= linked


def test_blocks_are_read_as_written() -> None:
    """Against a page with one of everything, so that the tests above are known to look."""
    text = "a\n```python\nprint(1)\n```\n\n```text\n1\n```\n<!-- no-run -->\n```python\nboom\n```\nb\n```text\n2\n```\n"
    run, _, skipped, alone = blocks_of(text)
    assert (run.code, run.printed, run.line, run.mark) == ("print(1)", "1", 3, "")
    assert (skipped.code, skipped.mark, skipped.printed) == ("boom", "no-run", None)
    assert alone.language == "text"
    assert LINK.findall(prose_of(text + "[`x`](y.py)")) == [("`x`", "y.py")]
    assert lines_of("  a\n\n    b") == ["a", "b"]
    assert anchor("Gates, and their `bounds`") == "gates-and-their-bounds"

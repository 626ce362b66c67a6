"""Every command of the README runs, or says what it needs.

Commands run in a folder of their own, on a text of a few kilobytes.  `train` gets a model that takes a second;
`runs/demo` is there already, as `make demo` would leave it.  What needs more says so behind it: `# needs ...`.
"""

import io
import re
import shlex
from pathlib import Path

import pytest

from perilune.cli.main import main
from tiny_run import OVERRIDES, text

README = Path(__file__).parents[2] / "README.md"
LINES = [
    line.removeprefix("$ ")
    for block in re.findall(r"^```console\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in block.split("\n")
    if line.startswith("$ ")
]
NEEDY = [line for line in LINES if "# needs " in line]
RUN = [line for line in LINES if line not in NEEDY]
TEXT = ["data.sources.text.path=texts", "data.sources.text.pattern=*.md"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and a finished run."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "texts").mkdir()
    for i in range(12):
        (folder / "texts" / f"{i}.md").write_text(text(i) * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "nano", *OVERRIDES, *TEXT, "--out", "runs/demo"]) == 0
    return folder


def test_the_readme_has_commands_and_few_are_needy() -> None:
    assert len(RUN) >= 8
    assert all(re.search(r"# needs \w", line) for line in NEEDY)
    assert {line.split()[0] for line in NEEDY} <= {"make", "pip", ".venv/bin/perilune"}


def test_the_commands_run_one_after_the_other(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(home)
    for line in RUN:
        program, *words = shlex.split(line, comments=True)
        assert program == ".venv/bin/perilune", f"{line}: say behind it what it needs"
        if words[0] == "train" and "--resume" not in words:
            words[2:2] = [*OVERRIDES, *TEXT]  # what the README changes comes after, and counts
        monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n"))  # for chat
        assert main(words) == 0, f"{line}: {capsys.readouterr().err}"

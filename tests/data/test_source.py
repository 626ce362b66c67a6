import subprocess
import sys
from pathlib import Path

import pytest

from perilune.core.errors import ConfigError
from perilune.data.corpus import Corpus
from perilune.data.source import TextSource, open_source

HUB = "hf://datasets/owner/name"


def test_a_source_survives_json() -> None:
    source = TextSource(path=HUB, text_key="content", subset="en", split="validation", revision="v1", clean=True)
    assert TextSource.from_dict(source.to_dict()) == source
    assert TextSource().override(["path=texts", "held_out=0.1"]) == TextSource(path="texts", held_out=0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": ""}, "path: expected a folder, a file or a dataset, got nothing; standard_library is built in"),
        (
            {"path": "https://example.org/a.txt"},
            "path: expected hf://datasets/OWNER/NAME, got https://example.org/a.txt",
        ),
        ({"path": "hf://datasets/name"}, "path: expected hf://datasets/OWNER/NAME, got hf://datasets/name;"),
        ({"path": HUB + "@main"}, "path: expected hf://datasets/OWNER/NAME"),
        ({"path": HUB + "/data/a.parquet"}, "path: expected hf://datasets/OWNER/NAME"),
        ({"held_out": 1.0}, "held_out: expected a share from 0 to below 1, got 1.0; 0.05 holds out one in 20"),
        ({"held_out": -0.1}, "held_out: expected a share"),
        ({"held_out": float("nan")}, "held_out: expected a share"),
        ({"path": "a", "pattern": ""}, "pattern: expected a name, got nothing"),
        ({"path": "a", "text_key": ""}, "text_key: expected a name, got nothing"),
        ({"path": HUB, "split": ""}, "split: expected a name, got nothing"),
        ({"path": "a", "subset": "en"}, "subset: expected None for a, got 'en'; it is only for a dataset of the Hub"),
        ({"path": "a", "split": "test"}, "split: expected 'train' for a, got 'test'; it is only for a dataset"),
        ({"revision": "v1"}, "revision: expected None for standard_library, got 'v1'; it is only for a dataset"),
        ({"path": HUB, "pattern": "*.md"}, "pattern: expected '*.txt' for hf://datasets/owner/name, got '*.md'; it is"),
        ({"pattern": "*.py"}, "pattern: expected '*.txt' for standard_library, got '*.py'; it is only for a folder"),
        ({"text_key": "body"}, "text_key: expected 'text' for standard_library, got 'body'; it is only for files or"),
        ({"streamed": True}, "streamed: expected False for standard_library, got True; it is only for files or"),
    ],
)
def test_a_source_that_cannot_be_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TextSource(**values)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_resolved_source_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path)
    resolved = TextSource(path="texts").resolved()
    monkeypatch.chdir("/")
    assert resolved == TextSource(path=str(tmp_path / "texts"))
    corpus = open_source(resolved)
    assert isinstance(corpus, Corpus)
    assert corpus.train[0].text == "one\n"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TextSource(path="~/texts").resolved() == resolved
    for path in ("standard_library", HUB):
        assert TextSource(path=path).resolved() == TextSource(path=path)


def test_the_default_is_the_standard_library() -> None:
    corpus = open_source(TextSource(held_out=0.2))
    assert isinstance(corpus, Corpus)
    assert corpus.name == "standard_library"
    assert 0.15 < len(corpus.held_out) / (len(corpus.held_out) + len(corpus.train)) < 0.25


def test_a_source_needs_nothing_heavy() -> None:
    code = "import sys, perilune.data.source; print({'torch', 'numpy', 'datasets', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"

"""The benchmark of reading, on a little of the standard library."""

import json

import numpy as np
import pytest

from perilune.bench import runner
from perilune.bench.cases import find
from perilune.bench.reading import KINDS, Kind, Reading
from perilune.data.streamed import StreamedText


def small(**changes):
    sizes = {"text_bytes": 150_000, "vocab_size": 300, "tokenizer_bytes": 20_000, "context": 256, "batch_tokens": 4096}
    return Reading(**{**sizes, **changes})


def test_every_kind_is_read_once_and_gone_on_with(tmp_path, capsys):
    assert runner.main(["data"], json_path=tmp_path / "out.json", cases={"data": small()}) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [row["label"] for row in result["times"]] == [kind.label for kind in KINDS]
    plain = {row["tokens"] for row in result["times"][:-1]}
    assert len(plain) == 1  # whole batches until all of the text is read
    for row in result["times"]:
        assert row["tokens"] > 50_000
        assert row["tokens_per_s"] > 0
        assert row["tokens_per_cpu_s"] > 0
        assert row["opened_s"] > 0
        assert row["resumed_s"] > 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "Parquet, streamed" in printed


def test_a_reader_that_loses_text_is_not_timed(monkeypatch, capsys):
    plain = StreamedText.read

    def forgetful(self, tokens):
        segment = plain(self, tokens)
        segment.ids[: len(segment.ids) // 100] = np.int64(5)
        return segment

    monkeypatch.setattr(StreamedText, "read", forgetful)
    sheet = small(kinds=KINDS[:2])
    result = sheet.run()
    assert not result["passed"]
    assert result["check"] == "failed: JSONL, streamed: expected the tokens of the text, got others"
    runner.show(sheet.parts(result), True)
    assert "not timed" in capsys.readouterr().out


def test_what_needs_a_package_says_so(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    sheet = small(kinds=(Kind("Parquet", "*.parquet"), KINDS[0]))
    result = sheet.run()
    assert result["passed"]
    assert "expected the package pyarrow" in result["times"][0]["skipped"]
    runner.show(sheet.parts(result), True)
    out = capsys.readouterr().out
    assert "Parquet: skipped: " in out
    assert "JSONL, in memory" in out


@pytest.mark.parametrize("name", ["data"])
def test_it_is_one_of_the_benchmarks(name):
    assert isinstance(find()[name], Reading)

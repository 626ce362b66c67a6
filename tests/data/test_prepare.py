import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from perilune.cli.main import main
from perilune.core.errors import DataError
from perilune.data import prepare
from perilune.data.prepare import Selection, documents, write_shards
from perilune.data.source import TextSource, open_source
from perilune.data.tokenizer import ByteBPE


def prose(i: int) -> str:
    return " ".join(f"sentence {j} of document {i * 31 % 97} is about {(i + 1) * (j + 3) % 1009}." for j in range(40))


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 texts in two shards and a file; 10 copies, 10 near copies, a log, an empty one, one of what is judged."""
    own = [prose(i) for i in range(60)]
    log = "".join(f"2026-01-31 12:{i // 60:02}:{i % 60:02} worker {i % 7} took job {i}\n" for i in range(100))
    near = [text.replace("sentence 7 ", "sentence seven ") for text in own[30:40]]
    write(tmp_path / "raw" / "a.jsonl", [*own[:30], log, ""])
    write(tmp_path / "raw" / "more" / "b.jsonl.gz", [*own[20:30], *own[30:59], *near, prose(1000)])
    (tmp_path / "raw" / "z.txt").write_text(own[59])
    write(tmp_path / "judged" / "j.jsonl", [prose(1000)])
    return tmp_path


def rows(folder: Path) -> list[tuple[str, str]]:
    found = []
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        found += list(zip(table["source"].to_pylist(), table["text"].to_pylist()))
    return found


def test_copies_near_copies_and_no_text_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", str(folder / "raw"), "--near-duplicates", "0.8", "--clean", "--against", str(folder / "judged")]
    assert main([*words, "--out", str(folder / "ready")]) == 0
    found = rows(folder / "ready")
    assert [text for _, text in found] == [prose(i) for i in range(60)]
    assert found[0][0] == f"{folder}/raw/a.jsonl:1"
    assert found[59][0] == f"{folder}/raw/z.txt"
    said = json.loads((folder / "ready" / "prepared.json").read_text())
    assert said["dropped"] == {"machine log": 1, "empty": 1, "copy": 11, "near copy": 10}
    assert (said["read"], said["kept"]) == (83, 60)
    assert said["kept_bytes"] == sum(len(text) for _, text in found)
    assert said["examples"]["near copy"] == f"{folder}/raw/more/b.jsonl.gz:40"
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("60 of 83 documents, ")
    assert f"left out 10: near copy, such as {folder}/raw/more/b.jsonl.gz:40" in out


def test_the_same_text_gives_the_same_bytes(folder: Path) -> None:
    for name in ("one", "two"):
        assert main(["prepare", str(folder / "raw"), "--near-duplicates", "0.8", "--out", str(folder / name)]) == 0
    one, two = ({p.name: p.read_bytes() for p in (folder / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert one.keys() == {"part-00000.parquet", "prepared.json"}


def test_what_was_prepared_is_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SHARD_CHARACTERS", 20_000)
    assert main(["prepare", str(folder / "raw"), "--out", str(folder / "ready")]) == 0
    assert len(list((folder / "ready").glob("part-*.parquet"))) > 3
    corpus = open_source(TextSource(path=str(folder / "ready"), pattern="*.parquet", streamed=True, held_out=0.1))
    texts = list(corpus.texts())
    assert sorted([*texts, *(d.text for d in corpus.held_out)]) == sorted(text for _, text in rows(folder / "ready"))
    stream = corpus.stream(ByteBPE.train(texts, vocab_size=300), seed=0)
    stream.resize(context=64)
    assert len(stream.read(1000).ids) == 1000


def test_a_shard_counts_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SHARD_CHARACTERS", 100)

    def texts():
        yield from ((str(i), "x" * 60) for i in range(5))
        raise DataError("b.jsonl:7: broken")

    told: list[int] = []
    with pytest.raises(DataError, match="broken"):
        write_shards(texts(), tmp_path, told.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
    assert told == [2, 4]
    assert pq.ParquetFile(tmp_path / "part-00000.parquet").metadata.num_rows == 2


def test_the_first_of_several_stays_whatever_was_known() -> None:
    one = Selection(near_duplicates=0.8)
    one.know("judged", prose(1))
    assert [one.keeps(f"{i}", prose(i)) for i in (0, 1, 0, 2)] == [True, False, False, True]
    assert one.count.dropped == {"copy": 2}
    assert one.keeps("near", prose(2).replace("sentence 3 ", "sentence three ")) is False
    assert one.count.to_dict()["dropped"] == {"copy": 2, "near copy": 1}
    plain = Selection()
    assert plain.keeps("near", prose(2))
    assert plain.keeps("nearer", prose(2).replace("sentence 3", "sentence three"))


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["prepare", *map(str, words)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_mistakes_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, out = folder / "raw", folder / "out"
    assert "raw: expected a new or empty folder" in refused(capsys, raw, "--out", raw)
    assert "expected a folder of * files, found none" in refused(capsys, folder / "nowhere", "--out", out)
    assert "near_duplicates: expected a similarity above 0, up to 1, got 3" in refused(
        capsys, raw, "--near-duplicates", 3, "--out", out
    )
    assert "the standard library; it is ready" in refused(capsys, "standard_library", "--out", out)
    assert "a.jsonl:1: expected a field 'body', got 'text'" in refused(capsys, raw, "--text-key", "body", "--out", out)
    (folder / "bad").mkdir()
    (folder / "bad" / "x.txt").write_bytes(b"\xff\xfe")
    assert "x.txt: expected UTF-8, got other bytes" in refused(capsys, folder / "bad", "--out", folder / "new")
    (folder / "bad" / "x.txt").write_bytes(b"")
    assert "expected a document to keep, got none of 1" in refused(capsys, folder / "bad", "--out", folder / "newer")


def test_documents_are_all_there_with_their_places(folder: Path) -> None:
    found = list(documents(TextSource(path=str(folder / "raw"), pattern="*")))
    assert len(found) == 83
    assert len({name for name, _ in found}) == 83


@pytest.mark.parametrize("options", [[], ["--near-duplicates", "0.8"]])
def test_files_named_in_other_bytes(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "raw").mkdir()
    try:
        (tmp_path / "raw" / "odd\udcfe.txt").write_text(prose(1))
    except OSError:
        pytest.skip("this file system has no such names")
    write(tmp_path / "judged" / "j.jsonl", ["\ud800 !"])  # half of a pair, and no word
    words = ["prepare", str(tmp_path / "raw"), *options, "--against", str(tmp_path / "judged")]
    assert main([*words, "--out", str(tmp_path / "ready")]) == 0
    assert rows(tmp_path / "ready") == [(f"{tmp_path}/raw/odd\\udcfe.txt", prose(1))]


def test_what_is_judged_is_left_out_whatever_its_file_is_called(tmp_path: Path) -> None:
    """The pattern is of what is read alone."""
    write(tmp_path / "raw" / "a.jsonl", [prose(1), prose(2)])
    (tmp_path / "judged").mkdir()
    (tmp_path / "judged" / "one.txt").write_text(prose(1))
    words = ["prepare", str(tmp_path / "raw"), "--pattern", "*.jsonl", "--against", str(tmp_path / "judged")]
    assert main([*words, "--out", str(tmp_path / "ready")]) == 0
    assert [text for _, text in rows(tmp_path / "ready")] == [prose(2)]

import errno
import gzip
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perilune.core.errors import DataError
from perilune.data.corpus import text_files
from perilune.data.shards import find_files, is_shard, read_shard, shard_format

TEXTS = ["one\n", "naïve 🎈\r\n", "", "three\u2028lines\n", "four"]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path: Path, columns: dict[str, Any], rows_a_group: int = 2) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows_a_group)
    return path


def write(path: Path, texts: list[str | None]) -> Path:
    if path.suffix == ".parquet":
        return write_parquet(path, {"number": range(len(texts)), "text": texts})
    return write_jsonl(path, [{"number": i, "text": text} for i, text in enumerate(texts)])


@pytest.fixture(params=["a.jsonl", "a.jsonl.gz", "a.parquet"])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def fails(path: Path, text_key: str = "text") -> str:
    """The one line that a shard is refused with, whether read alone or as part of a corpus."""
    with pytest.raises(DataError) as error:
        list(read_shard(path, text_key))
    with pytest.raises(DataError) as again:
        text_files(path, text_key=text_key)
    assert str(again.value) == str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(str(path.parent) + "/")


def test_texts_come_as_written_with_their_lines(shard: Path) -> None:
    write(shard, [*TEXTS, None])
    assert list(read_shard(shard, "text")) == list(enumerate([*TEXTS, ""], start=1))


def test_a_shard_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    """Not as a whole: what comes before a broken line is there before the line is looked at."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nbroken\n')
    rows = read_shard(path, "text")
    assert next(rows) == (1, "one")
    with pytest.raises(DataError):
        next(rows)


def test_shards_are_known_by_name(tmp_path: Path) -> None:
    names = ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.json", "a.txt", "a.gz", "jsonl"]
    assert [name for name in names if is_shard(Path(name))] == names[:3]
    assert [shard_format(Path(name)) for name in names[:3]] == ["json", "json", "parquet"]


def test_a_field_of_another_name(shard: Path) -> None:
    if shard.suffix == ".parquet":
        write_parquet(shard, {"body": ["a", "b"], "n": [1, 2]})
    else:
        write_jsonl(shard, [{"body": "a", "n": 1}, {"body": "b", "n": 2}])
    assert [text for _, text in read_shard(shard, "body")] == ["a", "b"]
    where = "a.parquet: expected a column" if shard.suffix == ".parquet" else f"{shard.name}:1: expected a field"
    assert fails(shard) == f"{where} 'text', got 'body', 'n'; set text_key"


def test_a_value_that_is_no_text(shard: Path) -> None:
    if shard.suffix == ".parquet":
        write_parquet(shard, {"text": [None, 2, 3]})
    else:
        write_jsonl(shard, [{"text": None}, {"text": 2}])
    assert fails(shard) == f"{shard.name}:2: expected text in 'text', got int; set text_key"


def test_an_empty_shard_has_no_text(shard: Path) -> None:
    write(shard, [])
    assert list(read_shard(shard, "text")) == []
    with pytest.raises(DataError, match="expected at least one document with text"):
        text_files(shard)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "expected a JSON object, got what cannot be read ("),
        (b'{"text": "a"} {"text": "b"}', "expected a JSON object, got what cannot be read (Extra data"),
        (b'["a"]', "expected a JSON object, got list; write one object a line"),
        (b'"text"', "expected a JSON object, got str;"),
        (b"\xef\xbb\xbf{}", "expected a JSON object, got what cannot be read (Unexpected UTF-8 BOM"),
        (b'{"text": "\xe9"}', "expected UTF-8, got other bytes; convert the file"),
        (b"[" * 100_000, "expected a JSON object, got what cannot be read ("),
        (b'{"text": ' + b"1" * 5000 + b"}", "expected a JSON object, got what cannot be read ("),
        (b'{"tekst": "a"}', "expected a field 'text', got 'tekst'; set text_key"),
        (b"{}", "expected a field 'text', got none; set text_key"),
        (b'{"text": ["a"]}', "expected text in 'text', got list; set text_key"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes, message: str, last: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + (b"" if last else b'\n{"text": "two"}\n'))
    assert fails(path).startswith(f"a.jsonl:3: {message}")


def test_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "one"}\r\n  \n{"text": "two"}\n\n')
    assert list(read_shard(path, "text")) == [(2, "one"), (4, "two")]


def test_half_a_character_is_passed_over_with_a_note(tmp_path: Path) -> None:
    """JSON can spell what is no text; it is one document's fault, not the shard's."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "\\ud83d"}\n{"text": "\\ud83c\\udf88"}\n')
    corpus = text_files(path)
    assert sorted(document.text for document in corpus.train + corpus.held_out) == ["one", "🎈"]
    assert corpus.skipped == ("a.jsonl:2: half of a surrogate pair",)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_a_gzip_file_cut_short(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "a.jsonl.gz", [f"document {i}" for i in range(1000)])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert fails(path).startswith("a.jsonl.gz: expected a whole file, got ")


def test_a_gzip_file_that_is_none_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_text('{"text": "a"}\n')
    assert fails(path).startswith("a.jsonl.gz: expected a whole file, got Not a gzipped file")
    write(path, [f"document {i}" for i in range(1000)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        list(read_shard(path, "text"))


@pytest.mark.parametrize("keep", [0, 0.3, 0.9, 0.999])
def test_a_parquet_file_cut_short(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "a.parquet", [f"document {i}" for i in range(1000)])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    message = fails(path)
    assert message.startswith("a.parquet: expected a whole Parquet file, got Parquet ")
    assert message.endswith("after row 0; fetch it anew")


def test_a_parquet_file_with_damaged_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(4000)]}), path, row_group_size=2000)
    data = bytearray(path.read_bytes())
    middle = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    data[middle : middle + 30] = bytes(30)
    path.write_bytes(data)
    assert " after row 2000; fetch it anew" in fails(path)


def test_a_parquet_column_that_is_no_utf8(tmp_path: Path) -> None:
    good, bad = pa.array(["one"]), pa.array([b"\xe9\xe9"])
    broken = pa.Array.from_buffers(pa.string(), 1, bad.buffers())
    pq.write_table(pa.table({"text": pa.chunked_array([good, broken])}), tmp_path / "a.parquet", row_group_size=1)
    assert fails(tmp_path / "a.parquet").startswith("a.parquet: expected UTF-8, got other bytes after row 1; convert")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_has_several_types_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", None, "é"]).cast(kind)}), tmp_path / "a.parquet")
    assert list(read_shard(tmp_path / "a.parquet", "text")) == [(1, "a"), (2, ""), (3, "é")]


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    message = fails(tmp_path / "a.parquet")
    assert message == "a.parquet: expected the package pyarrow.parquet, found none; pip install 'perilune[data]'"


def test_files_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a.txt", "tests/c.txt", "a.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [name for name, _ in find_files(tmp_path, "*.txt")] == ["a.txt", "a/z.txt", "b.txt", "tests/c.txt"]
    assert [name for name, _ in find_files(tmp_path, "*.txt", ("tests", "a.*"))] == ["a/z.txt", "b.txt"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that runs as root may read everything, so the answer of the system is given here."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.txt").write_text("a")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def locked(path: str) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(DataError, match=r"locked: expected a folder to read, got Permission denied; make it readable"):
        find_files(tmp_path, "*.txt")
    assert [name for name, _ in find_files(tmp_path, "*.txt", ("locked",))] == ["open/a.txt"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_pipe_is_refused_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.md").write_text("b")
    os.mkfifo(tmp_path / "sub" / name)
    with pytest.raises(DataError, match=r"sub/a\..*: expected a file, got a pipe, socket or device; move it, or set"):
        find_files(tmp_path, "a.*")
    assert [name for name, _ in find_files(tmp_path, "*.md")] == ["b.md"]


def test_links_to_files_are_taken_and_links_to_folders_are_not_entered(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "b.txt").symlink_to("a.txt")
    (tmp_path / "texts" / "round").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to("texts")
    assert [name for name, _ in find_files(tmp_path / "link", "*.txt")] == ["a.txt", "b.txt"]


def test_a_shard_that_cannot_be_opened(shard: Path) -> None:
    shard.symlink_to(shard)
    with pytest.raises(DataError, match=r"expected a whole .*file, got .*; fetch it anew"):
        list(read_shard(shard, "text"))


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_shard_is_read_or_refused(shard: Path, seed: int) -> None:
    """Whichever byte is wrong: what comes is texts, or one line that says what is wrong."""
    write(shard, [f"document {i % 9} é" for i in range(300)])
    data, rng = bytearray(shard.read_bytes()), random.Random(seed)
    for _ in range(rng.choice([1, 5])):
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    shard.write_bytes(data)
    texts, said = [], ""
    try:
        texts += [text for _, text in read_shard(shard, "text")]
    except DataError as error:
        said = str(error)
    assert said.startswith(str(shard)) if said else len(texts) <= 300
    assert "\n" not in said
    assert all(isinstance(text, str) for text in texts)

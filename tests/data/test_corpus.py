import ast
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perilune.core.errors import ConfigError, DataError
from perilune.data.corpus import Corpus, is_held_out, standard_library, text_files, total_text
from perilune.data.packing import PackedText
from perilune.data.tokenizer import ByteBPE


@pytest.fixture(scope="module")
def library() -> Corpus:
    return standard_library()


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def names(corpus: Corpus) -> list[str]:
    return sorted(document.name for document in corpus.train + corpus.held_out)


def test_standard_library_is_large_and_split_by_file(library: Corpus) -> None:
    train = {document.name for document in library.train}
    held_out = {document.name for document in library.held_out}
    assert library.train_bytes > 8e6
    assert 0.03 < library.held_out_bytes / (library.train_bytes + library.held_out_bytes) < 0.08
    assert not train & held_out
    assert [d.name for d in library.train] == sorted(train)
    assert {"ast.py", "json/decoder.py"} <= train | held_out
    texts = [document.text for document in library.train + library.held_out]
    assert len(texts) == len(set(texts))


def test_standard_library_holds_no_tests_and_nothing_of_this_build(library: Corpus) -> None:
    for name in names(library):
        folders = set(name.split("/")[:-1])
        assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}, name
        assert not name.startswith(("_sysconfigdata", "config-")), name


def test_standard_library_texts_are_the_files(library: Corpus) -> None:
    by_name = {document.name: document for document in library.train + library.held_out}
    file = Path(ast.__file__)
    assert by_name["ast.py"].text.encode() == file.read_bytes()
    assert by_name["ast.py"].byte_count == file.stat().st_size
    assert len(total_text(library.held_out)) == library.held_out_bytes


def test_the_split_of_a_name_never_changes() -> None:
    """The sides of some names, as they were when the split was made."""
    from perilune.data.corpus import _place

    places = {"pydoc.py": 0.0397, "dataclasses.py": 0.0333, "ast.py": 0.0, "json/decoder.py": 0.0}
    held_out = {name for name in places if _place(name) < 0.05}
    assert held_out == {"pydoc.py", "dataclasses.py"}


def test_a_minimal_library_is_refused(tmp_path: Path) -> None:
    write(tmp_path, os_py="import sys\n" * 100, test__big_py="x = 1\n" * 1_000_000)
    with pytest.raises(DataError, match=r"standard library: expected at least 1 MB .* found 0.00 MB; install") as error:
        standard_library(root=tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="standard library"):
        standard_library(root=tmp_path / "nowhere")


def test_text_files_reads_at_any_depth_and_keeps_line_ends(tmp_path: Path) -> None:
    write(tmp_path, a_txt="one\r\ntwo\r", sub__deep__b_txt="naïve 🎈\n", c_md="no", d_txt="four", e_md="e")
    corpus = text_files(tmp_path)
    assert names(corpus) == ["a.txt", "d.txt", "sub/deep/b.txt"]
    texts = {document.name: document.text for document in corpus.train + corpus.held_out}
    assert texts["a.txt"] == "one\r\ntwo\r"
    assert corpus.train_bytes + corpus.held_out_bytes == 9 + len("naïve 🎈\n".encode()) + 4
    assert names(text_files(tmp_path, "*.md")) == ["c.md", "e.md"]


def test_unreadable_files_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, a_txt="text", b_txt="more", copy_txt="text", empty_txt="")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with caplog.at_level("INFO", logger="perilune.data"):
        corpus = text_files(tmp_path)
    assert names(corpus) == ["a.txt", "b.txt"]
    assert [line.split(":")[0] for line in corpus.skipped] == ["copy.txt", "empty.txt", "latin.txt", "loop.txt"]
    assert corpus.skipped[0] == "copy.txt: the same text as a.txt"
    assert corpus.skipped[2] == "latin.txt: not UTF-8"
    assert "4 of 6 documents skipped" in caplog.text


def test_a_file_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}.txt").write_text(f"file {i}")
    before = {document.name for document in text_files(tmp_path, held_out=0.2).held_out}
    assert 20 < len(before) < 60
    (tmp_path / "another.txt").write_text("another")
    after = {document.name for document in text_files(tmp_path, held_out=0.2).held_out}
    assert after - {"another.txt"} == before


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_neither_side_is_empty(tmp_path: Path, count: int, share: float) -> None:
    for i in range(count):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    corpus = text_files(tmp_path, held_out=share)
    assert corpus.train
    assert corpus.held_out
    assert len(corpus.train) + len(corpus.held_out) == count


def test_a_single_file_is_cut_at_a_line_end(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    write(tmp_path, only_txt=text)
    corpus = text_files(tmp_path)
    assert corpus.train[0].text + corpus.held_out[0].text == text
    assert corpus.train[0].text.endswith("\n")
    assert 0.04 < corpus.held_out_bytes / len(text) < 0.06
    write(tmp_path, only_txt="0123456789" * 10)
    assert text_files(tmp_path).held_out[0].text == "56789"


def test_nothing_held_out_when_nothing_is_asked(tmp_path: Path) -> None:
    write(tmp_path, a_txt="a", b_txt="b")
    assert text_files(tmp_path, held_out=0).held_out == ()
    for share in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="held_out: expected a share from 0 to below 1"):
            text_files(tmp_path, held_out=share)


def test_an_empty_or_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected at least one \*\.txt file, found none; put text there"):
        text_files(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(DataError, match=r"document with text, found none \(1 skipped, latin.txt: not UTF-8\)"):
        text_files(tmp_path)
    with pytest.raises(DataError, match=r"nowhere: expected a folder of \*\.txt files, found none"):
        text_files(tmp_path / "nowhere")


def shards(folder: Path, texts: list[str]) -> Path:
    """The same texts three times over, in every kind of shard."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet")
    return folder


def test_a_shard_is_split_by_document(tmp_path: Path) -> None:
    texts = [f"document {i}\n" for i in range(200)]
    corpus = text_files(shards(tmp_path, texts) / "a.jsonl", held_out=0.1)
    assert names(corpus) == sorted(f"a.jsonl:{i + 1}" for i in range(200))
    assert [document.text for document in corpus.train] == [text for text in texts if not is_held_out(text, 0.1)]
    assert 10 < len(corpus.held_out) < 30


def test_a_text_is_on_one_side_whatever_shard_holds_it(tmp_path: Path) -> None:
    texts = [f"document {i}\n" for i in range(200)]
    folder = shards(tmp_path, texts)
    sides = [text_files(folder, pattern, held_out=0.1) for pattern in ("*.jsonl", "*.gz", "*.parquet", "*")]
    for corpus in sides:
        assert [document.text for document in corpus.held_out] == [text for text in texts if is_held_out(text, 0.1)]
        assert len(corpus.train) + len(corpus.held_out) == 200
    assert sides[-1].skipped[:2] == (
        "b.jsonl.gz:1: the same text as a.jsonl:1",
        "b.jsonl.gz:2: the same text as a.jsonl:2",
    )
    assert len(sides[-1].skipped) == 400


def test_a_folder_of_files_and_shards(tmp_path: Path) -> None:
    write(tmp_path, notes_txt="one", sub__b_md="two")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n{"text": ""}\n{"text": "two"}\n')
    corpus = text_files(tmp_path, "*")
    assert names(corpus) == ["c.jsonl:1", "c.jsonl:3", "notes.txt"]
    assert corpus.skipped == ("c.jsonl:2: empty", "sub/b.md: the same text as c.jsonl:3")


def test_a_single_document_of_a_shard_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "line\n" * 100}))
    corpus = text_files(tmp_path / "a.jsonl")
    assert (corpus.train[0].text, corpus.held_out[0].text) == ("line\n" * 95, "line\n" * 5)


def test_cleaning_leaves_out_what_is_no_text(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text", b_txt="more", blob_txt="\x00\x01" * 50)
    assert len(names(text_files(tmp_path))) == 3
    corpus = text_files(tmp_path, clean=True)
    assert names(corpus) == ["a.txt", "b.txt"]
    assert corpus.skipped == ("blob.txt: binary",)


def test_texts_are_all_or_some_from_everywhere(library: Corpus) -> None:
    assert list(library.texts()) == [document.text for document in library.train]
    assert list(library.texts(library.train_bytes)) == list(library.texts())
    name = {document.text: document.name for document in library.train}
    some = list(library.texts(2_000_000))
    assert 2_000_000 <= sum(len(text.encode()) for text in some) < 4_000_000
    assert len(some) == len(set(some))
    assert min(name[text] for text in some) < "b"
    assert max(name[text] for text in some) > "x"
    assert some == list(library.texts(2_000_000))


def test_filler_and_stream_are_training_text_encoded(tmp_path: Path) -> None:
    for i in range(300):
        (tmp_path / f"{i:03}.txt").write_text(f"file {i}\n")
    corpus = text_files(tmp_path)
    bpe = ByteBPE.train(corpus.texts(), 270)
    train = {document.text for document in corpus.train}
    filler = corpus.filler(bpe, 1000)
    texts = [bpe.decode(ids, skip_special=True) for ids in filler]
    assert 1000 <= sum(map(len, filler)) < 1020
    assert max(int(text.split()[1]) for text in texts) > 280
    assert set(texts) < train
    assert len(texts) == len(set(texts))
    assert len(corpus.filler(bpe, 10**9)) == len(train)
    stream, expected = corpus.stream(bpe, 3), PackedText(bpe.encode_documents(list(corpus.texts())), 3)
    for each in (stream, expected):
        each.resize(16)
    assert np.array_equal(stream.read(500).ids, expected.read(500).ids)


def test_the_corpus_needs_no_torch() -> None:
    import subprocess

    code = "import sys, perilune.data.corpus, perilune.data.tokenizer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

import gzip
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError, DataError
from perilune.data import streamed
from perilune.data.corpus import Corpus, is_held_out
from perilune.data.packing import IGNORE, PackedText
from perilune.data.source import TextSource, open_source
from perilune.data.stream import Segment
from perilune.data.streamed import StreamedCorpus, StreamedText
from perilune.data.tokenizer import ByteBPE

HUB = "hf://datasets/owner/name"
SHARDS, ROWS, BLOCK = 3, 40, 16  # 120 documents: seven blocks and a half, and blocks across shards


def make_texts(count: int = SHARDS * ROWS, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["orbit", "moon", "low", "the", "of", "near"]
    return [f"{i} " + " ".join(rng.choices(words, k=rng.randrange(30))) for i in range(count)]


def write(folder: Path, texts: list[str | None], kind: str = "parquet") -> Path:
    """Shards of `ROWS` documents each."""
    folder.mkdir(exist_ok=True)
    for i in range(0, len(texts), ROWS):
        part, path = texts[i : i + ROWS], folder / f"{i // ROWS:03}.{kind}"
        if kind == "parquet":
            table = pa.table({"number": range(len(part)), "text": pa.array(part, pa.string())})
            pq.write_table(table, path, row_group_size=13)
        else:
            data = "".join(json.dumps({"text": text}) + "\n" for text in part).encode()
            path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    return folder


def source_of(folder: Path, kind: str = "parquet", **values: Any) -> TextSource:
    return TextSource(path=str(folder), pattern=f"*.{kind}", streamed=True, **({"held_out": 0.1} | values))


def opened(folder: Path, kind: str = "parquet", **values: Any) -> StreamedCorpus:
    corpus = open_source(source_of(folder, kind, **values))
    assert isinstance(corpus, StreamedCorpus)
    return corpus


@pytest.fixture(scope="module", autouse=True)
def _small_blocks_and_no_traces(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For the whole module, not for each test, so that Hypothesis may run many examples in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "BLOCK_ROWS", BLOCK)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("streamed") / "shards", make_texts())


@pytest.fixture(scope="module")
def corpus(folder: Path) -> StreamedCorpus:
    return opened(folder)


@pytest.fixture(scope="module")
def bpe() -> ByteBPE:
    return ByteBPE.train(make_texts(), vocab_size=300)


def stream_of(corpus: StreamedCorpus, bpe: ByteBPE, context: int = 16, least: int = 0, seed: int = 0) -> StreamedText:
    stream = corpus.stream(bpe, seed)
    stream.resize(context, least)
    return stream


def pieces_of(segment: Segment) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    ends = [*segment.starts[1:], len(segment.ids)]
    cut = [slice(start, end) for start, end in zip(segment.starts, ends)]
    return [(tuple(segment.ids[part].tolist()), tuple(segment.labels[part].tolist())) for part in cut]


def cut(document: np.ndarray, context: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    labels = np.append(document[1:], IGNORE)
    starts = range(0, len(document), context)
    return [(tuple(document[i : i + context].tolist()), tuple(labels[i : i + context].tolist())) for i in starts]


def same(a: Segment, b: Segment) -> bool:
    return all(np.array_equal(x, y) for x, y in ((a.ids, b.ids), (a.labels, b.labels), (a.starts, b.starts)))


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


# The corpus


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz"])
def test_streamed_is_the_same_text_as_in_memory(tmp_path: Path, kind: str) -> None:
    texts: list[str | None] = [*make_texts(60), "", None, "naïve 🎈\r\n\u2028"]
    corpus = opened(write(tmp_path / "a", texts, kind), kind, held_out=0.2)
    memory = open_source(replace(corpus.source, streamed=False))
    assert isinstance(memory, Corpus)
    assert 5 < len(corpus.held_out) < 20
    assert [document.text for document in corpus.held_out] == [document.text for document in memory.held_out]
    assert list(corpus.texts()) == list(memory.texts())
    assert corpus.skipped == ("2 of the first 63 documents: empty",)
    assert corpus.train_bytes is None


def test_what_is_held_out_is_never_trained_on(tmp_path: Path, bpe: ByteBPE) -> None:
    """Not even where it turns up again, long after the part that held-out documents are collected from."""
    texts = make_texts()
    held = [text for text in texts if is_held_out(text, 0.1)]
    corpus = opened(write(tmp_path / "a", [*texts, *held, *texts]))
    assert [document.text for document in corpus.held_out] == held
    assert [int(document.name) for document in corpus.held_out] == [texts.index(text) + 1 for text in held]
    assert len(held) > 5
    assert not set(corpus.texts()) & set(held)
    trained = stream_of(corpus, bpe, context=1 << 20).read(15_000)
    seen = {bpe.decode(ids, skip_special=True) for ids, _ in pieces_of(trained)}
    assert seen > set(texts[:60]) - set(held)
    assert not seen & set(held)


def test_held_out_text_comes_from_the_first_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [text for text in make_texts() if is_held_out(text, 0.1)]
    monkeypatch.setattr(streamed, "HELD_OUT_BYTES", len(held[0]) + 1)
    assert [document.text for document in opened(folder).held_out] == held[:2]
    monkeypatch.setattr(streamed, "HELD_OUT_ROWS", 5)
    with pytest.raises(DataError, match=r"expected a document to hold out, found none in the first 5; raise"):
        opened(folder, held_out=0.0001)
    assert opened(folder, held_out=0.0).held_out == ()


def test_texts_and_filler_stop_when_there_is_enough(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    texts = list(corpus.texts())
    some = list(corpus.texts(limit_bytes=1000))
    assert some == texts[: len(some)]
    assert 1000 <= sum(len(text.encode()) for text in some) < 1000 + 200
    filler = corpus.filler(bpe, 500)
    assert [bpe.decode(ids, skip_special=True) for ids in filler] == texts[: len(filler)]
    assert 500 <= sum(map(len, filler)) < 500 + 100


def test_cleaning_leaves_out_and_counts(tmp_path: Path, bpe: ByteBPE) -> None:
    blob = random.Random(0).randbytes(500).decode("latin-1")
    corpus = opened(write(tmp_path / "a", [*make_texts(30), blob, blob + "again"]), clean=True)
    assert corpus.skipped == ("2 of the first 32 documents: binary",)
    assert all("\x00" not in text for text in corpus.texts())
    stream = stream_of(corpus, bpe, 1 << 20)
    whole = sum(map(len, bpe.encode_documents(list(corpus.texts()))))
    stream.read(whole)
    assert stream.epoch == 0
    stream.read(1)
    assert stream.epoch == 1


# The stream


def test_an_epoch_holds_every_piece_once(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    """Ids, labels and borders: nothing is read twice, left out, or joined to its neighbour."""
    documents = bpe.encode_documents(list(corpus.texts()))
    size = sum(map(len, documents))
    stream, expected = stream_of(corpus, bpe), Counter(piece for document in documents for piece in cut(document, 16))
    epochs = [pieces_of(stream.read(size)) for _ in range(3)]
    assert [Counter(epoch) for epoch in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_order_is_the_seeds(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    first, again, other = (stream_of(corpus, bpe, seed=seed).read(3000) for seed in (0, 0, 1))
    assert same(first, again)
    assert not np.array_equal(first.ids, other.ids)
    in_order = np.concatenate(bpe.encode_documents(list(corpus.texts())))[:3000]
    assert not np.array_equal(first.ids, in_order)


def test_a_block_is_shuffled_like_an_epoch_in_memory(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    """The first block's key is the seed itself."""
    texts = [text for text in make_texts()[:BLOCK] if not is_held_out(text, 0.1)]
    memory = PackedText(bpe.encode_documents(texts), 7)
    memory.resize(16)
    size = sum(map(len, bpe.encode_documents(texts)))
    assert same(stream_of(corpus, bpe, seed=7).read(size), memory.read(size))


def test_every_block_has_an_order_of_its_own(tmp_path: Path, bpe: ByteBPE) -> None:
    corpus = opened(write(tmp_path / "a", [f"number {i}" for i in range(4 * BLOCK)]), held_out=0.0)
    stream, texts = stream_of(corpus, bpe, 1 << 20), list(corpus.texts())
    size = sum(map(len, bpe.encode_documents(texts)))
    orders = []
    for _ in range(2):
        epoch = [bpe.decode(ids, skip_special=True) for ids, _ in pieces_of(stream.read(size))]
        for i in range(0, len(texts), BLOCK):
            orders.append(tuple(texts.index(text) - i for text in epoch[i : i + BLOCK]))
    assert all(sorted(order) == list(range(BLOCK)) for order in orders)
    assert len(set(orders)) == len(orders) == 8


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=6))
def test_any_reads_are_the_same_stream(corpus: StreamedCorpus, bpe: ByteBPE, reads: list[int]) -> None:
    whole, parts = stream_of(corpus, bpe), stream_of(corpus, bpe)
    row, segments = whole.read(sum(reads)), [parts.read(tokens) for tokens in reads]
    assert [len(segment.ids) for segment in segments] == reads
    assert np.array_equal(row.ids, np.concatenate([segment.ids for segment in segments]))
    assert np.array_equal(row.labels, np.concatenate([segment.labels for segment in segments]))
    offsets = np.cumsum([0, *reads])
    starts = {start + offset for segment, offset in zip(segments, offsets) for start in segment.starts.tolist()}
    cuts = {offset for offset, tokens in zip(offsets.tolist(), reads) if tokens}
    assert starts - cuts <= set(row.starts.tolist()) <= starts
    for segment in segments:
        assert (segment.starts[:1] == 0).all()
        assert (np.diff(segment.starts) > 0).all()


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 2500), min_size=1, max_size=5), st.integers(1, 2000), st.integers(0, 3))
def test_resuming_anywhere_goes_on_bit_for_bit(
    corpus: StreamedCorpus, bpe: ByteBPE, before: list[int], after: int, stops: int
) -> None:
    """Within a block, at its end, across epochs; also when what was resumed is stopped again."""
    stream, resumed = stream_of(corpus, bpe, 8), stream_of(corpus, bpe, 8)
    for i, tokens in enumerate(before):
        stream.read(tokens)
        resumed.skip(tokens)
        if i % 4 <= stops:
            state = through_json(resumed.state_dict())
            resumed = corpus.stream(bpe, 0)
            resumed.load_state_dict(state)
    assert same(resumed.read(after), stream.read(after))


def test_resume_at_every_step_of_three_epochs(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    size = sum(map(len, bpe.encode_documents(list(corpus.texts()))))
    step = size // 20 + 7
    stream, resumed = stream_of(corpus, bpe), corpus.stream(bpe, 0)
    for _ in range(60):
        resumed.load_state_dict(through_json(stream.state_dict()))
        expected = stream.read(step)
        assert same(resumed.read(step), expected)
    assert stream.epoch >= 3


def test_at_the_very_end_of_a_block_and_of_an_epoch(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    texts = [text for text in make_texts()[:BLOCK] if not is_held_out(text, 0.1)]
    block, epoch = (sum(map(len, bpe.encode_documents(part))) for part in (texts, list(corpus.texts())))
    for end in (block, epoch, 2 * epoch):
        stream, resumed = stream_of(corpus, bpe), corpus.stream(bpe, 0)
        stream.skip(end)
        resumed.load_state_dict(through_json(stream.state_dict()))
        assert same(resumed.read(500), stream.read(500))


def test_another_process_goes_on_bit_for_bit(corpus: StreamedCorpus, bpe: ByteBPE, tmp_path: Path) -> None:
    stream = stream_of(corpus, bpe)
    stream.skip(3456)
    bpe.save(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(stream.state_dict()))
    (tmp_path / "source.json").write_text(json.dumps(corpus.source.to_dict()))
    code = f"""
import json, pathlib
from perilune.data import streamed
from perilune.data.source import TextSource, open_source
from perilune.data.tokenizer import ByteBPE
streamed.BLOCK_ROWS = {BLOCK}
here = pathlib.Path({str(tmp_path)!r})
stream = open_source(TextSource.from_dict(json.loads((here / "source.json").read_text()))).stream(ByteBPE.load(here), 0)
stream.load_state_dict(json.loads((here / "state.json").read_text()))
print(json.dumps(stream.read(2000).ids.tolist()))
"""
    environment = {"HF_DATASETS_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert json.loads(done.stdout) == stream.read(2000).ids.tolist()
    assert done.stderr == ""  # readers that are still open at the end go quietly


def test_ranks_share_no_token(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    whole, streams = stream_of(corpus, bpe).read(9000), [stream_of(corpus, bpe) for _ in range(3)]
    got: list[np.ndarray] = []
    for turn in range(9):
        for rank, stream in enumerate(streams):
            if turn % 3 == rank:
                got.append(stream.read(1000).ids)
            else:
                stream.skip(1000)
    assert np.array_equal(np.concatenate(got), whole.ids)


def test_another_size_begins_with_the_next_block(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    kept = [[t for t in make_texts()[i : i + BLOCK] if not is_held_out(t, 0.1)] for i in range(0, 3 * BLOCK, BLOCK)]
    blocks = [bpe.encode_documents(texts) for texts in kept]
    first = sum(map(len, blocks[0]))
    stream = stream_of(corpus, bpe, 8)
    stream.resize(64)  # nothing was read yet: the first block is cut as asked for now
    got = pieces_of(stream.read(first // 2))
    stream.resize(8)
    stream.resize(64)  # as it was: nothing has happened
    got += pieces_of(stream.read(first - first // 2))
    assert {ids for ids, _ in got} >= {tuple(ids.tolist()) for ids in blocks[0] if len(ids) < 10}
    assert sum(len(ids) for ids, _ in got) == first
    stream.read(100)
    stream.resize(4)
    third = pieces_of(stream.read(200))
    assert set(third[:-1]) <= {piece for document in blocks[2] for piece in cut(document, 4)}


@pytest.mark.parametrize("saved", ["before the stage begins", "after it began"])
@pytest.mark.parametrize(
    "order", ["resize, load", "resize, load, resize", "load, resize", "resize otherwise, load, resize"]
)
def test_a_stage_that_begins_around_resuming_begins_the_same(
    corpus: StreamedCorpus, bpe: ByteBPE, saved: str, order: str
) -> None:
    stream, resumed = stream_of(corpus, bpe, 8), corpus.stream(bpe, 0)
    stream.skip(1234)
    before = through_json(stream.state_dict())
    stream.resize(32, 10)
    after = through_json(stream.state_dict())
    if order.startswith("resize"):
        resumed.resize(*((5, 1) if "otherwise" in order else (32, 10)))
    resumed.load_state_dict(before if saved.startswith("before") else after)
    if order.endswith("resize") or saved.startswith("before"):
        resumed.resize(32, 10)
    assert same(resumed.read(2000), stream.read(2000))


def test_short_documents_are_left_out(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    documents = bpe.encode_documents(list(corpus.texts()))
    lengths = sorted(map(len, documents))
    for least in (lengths[len(lengths) // 2], lengths[-1]):
        long = [document for document in documents if len(document) >= least]
        stream = stream_of(corpus, bpe, 1 << 20, least)
        got = stream.read(sum(map(len, long)))
        assert Counter(pieces_of(got)) == Counter(piece for document in long for piece in cut(document, 1 << 20))
        assert same(stream_of(corpus, bpe, 1 << 20, least).read(900), stream_of(corpus, bpe, 1 << 20, least).read(900))


def test_long_documents_of_a_block_come_more_often(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    """By the rule of `Stream`, which documents in memory are held to as well; also when taken up inside a block."""
    documents = bpe.encode_documents(list(corpus.texts()))
    context = max(map(len, documents))
    times = [1 + 3 * len(document) // context for document in documents]
    assert set(times) >= {1, 4}
    stream, resumed = (corpus.stream(bpe, 0) for _ in range(2))
    stream.resize(context, 0, 4)
    tokens = sum(n * len(document) for n, document in zip(times, documents))
    state = through_json(stream.state_dict())
    got = stream.read(tokens)
    wanted: Counter[Any] = Counter()
    for n, document in zip(times, documents):
        wanted.update(cut(document, context) * n)
    assert Counter(pieces_of(got)) == wanted
    resumed.resize(context, 0, 4)
    resumed.load_state_dict(state)
    resumed.skip(tokens // 3)
    again = corpus.stream(bpe, 0)
    again.resize(context, 0, 4)
    again.load_state_dict(through_json(resumed.state_dict()))
    assert again.read(500).ids.tolist() == got.ids[tokens // 3 :][:500].tolist()


def test_a_state_from_before_long_documents_were_repeated_is_taken_up(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    stream, resumed = stream_of(corpus, bpe, 8), stream_of(corpus, bpe, 8)
    stream.skip(321)
    state = through_json(stream.state_dict())
    for key in ("sizes", "cut"):
        assert state[key].pop() == 1
    resumed.load_state_dict(state)
    assert same(resumed.read(500), stream.read(500))


def test_no_document_long_enough(corpus: StreamedCorpus, bpe: ByteBPE, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(map(len, bpe.encode_documents(list(corpus.texts()))))
    stream = stream_of(corpus, bpe, 16, longest + 1)
    with pytest.raises(DataError) as error:
        stream.read(1)
    assert str(error.value) == (
        f"min_document: expected at most {longest} tokens (the longest document found), got {longest + 1}; "
        "lower it or add longer text"
    )
    stream.resize(16, longest)  # lowered
    assert len(stream.read(longest).starts) == -(-longest // 16)
    monkeypatch.setattr(streamed, "PATIENCE", 3 * BLOCK)  # for a dataset without end
    stream = stream_of(corpus, bpe, 16, 1_000_000)
    with pytest.raises(DataError, match=r"the longest document found\), got 1000000; lower it"):
        stream.read(1)
    assert stream.state_dict()["block"] == 2


def test_nothing_to_learn_from(tmp_path: Path, bpe: ByteBPE) -> None:
    empty = opened(write(tmp_path / "a", [None, "", None] * 9), held_out=0.0)
    with pytest.raises(DataError, match=r"expected text to learn from, found none; check text_key, held_out and clean"):
        stream_of(empty, bpe).read(1)


def test_a_block_of_long_documents_is_shorter(
    corpus: StreamedCorpus, bpe: ByteBPE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "BLOCK_CHARACTERS", 200)
    stream, resumed = stream_of(corpus, bpe), corpus.stream(bpe, 0)
    stream.skip(2000)
    assert stream.state_dict()["block"] > 10
    resumed.load_state_dict(through_json(stream.state_dict()))
    assert same(resumed.read(9000), stream.read(9000))


def test_sizes_that_cannot_be(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    stream = corpus.stream(bpe, 0)
    with pytest.raises(ConfigError, match="context: expected at least 1, got 0"):
        stream.resize(0)
    nothing = stream.read(0)
    assert [len(nothing.ids), len(nothing.labels), len(nothing.starts)] == [0, 0, 0]
    assert max(len(ids) for ids, _ in pieces_of(stream.read(3000))) > 30  # never resized: whole documents


# Resuming what has changed


def test_files_may_move_but_not_change(tmp_path: Path, bpe: ByteBPE) -> None:
    stream = stream_of(opened(write(tmp_path / "a", make_texts())), bpe)
    stream.skip(1500)
    state = through_json(stream.state_dict())
    moved = tmp_path / "b"
    shutil.copytree(tmp_path / "a", moved)
    resumed = opened(moved).stream(bpe, 0)
    resumed.load_state_dict(state)
    assert same(resumed.read(500), stream.read(500))

    write(moved, make_texts(seed=1))
    with pytest.raises(DataError, match=r"expected the documents that were being read when saved, got others; resume"):
        opened(moved).stream(bpe, 0).load_state_dict(state)
    for path in sorted(moved.iterdir())[1:]:
        path.unlink()
    with pytest.raises(DataError, match=r"expected the documents that were being read|expected a dataset that can be"):
        opened(moved).stream(bpe, 0).load_state_dict(state)


@pytest.mark.parametrize(
    ("values", "seed", "message"),
    [
        ({}, 1, "seed: expected 0 as when saved, got 1; resume with the same data"),
        ({"held_out": 0.2}, 0, "held_out: expected 0.1 as when saved, got 0.2"),
        ({"clean": True}, 0, "clean: expected False as when saved, got True"),
        ({"text_key": "number"}, 0, "text_key: expected 'text' as when saved, got 'number'"),
    ],
)
def test_another_stream_is_refused(
    folder: Path, bpe: ByteBPE, values: dict[str, Any], seed: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = stream_of(opened(folder), bpe).state_dict()
    other = replace(opened(folder), source=source_of(folder, **values))
    with pytest.raises(DataError) as error:
        other.stream(bpe, seed).load_state_dict(state)
    assert str(error.value).startswith(message)


def test_another_tokenizer_or_kind_of_stream_is_refused(corpus: StreamedCorpus, bpe: ByteBPE) -> None:
    stream = stream_of(corpus, bpe)
    stream.read(10)
    other = ByteBPE.train(make_texts(seed=3), vocab_size=280)
    with pytest.raises(DataError, match="resume with the same data and tokenizer"):
        corpus.stream(other, 0).load_state_dict(stream.state_dict())
    memory = PackedText([np.arange(5)], 0)
    with pytest.raises(DataError, match="expected None as when saved, got"):
        stream.load_state_dict(memory.state_dict())


# What cannot be read


def test_a_missing_or_wrong_column(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"shards: expected a column 'body', got 'number', 'text'; set text_key"):
        opened(folder, text_key="body")
    with pytest.raises(DataError, match=r"shards: expected text in 'number', got int; set text_key"):
        opened(folder, text_key="number")
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(DataError, match=r"expected a column 'text', got 'body'; set text_key"):
        opened(tmp_path, "jsonl")


def test_a_shard_that_breaks_on_the_way(tmp_path: Path, bpe: ByteBPE, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not pass for the end of the data, and once it is mended the last checkpoint goes on."""
    folder = write(tmp_path / "a", make_texts())
    monkeypatch.setattr(streamed, "HELD_OUT_BYTES", 1)
    expected = stream_of(opened(folder), bpe).read(6000)
    second = folder / "001.parquet"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    stream, states = stream_of(opened(folder), bpe), []

    def read_on() -> None:
        while True:
            states.append(through_json(stream.state_dict()))
            stream.read(100)

    with pytest.raises(DataError, match="a: expected a dataset that can be read, got Arrow") as error:
        read_on()
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="expected a dataset that can be read"):
        stream.read(100)
    second.write_bytes(whole)
    resumed = opened(folder).stream(bpe, 0)
    resumed.load_state_dict(states[-1])
    done = 100 * (len(states) - 1)
    assert done > 100
    assert np.array_equal(resumed.read(6000 - done).ids, expected.ids[done:])


@pytest.mark.parametrize("bad", [b'{"text": "a"\n', b'{"text": "\xe9"}\n', b'["a"]\n'])
def test_a_malformed_line(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + bad)
    with pytest.raises(DataError) as error:
        list(opened(tmp_path, "jsonl", held_out=0.0).texts())
    assert "\n" not in str(error.value)


def test_only_shards_of_one_kind_are_streamed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"expected shards of one kind to stream, .* got \.txt; set pattern"):
        opened(tmp_path, "txt")
    shutil.copy(folder / "000.parquet", tmp_path)
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"got \.txt, json, parquet; set pattern, or streamed=false"):
        opened(tmp_path, "*")
    with pytest.raises(DataError, match="nowhere: expected a folder"):
        opened(tmp_path / "nowhere")


def test_files_with_odd_names_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "a[1] *é", make_texts(30))
    (folder / "000.parquet").rename(folder / "x[0-9]?.parquet")
    assert len(list(opened(folder).texts())) + len(opened(folder).held_out) == 30


def test_a_missing_package_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"expected the package datasets, found none; pip install 'perilune\[data\]'"):
        opened(folder)


# The Hub, by stand-ins: no test needs a network


class Hub:
    """Stands in for `datasets.load_dataset_builder`: shards of this machine under a name of the Hub."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder, self.commit, self.asked = folder, commit, []
        self.load = datasets.load_dataset_builder

    def __call__(self, path: str, **values: Any) -> Any:
        self.asked.append((path, values))
        builder = self.load(str(self.folder))
        builder.hash = self.commit
        return builder


def test_a_dataset_of_the_hub_by_name(folder: Path, bpe: ByteBPE, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(folder, "abc123")
    monkeypatch.setattr(datasets, "load_dataset_builder", hub)
    corpus = open_source(TextSource(path=HUB, subset="en", revision="v1", held_out=0.1))
    assert isinstance(corpus, StreamedCorpus)
    assert hub.asked == [(HUB, {"name": "en", "revision": "v1"})]
    assert (corpus.name, corpus.revision) == (HUB, "abc123")
    assert list(corpus.texts()) == list(opened(folder).texts())
    stream = stream_of(corpus, bpe)
    assert same(stream.read(4000), stream_of(opened(folder), bpe).read(4000))

    hub.commit = "def456"
    with pytest.raises(DataError) as error:
        open_source(corpus.source).stream(bpe, 0).load_state_dict(stream.state_dict())
    assert str(error.value).startswith("revision: expected 'abc123' as when saved, got 'def456'")
    with pytest.raises(DataError, match="path: expected None as when saved"):
        corpus.stream(bpe, 0).load_state_dict(stream_of(opened(folder), bpe).state_dict())


def test_a_split_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset_builder", Hub(folder, "abc123"))
    with pytest.raises(DataError, match=r"got ValueError \(Bad split: test. Available splits: \['train'\]\)"):
        open_source(TextSource(path=HUB, split="test"))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **values: Any) -> Any:
        raise ConnectionError(f"Couldn't reach '{path}'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(DataError) as error:
        open_source(TextSource(path=HUB))
    assert str(error.value) == (
        f"{HUB}: expected a dataset that can be read, got ConnectionError (Couldn't reach '{HUB}' on the Hub); "
        "check its name, subset, split and files, and the network"
    )


def test_only_formats_that_merely_hold_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of pickles, or of tar files with anything in them, is never started."""
    (tmp_path / "a.pkl").write_bytes(b"cos\nsystem\n(S'touch boom'\ntR.")
    monkeypatch.setattr(datasets, "load_dataset_builder", Hub(tmp_path, "abc123"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="expected a dataset"):
        open_source(TextSource(path=HUB))
    assert not (tmp_path / "boom").exists()
    (tmp_path / "a.pkl").rename(tmp_path / "a.png")
    with pytest.raises(DataError, match="expected a dataset of parquet, json, csv, text, arrow files, got image"):
        open_source(TextSource(path=HUB))

"""Ranks share no token and leave none out, whatever the text comes from; in the middle of a shard and after going on.

The tokenizer gives every token of the corpus an id of its own, so that equal ids are the same place in the same text.
"""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perilune.cli.main import main
from perilune.data import streamed
from perilune.data.mixture import Mixture
from perilune.data.packing import Batch
from perilune.data.source import TextSource, open_source
from perilune.data.tasks import TASKS, TaskStream
from perilune.data.tokenizer import ByteBPE
from perilune.train.parallel.feed import dealt, shards

DOCUMENTS = 120
CONTEXT, TOKENS = 32, 96


def length(i: int) -> int:
    return 5 + i * 37 % 90


def text(i: int) -> str:
    return f"document {i}"


class Numbering:
    """Token j of document i is 1000 i + j."""

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        numbers = [int(text.removeprefix("document ")) for text in texts]
        return [np.arange(1000 * i, 1000 * i + length(i), dtype=np.int32) for i in numbers]


def json_lines(numbers: range) -> bytes:
    return b"".join(json.dumps({"text": text(i)}).encode() + b"\n" for i in numbers)


def write(kind: str, folder: Path) -> TextSource:
    """The documents in two shards, or in files, as a source; nothing held out."""
    halves = [range(DOCUMENTS // 2), range(DOCUMENTS // 2, DOCUMENTS)]
    form = kind.removeprefix("streamed ")
    if form == "files":
        for i in range(DOCUMENTS):
            (folder / f"{i:03}.txt").write_text(text(i))
    for n, half in enumerate(halves if form != "files" else []):
        if form == "jsonl":
            (folder / f"{n}.jsonl").write_bytes(json_lines(half))
        if form == "jsonl.gz":
            (folder / f"{n}.jsonl.gz").write_bytes(gzip.compress(json_lines(half)))
        if form in ("parquet", "prepared"):
            pq.write_table(pa.table({"text": [text(i) for i in half]}), folder / f"{n}.parquet", row_group_size=7)
    if form == "prepared":
        assert main(["prepare", str(folder), "--out", str(folder / "ready")]) == 0
        folder, form = folder / "ready", "parquet"
    pattern = "*.txt" if form == "files" else f"*.{form}"
    return TextSource(path=str(folder), pattern=pattern, held_out=0.0, streamed=kind != form)


KINDS = [
    "files", "jsonl", "jsonl.gz", "parquet", "streamed jsonl", "streamed jsonl.gz", "streamed parquet",
    "streamed prepared",
]  # fmt: skip
EPOCH = sum(map(length, range(DOCUMENTS)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a shard, and blocks across two."""
    monkeypatch.setattr(streamed, "BLOCK_ROWS", 25)


def reader(source: TextSource, rank: int = 0, ranks: int = 1) -> Mixture:
    """As a process of its own would open it."""
    one = Mixture({"text": open_source(source).stream(Numbering(), seed=3)}, rank=rank, ranks=ranks)
    one.begin({"text": 1.0}, tokens=TOKENS, context=CONTEXT)
    return one


def ids(batch: Batch) -> list[int]:
    return batch.input_ids[0].tolist()


def pieces_are_of_one_document(batch: Batch) -> bool:
    bounds = batch.cu_seqlens.tolist()
    row = batch.input_ids[0]
    return all(bool((row[a:b].diff() == 1).all()) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_readers_share_no_token_of_any_kind_of_text(kind: str, ranks: int, tmp_path: Path) -> None:
    """Every rank with a reader of its own: in an epoch each token is one rank's, and none is nobody's."""
    source = write(kind, tmp_path)
    readers = [reader(source, rank, ranks) for rank in range(ranks)]
    rounds = EPOCH // (TOKENS * ranks)
    own: list[list[int]] = [[] for _ in range(ranks)]
    for number in range(rounds):
        if number == rounds // 2:  # all are killed, and go on in new processes
            states = [json.loads(json.dumps(one.state_dict())) for one in readers]
            readers = [reader(source, rank, ranks) for rank in range(ranks)]
            for one, state in zip(readers, states):
                one.load_state_dict(state)
        for rank, one in enumerate(readers):
            batch = one.next()
            assert pieces_are_of_one_document(batch)
            own[rank] += ids(batch)
    seen = [token for part in own for token in part]
    assert len(seen) == len(set(seen)) == rounds * ranks * TOKENS
    alone = reader(source)
    whole = [token for _ in range(rounds * ranks) for token in ids(alone.next())]
    assert set(seen) == set(whole)
    while len(whole) < EPOCH:
        whole += ids(alone.next())
    assert set(whole[:EPOCH]) == {1000 * i + j for i in range(DOCUMENTS) for j in range(length(i))}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["files", "streamed parquet"])
def test_what_is_dealt_is_the_batch_and_nobodys_twice(kind: str, ranks: int, tmp_path: Path) -> None:
    """One reader for all, as `perilune train` has it; rows dealt whole, or cut over two ranks each."""
    one = reader(write(kind, tmp_path))
    for _ in range(EPOCH // TOKENS):
        batch = one.next()
        parts = dealt(batch, ranks)
        assert sorted(token for part in parts for token in ids(part)) == sorted(ids(batch))
        assert all(map(pieces_are_of_one_document, parts))
        cut = [shard for part in parts for shard in shards(part, 2)]
        real = [token for pair in zip(cut[::2], cut[1::2]) for token in unpadded(*pair)]
        assert sorted(real) == sorted(ids(batch))


def unpadded(first: Batch, second: Batch) -> list[int]:
    both = ids(first) + ids(second)
    return both[: len(both) - second.padding]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("task", TASKS)
def test_readers_get_samples_of_their_own(task: str, ranks: int) -> None:
    """Samples have no tokens of their own, but numbers: those of all ranks are those of one reader."""
    texts = [" ".join(f"word{i * j % 83}" for j in range(60)) for i in range(1, 30)]
    bpe = ByteBPE.train(texts, vocab_size=400)
    filler = bpe.encode_documents(texts)

    def samples(rank: int, of: int) -> Iterator[tuple[int, ...]]:
        mixture = Mixture({task: TaskStream(TASKS[task](bpe, filler), seed=1)}, rank=rank, ranks=of)
        mixture.begin({task: 1.0}, tokens=4096, context=2048)
        while True:
            yield tuple(ids(mixture.next()))

    readers = [samples(rank, ranks) for rank in range(ranks)]
    alone = samples(0, 1)
    seen = [next(one) for _ in range(3) for one in readers]
    assert seen == [next(alone) for _ in seen]
    assert len(set(seen)) == len(seen)

import json
from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError, DataError
from perilune.data.mixture import Mixture
from perilune.data.packing import IGNORE, Batch, PackedText, evaluation_batches

LENGTHS = [5, 1, 23, 8, 13, 2, 40]  # seven documents, 92 tokens


def make_documents(lengths: list[int]) -> list[np.ndarray]:
    """Every token of every document has an id of its own, 0 among them."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b, dtype=np.int32) for a, b in pairwise(starts)]


def pieces_of(lengths: list[int], context: int) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of every piece of `make_documents(lengths)`, one at a time: the oracle."""
    pieces = []
    for document in make_documents(lengths):
        ids = document.tolist()
        labels = [*ids[1:], IGNORE]
        pieces += [(ids[a : a + context], labels[a : a + context]) for a in range(0, len(ids), context)]
    return pieces


def mixture(
    documents: list[np.ndarray], tokens: int, context: int, seed: int = 0, *, rank: int = 0, ranks: int = 1
) -> Mixture:
    batches = Mixture({"text": PackedText(documents, seed)}, rank=rank, ranks=ranks)
    batches.begin({"text": 1.0}, tokens=tokens, context=context)
    return batches


def place(batches: Mixture) -> tuple[int, int]:
    """(epoch, offset)"""
    state = batches.state_dict()["streams"]["text"]
    return state["epoch"], state["offset"]


def read(batches: Mixture, count: int) -> list[Batch]:
    return [batches.next() for _ in range(count)]


def labels_by_piece(batches: list[Batch]) -> list[list[int]]:
    return [b.labels[0, start:stop].tolist() for b in batches for start, stop in pairwise(b.cu_seqlens.tolist())]


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("input_ids", "labels", "cu_seqlens"))


def whole_epochs(lengths: list[int], context: int, seed: int, epochs: int) -> list[list[tuple[list[int], list[int]]]]:
    """The pieces (ids, labels) of each epoch in order, from batches that hold an epoch each."""
    batches = mixture(make_documents(lengths), sum(lengths), context, seed)
    return [
        [
            (batch.input_ids[0, a:b].tolist(), batch.labels[0, a:b].tolist())
            for a, b in pairwise(batch.cu_seqlens.tolist())
        ]
        for batch in read(batches, epochs)
    ]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**40)
)
def test_batches_are_the_stream_cut(lengths: list[int], a: int, b: int, seed: int) -> None:
    context, tokens = min(a, b, sum(lengths)), max(a, b)
    stream = []  # (id, label, does a piece begin here)
    for epoch in whole_epochs(lengths, context, seed, epochs=4):
        assert sorted(epoch) == sorted(pieces_of(lengths, context))
        stream += [(x, y, i == 0) for ids, labels in epoch for i, (x, y) in enumerate(zip(ids, labels))]
    batches = mixture(make_documents(lengths), tokens, context, seed)
    for begin in range(0, len(stream) - tokens, tokens):
        batch = batches.next()
        row = stream[begin : begin + tokens]
        assert batch.input_ids.tolist() == [[x for x, _, _ in row]]
        assert batch.labels.tolist() == [[y for _, y, _ in row]]
        starts = [i for i, (_, _, opens) in enumerate(row) if i == 0 or opens]
        assert batch.cu_seqlens.tolist() == [*starts, tokens]


def test_shapes_and_types() -> None:
    batch = mixture(make_documents(LENGTHS), 16, 8).next()
    assert batch.input_ids.shape == batch.labels.shape == (1, 16)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.cu_seqlens.dtype == torch.int64


def test_an_epoch_holds_every_token_once() -> None:
    documents = make_documents(LENGTHS)  # 92 tokens = 4 batches of 23
    batches = mixture(documents, 23, 10, seed=1)
    for epoch in range(3):
        assert place(batches) == (epoch, 0)
        ids = Counter(torch.cat([batch.input_ids[0] for batch in read(batches, 4)]).tolist())
        assert ids == Counter(range(92))


def test_every_epoch_has_an_order_of_its_own() -> None:
    first, second, third = whole_epochs([3] * 20, 3, seed=0, epochs=3)
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third != first
    assert whole_epochs([3] * 20, 3, seed=0, epochs=1) == [first]
    assert whole_epochs([3] * 20, 3, seed=1, epochs=1) != [first]


def test_the_order_is_the_same_everywhere() -> None:
    (epoch,) = whole_epochs([2] * 7, 2, seed=5, epochs=1)
    assert [ids[0] // 2 for ids, _ in epoch] == [4, 3, 5, 6, 2, 0, 1]


def test_a_step_sees_many_documents() -> None:
    """Pieces of one long document do not follow each other: steps would be of one kind, and learning slow."""
    lengths = [640] * 10
    batch = mixture(make_documents(lengths), 640, 64, seed=0).next()
    documents = (batch.input_ids[0] // 640).unique()
    assert len(documents) >= 5


def test_resume_at_every_step_of_three_epochs() -> None:
    documents = make_documents(LENGTHS)
    straight = mixture(documents, 14, 9, seed=2)  # 20 batches of 14 are just over three epochs of 92
    states, expected = [], []
    for _ in range(25):
        states.append(json.dumps(straight.state_dict()))
        expected.append(straight.next())
    for step in range(1, 21):
        resumed = mixture(documents, 14, 9, seed=2)
        resumed.load_state_dict(json.loads(states[step]))
        assert all(same(a, b) for a, b in zip(read(resumed, 25 - step), expected[step:]))


def test_another_batch_size_goes_on_where_the_last_one_stopped() -> None:
    documents = make_documents(LENGTHS)
    reference = torch.cat([batch.input_ids[0] for batch in read(mixture(documents, 4, 4), 92)])
    batches = mixture(documents, 12, 4)
    ids = [batch.input_ids[0] for batch in read(batches, 5)]
    batches.begin({"text": 1.0}, tokens=31, context=4)
    ids += [batch.input_ids[0] for batch in read(batches, 3)]
    larger = mixture(documents, 50, 4)  # another process
    larger.load_state_dict(batches.state_dict())
    ids += [batch.input_ids[0] for batch in read(larger, 2)]
    assert torch.equal(torch.cat(ids), reference[: 5 * 12 + 3 * 31 + 2 * 50])


def test_another_context_keeps_the_place_and_cuts_other_pieces() -> None:
    batches = mixture(make_documents(LENGTHS), 12, 4)
    read(batches, 5)
    batches.begin({"text": 1.0}, tokens=40, context=40)
    assert place(batches) == (0, 60)
    lengths = [b - a for batch in read(batches, 4) for a, b in pairwise(batch.cu_seqlens.tolist())]
    assert max(lengths) > 4
    assert place(batches) == divmod(60 + 4 * 40, 92)


def test_long_documents_come_more_often_in_an_epoch() -> None:
    """By the rule, worked out by hand: context 20, up to 5 times, so once more for every 5 tokens up to 20."""
    times = [2, 1, 5, 2, 3, 1, 5]  # of documents of LENGTHS tokens
    documents = make_documents(LENGTHS)
    stream = PackedText(documents)
    stream.resize(20, long_times=5)
    tokens = sum(n * length for n, length in zip(times, LENGTHS))
    assert stream.tokens == tokens
    segment = stream.read(tokens)
    assert stream.state_dict()["epoch"] == 1
    assert Counter(segment.ids.tolist()) == {
        token: n for n, document in zip(times, documents) for token in document.tolist()
    }
    cuts = [*segment.starts.tolist(), tokens]
    got = Counter(tuple(segment.ids[a:b].tolist()) for a, b in pairwise(cuts))
    pieces = [[tuple(document[a : a + 20].tolist()) for a in range(0, len(document), 20)] for document in documents]
    assert got == {piece: n for n, of in zip(times, pieces) for piece in of}


@pytest.mark.parametrize("after", [(20, 0, 5), (20, 0, 1), (10, 0, 5), (20, 8, 5)])
def test_another_choice_of_documents_begins_an_epoch(after: tuple[int, int, int]) -> None:
    """Also where the stream rested while it was saved; the same choice goes on."""
    stream, resumed = PackedText(make_documents(LENGTHS)), PackedText(make_documents(LENGTHS))
    stream.resize(20, long_times=5)
    stream.skip(150)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    for each in (stream, resumed):
        each.resize(*after)
    place = resumed.state_dict()
    assert (place["epoch"], place["offset"]) == ((0, 150) if after == (20, 0, 5) else (1, 0))
    assert stream.read(300).ids.tolist() == resumed.read(300).ids.tolist()


def test_a_state_from_before_long_documents_were_repeated_is_taken_up() -> None:
    stream, resumed = PackedText(make_documents(LENGTHS)), PackedText(make_documents(LENGTHS))
    for each in (stream, resumed):
        each.resize(10)
    stream.skip(37)
    state = stream.state_dict()
    del state["long"]
    resumed.load_state_dict(state)
    resumed.resize(10)
    assert stream.read(100).ids.tolist() == resumed.read(100).ids.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_readers_share_no_token(ranks: int) -> None:
    documents = make_documents(LENGTHS)
    single = read(mixture(documents, 10, 6, seed=4), 12 * ranks)
    readers = [mixture(documents, 10, 6, seed=4, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in range(12):
        assert len({str(reader.state_dict()) for reader in readers}) == 1
        for rank, reader in enumerate(readers):
            assert same(reader.next(), single[step * ranks + rank])
    alone = mixture(documents, 10, 6, seed=4)  # another number of readers takes over
    alone.load_state_dict(readers[1].state_dict())
    assert place(alone) == divmod(12 * ranks * 10, 92)


def test_masks_come_from_lengths_not_ids() -> None:
    """A vocabulary in which one id is padding, end of text and a word at once; renaming ids renames them in batches."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 3, size=n) for n in LENGTHS]
    renamed = [np.array([7, 0, 9])[document] for document in documents]
    names = torch.tensor([7, 0, 9])
    for a, b in zip(read(mixture(documents, 30, 8), 9), read(mixture(renamed, 30, 8), 9)):
        assert torch.equal(a.cu_seqlens, b.cu_seqlens)
        assert torch.equal(names[a.input_ids], b.input_ids)
        assert torch.equal(a.labels == IGNORE, b.labels == IGNORE)
        real = a.labels != IGNORE
        assert torch.equal(names[a.labels[real]], b.labels[real])


def test_a_document_longer_than_many_batches() -> None:
    batches = read(mixture(make_documents([96]), 16, 16), 6)
    ids = torch.cat([b.input_ids[0] for b in batches])
    assert sorted(ids.tolist()) == list(range(96))
    labels = torch.cat([b.labels[0] for b in batches])
    assert torch.equal(labels, torch.where(ids == 95, IGNORE, ids + 1))
    assert all(b.cu_seqlens.tolist() == [0, 16] for b in batches)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 60), st.integers(1, 60))
def test_evaluation_scores_every_token_but_the_first_once(lengths: list[int], a: int, b: int) -> None:
    context, tokens = min(a, b), max(a, b)
    documents = make_documents(lengths)
    batches = evaluation_batches(documents, context, tokens)
    for batch in batches:
        assert batch.input_ids.shape[1] == batch.cu_seqlens[-1] <= tokens
        assert torch.equal(batch.labels, batch.input_ids + 1)  # ids count up inside a document
    pieces = labels_by_piece(batches)
    assert all(0 < len(piece) <= context for piece in pieces)
    assert list(chain(*pieces)) == [x for document in documents for x in document[1:].tolist()]
    in_other_rows = evaluation_batches(documents, context, tokens + 17)
    assert labels_by_piece(in_other_rows) == pieces


def test_mistakes_are_refused() -> None:
    documents = make_documents(LENGTHS)
    for empty in ([], [np.array([], dtype=np.int64)]):
        with pytest.raises(DataError, match="documents: expected at least one token"):
            mixture(empty, 8, 8)
    for wrong in (np.zeros(3), np.zeros((2, 2), dtype=int)):
        with pytest.raises(DataError, match="documents: expected 1-D arrays of integers"):
            evaluation_batches([wrong], 8, 8)
    with pytest.raises(ConfigError, match=r"tokens: expected at least 9 \(context\), got 8"):
        mixture(documents, 8, 9)
    with pytest.raises(ConfigError, match="context: expected at least 1, got 0"):
        evaluation_batches(documents, 0, 8)
    with pytest.raises(ConfigError, match="rank: expected 0 to 1, got 2"):
        mixture(documents, 8, 8, rank=2, ranks=2)


def test_another_stream_is_not_resumed() -> None:
    documents = make_documents(LENGTHS)
    state = mixture(documents, 8, 8, seed=1).state_dict()
    with pytest.raises(DataError, match="text: seed: expected 1 as when saved, got 2"):
        mixture(documents, 8, 8, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="text: documents: expected 7 as when saved, got 6"):
        mixture(documents[:6], 8, 8, seed=1).load_state_dict(state)
    changed = [*documents[:6], documents[6] + 1]
    with pytest.raises(DataError, match="text: checksum: expected"):
        mixture(changed, 8, 8, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="text: tokens: expected 92 as when saved, got 91"):
        mixture([*documents[:6], documents[6][1:]], 8, 8, seed=1).load_state_dict(state)


def test_empty_documents_are_passed_over() -> None:
    documents = make_documents(LENGTHS)
    empty = np.array([], dtype=np.int32)
    with_empty = [empty, *documents[:3], empty, *documents[3:], empty]
    a, b = mixture(documents, 20, 20), mixture(with_empty, 20, 20)
    assert all(same(x, y) for x, y in zip(read(a, 10), read(b, 10)))

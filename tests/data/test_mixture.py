import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError, DataError
from perilune.data.mixture import Mixture
from perilune.data.packing import IGNORE, Batch, PackedText
from perilune.data.stream import Segment

CODES = {"a": 1_000, "b": 2_000, "task": 3_000, "other": 4_000}  # an id says which stream it came from


class Samples:
    """Whole samples of `context` tokens; sample i of stream s has the ids CODES[s] + i."""

    def __init__(self, name: str) -> None:
        self.code, self.index, self.context = CODES[name], 0, 0

    def size(self, ahead: int = 0) -> int:
        return self.context

    def resize(self, context: int, min_document: int = 0, long_times: int = 1) -> None:
        self.context = context

    def read(self, tokens: int) -> Segment:
        assert tokens % self.context == 0
        count = tokens // self.context
        ids = np.repeat(self.code + np.arange(self.index, self.index + count), self.context)
        self.index += count
        return Segment(ids, np.full_like(ids, IGNORE), np.arange(count) * self.context, answers=ids)

    def skip(self, tokens: int) -> None:
        self.read(tokens)

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def text(name: str, lengths: tuple[int, ...] = (30, 7, 41, 2)) -> PackedText:
    return PackedText([np.full(n, CODES[name] + i) for i, n in enumerate(lengths)], seed=1)


def mixture(weights: dict[str, float], *, tokens: int = 64, context: int = 16, **options: int) -> Mixture:
    streams = {"a": text("a"), "b": text("b", (5, 90)), "task": Samples("task"), "other": Samples("other")}
    batches = Mixture({name: streams[name] for name in weights}, **options)
    batches.begin(weights, tokens=tokens, context=context)
    return batches


def shares(batches: list[Batch]) -> Counter[str]:
    names = {code: name for name, code in CODES.items()}
    ids = torch.cat([batch.input_ids[0] for batch in batches]).tolist()
    return Counter(names[i // 1000 * 1000] for i in ids)


def read(batches: Mixture, count: int) -> list[Batch]:
    return [batches.next() for _ in range(count)]


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("input_ids", "labels", "cu_seqlens"))


WEIGHTS = st.dictionaries(st.sampled_from(list(CODES)), st.floats(0.05, 1.0), min_size=1)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(1, 24), st.integers(1, 5), st.integers(0, 10))
def test_shares_hold_to_within_a_sample(weights: dict[str, float], context: int, rows: int, odd: int) -> None:
    total = sum(weights.values())
    cut = weights.keys() & {"a", "b"}
    tokens = context * rows + (odd % context if cut else 0)
    assume(sum(weights[name] for name in weights.keys() - cut) / total <= context * rows / tokens)  # they have room
    batches = mixture(weights, tokens=tokens, context=context)
    made = read(batches, 40)
    assert all(batch.input_ids.shape[1] == tokens == batch.cu_seqlens[-1] for batch in made)
    got = shares(made)
    for name, weight in weights.items():
        assert abs(got[name] - weight / total * 40 * tokens) <= context * len(weights)


def test_without_a_stream_that_can_be_cut_a_batch_is_whole_samples() -> None:
    made = read(mixture({"task": 2.0, "other": 1.0}, tokens=56, context=16), 4)
    assert [batch.input_ids.shape[1] for batch in made] == [48] * 4
    assert shares(made) == {"task": 8 * 16, "other": 4 * 16}


def test_a_sample_is_never_cut_and_nothing_is_joined() -> None:
    for batch in read(mixture({"a": 0.5, "task": 0.3, "other": 0.2}, tokens=50), 30):
        bounds = batch.cu_seqlens.tolist()
        for start, stop in pairwise(bounds):
            piece = batch.input_ids[0, start:stop]
            assert len(piece.unique()) == 1  # one document or sample
            if piece[0] >= 3_000:
                assert len(piece) == 16


def test_answers_stay_apart_from_text() -> None:
    for batch in read(mixture({"a": 0.6, "task": 0.4}, tokens=50), 20):
        of_task = batch.input_ids >= 3_000
        if batch.answers is None:
            assert not of_task.any()
            continue
        assert torch.equal(batch.answers, torch.where(of_task, batch.input_ids, IGNORE))
        assert (batch.labels[of_task] == IGNORE).all()
    assert all(batch.answers is None for batch in read(mixture({"a": 0.5, "b": 0.5}), 3))


def test_samples_as_long_as_a_batch_take_turns_with_text() -> None:
    made = read(mixture({"a": 0.75, "task": 0.25}, tokens=16, context=16), 12)
    kinds = ["task" if (batch.input_ids >= 3_000).all() else "text" for batch in made]
    assert kinds.count("task") == 3
    assert all(len(batch.input_ids.unique() // 1000 * 1000) for batch in made)


def test_every_reader_gets_its_own_batches_and_keeps_step() -> None:
    weights = {"a": 0.4, "b": 0.3, "task": 0.3}
    single = read(mixture(weights), 12)
    readers = [mixture(weights, rank=rank, ranks=3) for rank in range(3)]
    for step in range(4):
        assert all(same(reader.next(), single[3 * step + rank]) for rank, reader in enumerate(readers))
        assert len({json.dumps(reader.state_dict()) for reader in readers}) == 1


@pytest.mark.parametrize("stop", [0, 1, 7, 13])
def test_taken_up_anywhere_it_goes_on_as_if_nothing_had_been(stop: int) -> None:
    first, second = {"a": 0.6, "task": 0.4}, {"a": 0.5, "b": 0.2, "task": 0.3}

    def begin(batches: Mixture, stage: int) -> None:
        if stage == 0:
            batches.begin(first, tokens=64, context=16)
        else:
            batches.begin(second, tokens=80, context=40, min_document=20)

    def fresh() -> Mixture:
        return mixture({"a": 1.0, "b": 1.0, "task": 1.0})

    def stages(batches: Mixture, done: int = 0) -> list[Batch]:
        made = []
        for step in range(done, 16):
            if step in (0, 8):
                begin(batches, step // 8)
            made.append(batches.next())
        return made

    straight = fresh()
    expected = stages(straight)
    stopped = fresh()
    begin(stopped, 0)
    for step in range(stop):
        if step == 8:
            begin(stopped, 1)
        stopped.next()
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = fresh()
    begin(resumed, stop // 8)
    resumed.load_state_dict(state)
    made = []
    for step in range(stop, 16):
        if step == 8:
            begin(resumed, 1)
        made.append(resumed.next())
    assert len(made) == 16 - stop
    assert all(same(a, b) for a, b in zip(made, expected[stop:]))


def test_short_documents_are_left_out_where_a_stage_says_so() -> None:
    batches = Mixture({"a": text("a")})
    batches.begin({"a": 1.0}, tokens=20, context=10, min_document=8)
    assert set(torch.cat([batch.input_ids[0] for batch in read(batches, 40)]).tolist()) == {1_000, 1_002}
    with pytest.raises(DataError, match=r"min_document: expected at most 41 tokens \(the longest document\), got 42"):
        batches.begin({"a": 1.0}, tokens=20, context=10, min_document=42)


def test_mistakes_are_refused() -> None:
    batches = mixture({"a": 1.0})
    with pytest.raises(ConfigError, match="mix: there is no source or task called 'A'"):
        batches.begin({"A": 1.0}, tokens=64, context=16)
    with pytest.raises(ConfigError, match=r"tokens: expected at least 65 \(context\), got 64"):
        batches.begin({"a": 1.0}, tokens=64, context=65)
    with pytest.raises(ConfigError, match="rank: expected 0 to 1, got 2"):
        Mixture({"a": text("a")}, rank=2, ranks=2)
    with pytest.raises(DataError, match="mix: expected a, task as when saved, got a; resume with the same stages"):
        batches.load_state_dict(mixture({"a": 1.0, "task": 1.0}).state_dict())

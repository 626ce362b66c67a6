"""Turns on one cache: whatever the turns, the model has read the text once and says what one forward says."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.tokenizer import ByteBPE
from perilune.infer.sampler import Sampling
from perilune.infer.text import TextSession, stream_text
from tiny_k3 import model

GREEDY = Sampling(temperature=0)
TOKENIZER = ByteBPE.train([" moon rise" * 9 + "\n"], vocab_size=270)


class Watched:
    """A session's model with a note of all that it read, and of the logits after it."""

    def __init__(self):
        torch.manual_seed(3)
        self.k3 = model(vocab_size=TOKENIZER.vocab_size)
        self.read = []
        forward = self.k3.forward

        def noting(tokens, *, cache):
            output = forward(tokens, cache=cache)
            self.read.append((tokens[0].tolist(), output.logits[0, -1]))
            return output

        self.k3.forward = noting
        self.one_forward = forward

    def check(self, session):
        """Every token was read once, in order, but the last, and the logits were those of one forward."""
        tokens = list(itertools.chain.from_iterable(tokens for tokens, _ in self.read))
        assert tokens == session.ids[: len(tokens)]
        with torch.no_grad():
            self.k3.eval()
            expected = self.one_forward(torch.tensor([tokens])).logits[0]
        ends = itertools.accumulate(len(tokens) for tokens, _ in self.read)
        for end, (_, logits) in zip(ends, self.read):
            assert (logits - expected[end - 1]).abs().max() < 1e-10
        return len(tokens)


@pytest.fixture
def watched():
    return Watched()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["moon", " rise moon", "", "a 漢字\n", " ", "x ", "\n"]), st.integers(0, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_any_turns_are_one_text(turns):
    watched = Watched()
    session = TextSession(watched.k3, TOKENIZER, sampling=Sampling(), seed=1)
    text = ""
    for written, tokens in turns:
        session.write(written)
        text += written + "".join(session.reply(tokens))
    if watched.read:
        assert watched.check(session) < len(session.ids)
    assert session.ids[0] == TOKENIZER.eos_id
    if "\ufffd" not in text and TOKENIZER.eos_id not in session.ids[1:]:
        assert TOKENIZER.decode(session.ids[1:]) == text


def test_each_turn_reads_what_is_new(watched):
    session = TextSession(watched.k3, TOKENIZER, sampling=Sampling(), seed=0)
    for text in ("moon rise", "\nrise", " moon"):
        session.write(text)
        list(session.reply(3))
    new = [len(TOKENIZER.encode(text)) for text in ("moon rise", "\nrise", " moon")]
    assert TOKENIZER.eos_id not in session.ids[1:]
    assert [len(tokens) for tokens, _ in watched.read] == [1 + new[0], 1, 1, 1 + new[1], 1, 1, 1 + new[2], 1, 1]


def test_one_turn_is_stream_text(watched):
    session = TextSession(watched.k3, TOKENIZER, seed=5)
    session.write("moon ")
    got = "".join(session.reply(30))
    assert got == "".join(stream_text(watched.k3, TOKENIZER, "moon ", 30, seed=5))
    assert got != "".join(stream_text(watched.k3, TOKENIZER, "moon ", 30, seed=6))


def test_a_reply_left_early_is_gone_on_with(watched):
    def text(*parts):
        session = TextSession(watched.k3, TOKENIZER, sampling=GREEDY)
        session.write("moon")
        for part in parts:
            for _, _piece in zip(range(part), session.reply(1000)):
                pass
        return session.ids

    whole = text(12)
    watched.read.clear()
    ids = text(5, 0, 4, 3)
    assert ids == whole
    assert sum(len(tokens) for tokens, _ in watched.read) == len(ids) - 1


def test_reset_forgets_the_text(watched):
    session = TextSession(watched.k3, TOKENIZER, sampling=GREEDY)
    session.write("rise")
    first = list(session.reply(6))
    session.write(" moon")
    list(session.reply(6))
    session.reset()
    assert session.at_line_start
    watched.read.clear()
    session.write("rise")
    assert list(session.reply(6)) == first
    assert watched.read[0][0] == [TOKENIZER.eos_id, *TOKENIZER.encode("rise")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_pass_cut_short_is_read_again(watched, error, monkeypatch):
    """Layers below have the token in their cache and layers above do not: none of it is used."""
    session = TextSession(watched.k3, TOKENIZER, sampling=GREEDY)
    session.write("moon")
    list(session.reply(3))
    session.write(" rise")
    before = list(session.ids)
    layer = watched.k3.model.layers[3]
    with monkeypatch.context() as broken:
        broken.setattr(layer, "forward", stopped(error))
        with pytest.raises(error):
            list(session.reply(3))
    assert session.ids == before
    watched.read.clear()
    list(session.reply(3))
    assert watched.check(session) == len(session.ids) - 1


def stopped(error):
    def forward(*args, **options):
        raise error

    return forward


def test_a_space_is_left_to_the_next_word_and_drawn_once(watched):
    session = TextSession(watched.k3, TOKENIZER, seed=0)
    session.write("x ")
    space = session.ids[-1]
    piece = "".join(session.reply(1))
    assert TOKENIZER.decode(session.ids[2:]) == " " + piece
    assert len(session.ids) == 3
    assert watched.read[0][0] == session.ids[:2]
    session.ids[-1] = space  # as if it had drawn it: now it is a token like others
    list(session.reply(1))
    assert session.ids[2] == space
    assert watched.read[1][0] == [space]


def test_no_tokens_take_nothing(watched):
    session = TextSession(watched.k3, TOKENIZER, seed=0)
    session.write("x ")
    assert list(session.reply(0)) == []
    assert TOKENIZER.decode(session.ids[1:]) == "x "
    assert watched.read == []


@pytest.mark.parametrize(("text", "start"), [("", True), ("a", False), ("a\n", True), ("\n  ", False), ("漢", False)])
def test_where_a_line_starts(watched, text, start):
    session = TextSession(watched.k3, TOKENIZER)
    session.write(text)
    assert session.at_line_start == start


def test_the_end_of_a_document_stays_in_the_text(watched):
    with torch.no_grad():
        watched.k3.lm_head.weight.zero_()  # all alike: greedy takes id 0
    tokenizer = ByteBPE.train(["nothing twice"], vocab_size=257)
    session = TextSession(watched.k3, tokenizer, sampling=GREEDY)
    session._known.zero_()[tokenizer.eos_id] = True
    session.write("moon")
    assert list(session.reply(5)) == []
    assert session.ids[-1] == tokenizer.eos_id
    assert session.at_line_start
    session.write("rise")
    list(session.reply(1))
    assert watched.read[1][0] == [tokenizer.eos_id, *tokenizer.encode("rise")]

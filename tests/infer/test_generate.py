"""Generation against full forwards, and text that comes out whole whatever the tokens cut."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from perilune.core.errors import ShapeError
from perilune.data.tokenizer import ByteBPE
from perilune.infer.generate import generate, stream
from perilune.infer.sampler import Sampling
from perilune.infer.text import stream_text
from tiny_k3 import ids, model

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def k3():
    torch.manual_seed(3)
    return model()


@torch.no_grad()
def by_full_forwards(k3, prompt, n):
    tokens = prompt
    for _ in range(n):
        following = k3.eval()(tokens).logits[:, -1].argmax(-1)
        tokens = torch.cat([tokens, following[:, None]], 1)
    k3.train()
    return tokens[:, prompt.shape[1] :]


class Scripted(nn.Module):
    """Says `script`, token after token, whatever it reads; or, without one, anything alike."""

    def __init__(self, script=None, vocab=1000):
        super().__init__()
        self.script, self.vocab, self.read = script, vocab, []
        self.weight = nn.Parameter(torch.zeros(1))

    def new_cache(self, batch):
        return SimpleNamespace(steps=0)

    def forward(self, tokens, *, cache):
        self.read.append(tokens.tolist())
        logits = torch.zeros(*tokens.shape, self.vocab)
        if self.script is not None:
            logits[..., self.script[cache.steps]] = 1e9
        cache.steps += 1
        return SimpleNamespace(logits=logits)


# tokens


def test_greedy_is_the_argmax_of_full_forwards(k3):
    prompt = ids(3, 7)
    tokens = generate(k3, prompt, 12, sampling=GREEDY)
    assert tokens.equal(by_full_forwards(k3, prompt, 12))
    assert tokens.unique().numel() > 2
    for row in range(3):
        assert generate(k3, prompt[row : row + 1], 12, sampling=GREEDY).equal(tokens[row : row + 1])


def test_one_model_answers_prompts_of_any_length_one_after_another(k3):
    prompts = [ids(1, n) for n in (5, 50, 5)]
    answers = [generate(k3, prompt, 8, sampling=GREEDY) for prompt in prompts]
    for prompt, answer in zip(prompts, answers):
        assert answer.equal(by_full_forwards(k3, prompt, 8))
    streams = [stream(k3, prompt, 8, sampling=GREEDY) for prompt in prompts]  # taking turns
    for step, tokens in enumerate(zip(*streams)):
        assert [int(t) for t in tokens] == [int(answer[0, step]) for answer in answers]


def test_a_seed_decides_the_draws_and_spares_the_global_one(k3):
    prompt = ids(2, 5)
    before = torch.get_rng_state()
    draws = [generate(k3, prompt, 10, seed=seed) for seed in (7, 7, 8)]
    assert torch.get_rng_state().equal(before)
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    free = [generate(k3, prompt, 10) for _ in range(2)]
    assert not free[0].equal(free[1])


def test_samples_of_one_prompt_differ_from_the_first_token_on():
    tokens = generate(Scripted(), torch.zeros(16, 3, dtype=torch.int64), 2, seed=0)
    assert tokens.shape == (16, 2)
    assert all(column.unique().numel() > 10 for column in tokens.T)


def test_the_prompt_goes_in_once():
    scripted = Scripted([4, 5, 6])
    assert generate(scripted, torch.tensor([[1, 2, 3]]), 3, sampling=GREEDY).tolist() == [[4, 5, 6]]
    assert scripted.read == [[[1, 2, 3]], [[4]], [[5]]]  # and the last token not at all


def test_the_model_is_left_as_it_was(k3):
    assert k3.training
    tokens = stream(k3, ids(1, 5), 9)
    assert not next(tokens).requires_grad
    tokens.close()  # before its end
    assert k3.training
    generate(k3.eval(), ids(1, 5), 2)
    assert not k3.training
    generate(k3.train(), ids(1, 5), 2)
    assert all(module.training for module in k3.modules())
    assert all(b.counts.sum() == 0 for b in k3.balancers().values())
    assert k3(ids(1, 5)).logits.requires_grad


def test_no_new_tokens_is_an_answer_too(k3):
    assert generate(k3, ids(2, 5), 0).shape == (2, 0)


@pytest.mark.parametrize("shape", [(5,), (1, 0)])
def test_a_prompt_needs_a_batch_and_a_token(k3, shape):
    with pytest.raises(ShapeError, match="prompt: expected"):
        generate(k3, torch.zeros(shape, dtype=torch.int64), 3)


# text


class Pieces:
    """A tokenizer whose tokens are any bytes: token i stands for `pieces[i]`, the last for the end."""

    def __init__(self, *pieces):
        self.pieces = pieces
        self.eos_id = len(pieces)
        self.vocab_size = len(pieces) + 1

    def encode(self, text):
        return []

    def decode_bytes(self, tokens):
        return b"".join(self.pieces[i] for i in tokens)


TEXTS = ["삼겹살", "🙂🙂", "ď", "a삼 b🙂\nďe", "plain"]


def deltas(tokenizer, script, n=None):
    scripted = Scripted(script, vocab=tokenizer.eos_id + 1)
    return list(stream_text(scripted, tokenizer, "", n or len(script), sampling=GREEDY))


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_out_whole_byte_by_byte(text):
    pieces = Pieces(*(bytes([b]) for b in text.encode()))
    got = deltas(pieces, [*range(len(pieces.pieces)), pieces.eos_id])
    assert got == list(text)  # each as soon as its last byte is there


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_out_whole_however_tokens_cut_them(text):
    data = text.encode()
    for i in range(len(data) + 1):
        for j in range(i, len(data) + 1):
            got = deltas(Pieces(data[:i], data[i:j], data[j:]), [0, 1, 2, 3])
            assert "".join(got) == text
            assert all(got)  # no empty pieces


@pytest.mark.parametrize("text", TEXTS)
def test_a_limit_inside_a_character_is_survived(text):
    data = text.encode()
    pieces = Pieces(*(bytes([b]) for b in data))
    for n in range(1, len(data) + 1):
        got = deltas(pieces, range(len(data)), n)
        assert "".join(got) == data[:n].decode(errors="replace")


def test_bytes_that_are_no_text_are_marked_and_passed():
    assert "".join(deltas(Pieces(b"a\xff", b"\xec\x82", b"b"), [0, 1, 2, 3])) == "a\ufffd\ufffdb"


def test_text_stops_at_the_end_of_the_document():
    pieces = Pieces(b"one", b"two")
    assert deltas(pieces, [0, pieces.eos_id, 1]) == ["one"]
    assert deltas(pieces, [pieces.eos_id, 1]) == []
    assert deltas(pieces, [0, 1, 0], n=2) == ["one", "two"]


def test_a_prompt_follows_an_end_of_text_and_comes_as_text():
    tokenizer = ByteBPE.train(["nothing twice"], vocab_size=257)
    answer = "삼 <|endoftext|>"
    scripted = Scripted([*tokenizer.encode(answer), tokenizer.eos_id], vocab=tokenizer.vocab_size)
    got = list(stream_text(scripted, tokenizer, "é<|endoftext|>", 99, sampling=GREEDY))
    assert "".join(got) == answer  # spelled out, it stops nothing
    assert scripted.read[0] == [[tokenizer.eos_id, *tokenizer.encode("é<|endoftext|>")]]
    assert scripted.read[0][0].count(tokenizer.eos_id) == 1


def test_text_of_a_real_model_is_its_greedy_tokens():
    tokenizer = ByteBPE.train(["nothing twice"], vocab_size=257)
    k3 = model(vocab_size=257)
    prompt = torch.tensor([[tokenizer.eos_id, *tokenizer.encode("moon")]])
    tokens = by_full_forwards(k3, prompt, 20)[0].tolist()
    if tokenizer.eos_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_id)]
    got = "".join(stream_text(k3, tokenizer, "moon", 20, sampling=GREEDY))
    assert got == tokenizer.decode(tokens)
    assert tokens


def test_only_tokens_of_the_tokenizer_are_drawn():
    """A model may have more rows than its tokenizer has tokens: padded, or trained on little text."""
    scripted, tokenizer = Scripted(vocab=1000), Pieces(b"a", b"b")
    text = "".join(stream_text(scripted, tokenizer, "", 200, sampling=Sampling(), seed=0))
    assert set(text) <= {"a", "b"}
    tokens = list(stream(scripted, ids(1, 3), 50, sampling=Sampling(), seed=0))
    assert max(int(token) for token in tokens) > 2


def test_a_space_at_the_end_of_the_prompt_belongs_to_the_next_word():
    tokenizer = ByteBPE.train([" moon rise" * 9], vocab_size=270)
    (space,), (moon, *_) = tokenizer.encode(" "), tokenizer.encode(" moon")
    assert tokenizer.decode([moon]).startswith(" m")
    scripted = Scripted([moon, moon], vocab=tokenizer.vocab_size)
    got = "".join(stream_text(scripted, tokenizer, "x ", 2, sampling=GREEDY))
    assert got == tokenizer.decode([moon, moon])[1:]  # the prompt has shown the first space
    assert scripted.read[0] == [[tokenizer.eos_id, *tokenizer.encode("x")]]
    drawn = {next(stream_text(Scripted(vocab=tokenizer.vocab_size), tokenizer, "x ", 1, seed=s), "") for s in range(40)}
    allowed = [tokenizer.decode([i])[1:] for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).startswith(" ")]
    assert drawn <= set(allowed)
    assert space in range(tokenizer.vocab_size)

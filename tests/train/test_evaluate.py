import math

import pytest
import torch

from perilune.core.errors import ConfigError, DataError
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.train.evaluate import bits_per_byte
from tiny_run import corpus, run

TEXTS = ["plain words, and plain words", "", "漢字かな交じり文 😀😀 né", "x", "0123456789 " * 9]


@pytest.fixture(scope="module")
def tokenizer():
    return ByteBPE.train([document.text for document in corpus().train], 300)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    made = K3Model(run(model={"initializer_range": 0.2}).model).double()
    with torch.no_grad():
        for balancer in made.balancers().values():
            balancer.bias.normal_(std=0.05)
    return made


def token_by_token(model, tokenizer, texts, context):
    """Bits of every token after those before it in its piece, added one by one."""
    bits = 0.0
    model.eval()
    for text in texts:
        ids = [tokenizer.eos_id, *tokenizer.encode(text), tokenizer.eos_id]
        for i in range(len(ids) - 1):
            begin = i - i % context
            with torch.no_grad():
                logits = model(torch.tensor([ids[begin : i + 1]])).logits[0, -1]
            bits -= float(logits.log_softmax(-1)[ids[i + 1]]) / math.log(2)
    model.train()
    return bits / sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("context", [1, 7, 64])
def test_bits_are_those_of_every_token_by_itself(model, tokenizer, context):
    expected = token_by_token(model, tokenizer, TEXTS, context)
    assert bits_per_byte(model, tokenizer, TEXTS, context=context) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("context", [3, 16])
def test_the_length_of_a_row_does_not_matter(model, tokenizer, context):
    whole = bits_per_byte(model, tokenizer, TEXTS, context=context)
    for tokens in (1, context, context + 1, 40):  # a row has room for a context at least
        assert bits_per_byte(model, tokenizer, TEXTS, context=context, tokens=tokens) == pytest.approx(whole, rel=1e-12)


def test_texts_add_up(model, tokenizer):
    parts = [bits_per_byte(model, tokenizer, [text], context=16) * len(text.encode()) for text in (TEXTS[0], TEXTS[2])]
    both = bits_per_byte(model, tokenizer, [TEXTS[0], TEXTS[2]], context=16)
    assert both == pytest.approx(sum(parts) / sum(len(TEXTS[i].encode()) for i in (0, 2)), rel=1e-12)


@pytest.mark.parametrize("text", ["ascii only", "😀", "漢字", "é" * 20, "a\r\nb\x00"])
def test_a_model_that_knows_nothing_needs_the_logarithm_of_its_vocabulary(model, tokenizer, text):
    """Bytes are counted, not characters; the end of the text is one more token."""
    head = model.lm_head.weight
    kept = head.detach().clone()
    with torch.no_grad():
        head.zero_()
    try:
        bits = bits_per_byte(model, tokenizer, [text], context=8)
    finally:
        with torch.no_grad():
            head.copy_(kept)
    tokens = len(tokenizer.encode(text)) + 1
    assert bits == pytest.approx(math.log2(300) * tokens / len(text.encode("utf-8")), rel=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_judging_leaves_the_model_as_it_was(model, tokenizer, training):
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bits_per_byte(model, tokenizer, TEXTS, context=16)
    assert model.training is training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not balancer.counts.any() for balancer in model.balancers().values())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_fails_is_back_in_training(model, tokenizer, monkeypatch):
    model.train()
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bits_per_byte(model, tokenizer, TEXTS, context=16)
    assert model.training


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_no_text_is_refused(model, tokenizer, texts):
    with pytest.raises(DataError, match="texts: expected at least one byte"):
        bits_per_byte(model, tokenizer, texts, context=16)


def test_no_context_is_refused(model, tokenizer):
    with pytest.raises(ConfigError, match="context: expected at least 1, got 0"):
        bits_per_byte(model, tokenizer, TEXTS, context=0)

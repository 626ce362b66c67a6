"""Probes with models whose answers are known, and with a real one against full forwards."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from perilune.data.tasks import JUDGED, TASKS, Question, Sample
from perilune.data.tokenizer import ByteBPE
from perilune.train import probes
from perilune.train.probes import answers, bucket_edges, long_context, loss_by_position, probe, sample_count
from tiny_k3 import model
from tiny_run import corpus

TEXTS = [document.text for document in (*corpus().train, *corpus().held_out)]


@pytest.fixture(scope="module")
def tokenizer():
    return ByteBPE.train([document.text for document in corpus().train], 300)


@pytest.fixture(scope="module")
def needle(tokenizer):
    return TASKS["needle"](tokenizer, tokenizer.encode_documents(TEXTS))


class Prophet(nn.Module):
    """Stands in for a model: it sees the token after each, and says it where `says` agrees, else another."""

    def __init__(self, vocab, says=lambda ids: torch.ones_like(ids, dtype=torch.bool)):
        super().__init__()
        self.lm_head = nn.Linear(vocab, vocab, bias=False)
        nn.init.eye_(self.lm_head.weight)
        self.says, self.rows = says, []
        self.backbone = nn.Identity()

    @property
    def model(self):
        def run(ids, cache, cu_seqlens):
            assert cache is None
            self.rows.append((ids[0], list(cu_seqlens)))
            following = ids.roll(-1, 1)
            wrong = ~self.says(ids)
            return nn.functional.one_hot((following + wrong) % self.lm_head.weight.shape[0], 300).float()

        run.norm = nn.Identity()
        return run


# tasks


@pytest.mark.parametrize("name", sorted(TASKS))
def test_who_knows_every_answer_is_right(tokenizer, name):
    task = TASKS[name](tokenizer, tokenizer.encode_documents(TEXTS))
    length = task.least + 50
    asked = sum(len(task.probe(length, 0, i).questions) for i in range(3))
    found = probe(Prophet(300), task, length, samples=3)
    assert (found["accuracy"], found["asked"]) == (1.0, asked)
    assert (found["length"], found["chance"]) == (length, task.chance)
    assert probe(Prophet(300, lambda ids: ids < 0), task, length, samples=3)["accuracy"] == 0


def test_accuracy_by_depth_is_counted_question_by_question(needle):
    """A model that is right where the token before the answer, or its position, is even: against a plain count."""
    samples, length = 5, needle.least + 300

    def says(ids):
        return (ids + torch.arange(ids.shape[1])) % 2 == 0

    found = probe(Prophet(300, says), needle, length, samples=samples, seed=3)
    asked, right = [0] * 8, [0] * 8
    for row, offset in zip((needle.probe(length, 3, i) for i in range(samples)), itertools.count(0, length)):
        for question in row.questions:
            bin = int(8 * question.evidence[0][0] / min(q.ask for q in row.questions))
            asked[bin] += 1
            right[bin] += all((row.ids[t - 1] + t - 1 + offset) % 2 == 0 for t in range(question.start, question.stop))
    assert [place["asked"] for place in found["positions"]] == asked
    assert [place["accuracy"] for place in found["positions"]] == [r / n for r, n in zip(right, asked)]
    assert [(place["from"], place["to"]) for place in found["positions"]] == [(i / 8, (i + 1) / 8) for i in range(8)]
    assert found["accuracy"] == sum(right) / sum(asked)
    assert 0 < found["accuracy"] < 1


def test_only_one_place_has_a_depth(tokenizer):
    filler = tokenizer.encode_documents(TEXTS)
    for name, task in TASKS.items():
        made = task(tokenizer, filler)
        one = all(len(q.evidence) == 1 for i in range(4) for q in made.probe(made.least + 9, 0, i).questions)
        assert bool(probe(Prophet(300), made, made.least + 9, samples=4)["positions"]) == one, name
    assert probe(Prophet(300), TASKS["needle"](tokenizer, filler), 600, samples=1)["positions"]


def test_samples_share_rows_up_to_their_length(needle, monkeypatch):
    monkeypatch.setattr(probes, "ROW_TOKENS", 1300)
    prophet = Prophet(300)
    probe(prophet, needle, 600, samples=5, seed=1)
    assert [cu for _, cu in prophet.rows] == [[0, 600, 1200], [0, 600, 1200], [0, 600]]
    ids = np.concatenate([needle.probe(600, 1, i).ids for i in range(5)])
    assert torch.cat([row for row, _ in prophet.rows]).tolist() == ids.tolist()
    monkeypatch.setattr(probes, "ROW_TOKENS", 10)  # a sample goes through whole
    probe(prophet, needle, 600, samples=1)
    assert prophet.rows[-1][1] == [0, 600]


@torch.no_grad()
def forced_sample(k3, vocab, spans, wrong):
    """Random ids, the answers what the model says there by full forwards; those in `wrong` off by one token."""
    ids = torch.randint(0, vocab, (60,))
    for start, stop in spans:
        for t in range(start, stop):
            ids[t] = k3(ids[None, :t]).logits[0, -1, :vocab].argmax()
        if (start, stop) in wrong:
            ids[stop - 1] = (ids[stop - 1] + 1) % vocab
    questions = tuple(Question(start - 2, start, stop, "", ((0, 1),)) for start, stop in spans)
    return Sample(ids.numpy().astype(np.int32), questions, np.ones(60, dtype=bool))


def test_answers_of_a_real_model_are_its_own_in_any_company():
    """Right ones and wrong ones, of one and more tokens, in rows with others; ids beyond the tokenizer's left out."""
    k3 = model(vocab_size=50).eval()
    with torch.no_grad():
        k3.lm_head.weight[40:] *= 5  # what the tokenizer does not have would win now and then
    spans = [(10, 11), (20, 23), (31, 33), (40, 44), (58, 60)]
    samples, expected, beyond = [], [], 0
    for i in range(4):
        wrong = spans[i::3]
        samples.append(forced_sample(k3, 40, spans, wrong))
        expected += [span not in wrong for span in spans]
        logits = k3(torch.from_numpy(samples[-1].ids[None].astype(np.int64))).logits[0]
        beyond += sum(int(logits[t - 1].argmax()) >= 40 for start, stop in spans for t in range(start, stop))
    assert beyond > 5
    k3.train()
    assert answers(k3, samples, 40) == expected
    assert k3.training
    assert [hit for sample in samples for hit in answers(k3, [sample], 40)] == expected
    assert answers(k3, samples, 50) != expected


@pytest.mark.parametrize(
    ("length", "tokens", "samples"),
    [(128, 16384, 64), (256, 16384, 64), (512, 16384, 32), (16384, 16384, 1), (16385, 16384, 1), (8192, 32768, 4)],
)
def test_samples_for_a_length(length, tokens, samples):
    assert sample_count(length, tokens) == samples


# loss by position


@pytest.mark.parametrize(
    ("context", "edges"),
    [(1, [0, 1]), (32, [0, 32]), (33, [0, 32, 33]), (128, [0, 32, 128]), (129, [0, 32, 128, 129]),
     (600, [0, 32, 128, 256, 512, 600]), (1024, [0, 32, 128, 256, 512, 1024])],
)  # fmt: skip
def test_buckets_double(context, edges):
    assert bucket_edges(context) == edges


def test_loss_by_position_is_that_of_every_token_by_itself():
    k3 = model(vocab_size=50)
    lengths = [90, 140, 141, 200, 300, 160]
    documents = [np.random.default_rng(n).integers(0, 50, n).astype(np.int32) for n in lengths]
    found = loss_by_position(k3, documents, 140, tokens=3 * 140 + 139)
    nats = torch.zeros(140, dtype=torch.float64)
    for document in (documents[2], documents[3], documents[4]):  # 140 tokens leave the last without a successor
        ids = torch.from_numpy(document[:141].astype(np.int64))
        with torch.no_grad():
            log_p = k3.eval()(ids[None, :-1]).logits[0].log_softmax(-1)
        nats -= log_p[torch.arange(140), ids[1:]]
    assert found["context"] == 140
    assert [(b["from"], b["to"], b["tokens"]) for b in found["buckets"]] == [
        (0, 32, 96),
        (32, 128, 288),
        (128, 140, 36),
    ]
    for bucket in found["buckets"]:
        assert bucket["nats"] == pytest.approx(float(nats[bucket["from"] : bucket["to"]].mean()) / 3, rel=1e-10)
    least = loss_by_position(k3, documents, 140, tokens=1)
    assert [b["tokens"] for b in least["buckets"]] == [32, 96, 12]
    assert loss_by_position(k3, documents, 300) == {"context": 300, "buckets": []}


# all of it


def test_a_whole_probe_is_json(tokenizer, monkeypatch):
    monkeypatch.setattr(probes, "TOKENS", 1200)
    monkeypatch.setattr(probes, "TOKENS_OF", {"needle": 2400})
    monkeypatch.setattr(probes, "POSITION_TOKENS", 200)
    k3 = model(vocab_size=300, dtype=torch.float32).train()
    seen = []
    random = torch.get_rng_state()
    found = long_context(k3, tokenizer, TEXTS, trained=64, lengths=(600, 64), progress=seen.append)
    assert torch.get_rng_state().equal(random)
    assert k3.training
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["trained"] == 64
    assert list(found["tasks"]) == list(JUDGED)
    assert [row["length"] for row in found["tasks"]["needle"]] == [600]  # 64 tokens are too few
    assert found["tasks"]["needle"][0]["asked"] == 4 * 8
    assert [curve["context"] for curve in found["loss_by_position"]] == [64, 128]
    assert seen[0] == "needle at 600 tokens"
    assert seen[-1] == "loss by position"
    again = long_context(k3, tokenizer, TEXTS[::-1], trained=64, lengths=(64, 600), tasks=("needle",))
    assert again["tasks"]["needle"] == found["tasks"]["needle"]
    assert again["loss_by_position"] == found["loss_by_position"]
    short = long_context(k3, tokenizer, ["a short text"], trained=64, lengths=(600,), tasks=("needle",))
    assert short["loss_by_position"] == []


def test_a_model_that_knows_nothing_loses_the_same_everywhere(tokenizer):
    k3 = model(vocab_size=300)
    with torch.no_grad():
        k3.lm_head.weight.zero_()
    for curve in long_context(k3, tokenizer, TEXTS, trained=60, lengths=(), tasks=())["loss_by_position"]:
        assert [bucket["nats"] for bucket in curve["buckets"]] == pytest.approx([math.log(300)] * len(curve["buckets"]))

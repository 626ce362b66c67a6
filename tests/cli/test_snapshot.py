"""What a run writes at a stage's end of the texts that it holds out."""

import json

import pytest

from perilune.cli.train import take_snapshot
from perilune.data.corpus import Corpus, Document
from perilune.data.source import TextSource
from perilune.train.config import DataConfig
from perilune.train.evaluate import bits_per_byte
from perilune.train.feed import Feed
from perilune.train.loop import Trainer
from perilune.train.metrics import Metrics
from tiny_run import corpus, run, text


@pytest.mark.parametrize("several", [False, True])
def test_every_source_is_judged_by_itself(several, tmp_path):
    more = Corpus((Document("a", text(30)),), (Document("b", "other words, 1 2 3\n" * 20), Document("c", text(29))))
    corpora = {"text": corpus(), "more": more} if several else {"text": corpus()}
    made = run(data=DataConfig(vocab_size=300, sources={name: TextSource() for name in corpora}))
    trainer = Trainer(made, Feed(made, None, corpora))
    trainer.step(trainer.feed.next())
    with Metrics(tmp_path / "snapshots.jsonl") as snapshots:
        take_snapshot(trainer, made.stages[0], snapshots)
    snapshot = json.loads((tmp_path / "snapshots.jsonl").read_text())
    assert snapshot["stage"] == "short"
    assert ("bits_by_source" in snapshot) == several
    for name, bits in snapshot.get("bits_by_source", {}).items():
        texts = [document.text for document in corpora[name].held_out]
        expected = bits_per_byte(trainer.model, trainer.feed.tokenizer, texts, context=made.stages[0].context)
        assert bits == pytest.approx(expected, rel=1e-6)

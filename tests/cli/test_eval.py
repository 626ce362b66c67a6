"""`perilune eval` on a model that never learned anything, in a run folder made by hand."""

import json

import pytest
import torch

from perilune.cli import long_context
from perilune.cli.main import main
from perilune.data.source import TextSource, open_source
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.train import probes
from perilune.train.config import DataConfig
from perilune.train.evaluate import bits_per_byte
from perilune.train.folder import read_run, write_json
from tiny_run import corpus, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over two sources, the second of a single text cut in two."""
    path = tmp_path_factory.mktemp("eval")
    for name in ("many", "one"):
        (path / name).mkdir()
    documents = (*corpus().train, *corpus().held_out)
    for document in documents[:-1]:
        (path / "many" / document.name).write_bytes(document.text.encode())
    (path / "one" / "last.md").write_bytes(documents[-1].text.encode())
    sources = {
        "many": TextSource(path=str(path / "many")),
        "one": TextSource(path=str(path / "one"), pattern="*.md", held_out=0.5),
    }
    torch.manual_seed(0)
    stages = [stage.replace(mix={"many": 1, "one": 1}) for stage in run().stages]
    configuration = run(data=DataConfig(sources=sources, vocab_size=300), stages=tuple(stages))
    K3Model(configuration.model).save_pretrained(path / "run" / "model")
    ByteBPE.train([document.text for document in documents], 300).save(path / "run" / "model")
    write_json(path / "run" / "run.json", configuration.to_dict())
    return path / "run"


@pytest.fixture
def few(monkeypatch):
    """Probes of a second."""
    monkeypatch.setattr(probes, "TOKENS", 1200)
    monkeypatch.setattr(probes, "TOKENS_OF", {"needle": 2400})
    monkeypatch.setenv("COLUMNS", "140")


def refused(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err


def test_bits_of_what_every_source_holds_out(folder, capsys, tmp_path):
    corpora = {name: open_source(source) for name, source in read_run(folder).data.sources.items()}
    texts = [document.text for corpus in corpora.values() for document in corpus.held_out]
    assert len(texts) >= 2
    assert texts[-1] in (folder.parent / "one" / "last.md").read_text(encoding="utf-8")
    model, tokenizer = K3Model.from_pretrained(folder / "model"), ByteBPE.load(folder / "model")
    bits = bits_per_byte(model, tokenizer, texts, context=48)
    size = sum(len(text.encode()) for text in texts)
    file = tmp_path / "figures.json"
    assert main(["eval", str(folder), "--json", str(file)]) == 0
    assert capsys.readouterr().out == f"{bits:.4f} bits per byte over {size:,} bytes\n"
    assert json.loads(file.read_text()) == {"bits_per_byte": pytest.approx(bits), "bytes": size, "context": 48}


def test_the_long_context_is_printed_and_written(folder, few, capsys, tmp_path):
    file = tmp_path / "figures.json"
    words = ["eval", str(folder), "--long-context", "--lengths", "600,700", "--json", str(file)]
    assert main(words) == 0
    out = capsys.readouterr().out
    figures = json.loads(file.read_text())["long_context"]
    assert figures["trained"] == 48
    assert [row["length"] for row in figures["tasks"]["needle"]] == [600, 700]
    assert [row["asked"] for row in figures["tasks"]["needle"]] == [32, 24]
    assert [curve["context"] for curve in figures["loss_by_position"]] == [48, 96]
    for words in (
        "bits per byte over", "right answers, with their standard error", "* longer than trained on (48)", "600 *",
        *figures["tasks"], "needle: right answers by where in the text", "loss by position", "texts of 96 *",
        f"{figures['loss_by_position'][0]['buckets'][0]['nats']:.3f}",
    ):  # fmt: skip
        assert words in out, words
    assert main(["eval", str(folder / "model"), "--text", str(folder.parent / "one" / "last.md"), "--context", "30",
                 "--long-context", "--lengths", "600", "--json", str(file)]) == 0  # fmt: skip
    figures = json.loads(file.read_text())["long_context"]
    assert figures["trained"] == 30  # what was asked for, where no run says


def test_wrong_calls_are_refused_before_any_work(folder, capsys, tmp_path):
    assert "--lengths: expected --long-context beside it" in refused(capsys, folder, "--lengths", "128")
    for lengths in ("", "128,", "a", "0", "128 256"):
        line = refused(capsys, folder, "--long-context", "--lengths", lengths)
        assert "argument --lengths: expected a whole number from 1 up" in line
    for file in (tmp_path, tmp_path / "no" / "such.json"):
        assert "--json: expected a file in a folder that exists" in refused(capsys, folder, "--json", file)


def test_a_short_text_has_no_position_far_back(folder, few, capsys, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("x = 1")
    assert main(["eval", str(folder), "--text", str(text), "--long-context", "--lengths", "600"]) == 0
    out = capsys.readouterr().out
    assert "needle" in out
    assert "loss by position" not in out


# the tables


@pytest.mark.parametrize(
    ("share", "asked", "shown"),
    [(0.5, 98, "50% ±5"), (0.875, 64, "87.5% ±4.2"), (1.0, 8, "100% ±9.5"), (0.0, 512, "0% ±0.19")],
)
def test_accuracy_is_shown_with_its_error(share, asked, shown):
    assert long_context.accuracy({"accuracy": share, "asked": asked}) == shown


def test_a_length_is_marked_where_it_is_beyond_training():
    assert long_context.heading(2048, 2048) == "2,048"
    assert long_context.heading(8192, 2048) == "8,192 *"

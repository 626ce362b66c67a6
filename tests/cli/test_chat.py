"""Chat as somebody types it: through a pipe, at a terminal, interrupted."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.cli import chat
from perilune.cli.main import main
from perilune.data.tokenizer import ByteBPE
from perilune.infer.sampler import Sampling
from perilune.infer.text import TextSession
from perilune.models.k3 import K3Model
from tiny_run import corpus, run

PERILUNE = Path(sys.executable).with_name("perilune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that never learned anything, as a run leaves it; its likeliest token is never the end."""
    path = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    k3 = K3Model(run().model)
    tokenizer = ByteBPE.train([document.text for document in corpus().train], 300)
    with torch.no_grad():
        k3.lm_head.weight[tokenizer.eos_id] = k3.lm_head.weight[:2].mean(0)  # between two others
    k3.save_pretrained(path / "model")
    tokenizer.save(path / "model")
    return path


def session_of(folder, **options):
    return TextSession(K3Model.from_pretrained(folder / "model"), ByteBPE.load(folder / "model"), **options)


def said(monkeypatch, capsys, folder, typed, *words):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", str(folder), *words]) == 0
    return capsys.readouterr()


def test_a_line_in_is_a_reply_out(folder, monkeypatch, capsys):
    printed = said(monkeypatch, capsys, folder, "def f\nreturn\n\n", "--tokens", "12", "--seed", "4")
    session = session_of(folder, sampling=Sampling(temperature=0.8, top_p=0.95), seed=4)
    expected = ""
    for line in ("def f", "return", ""):
        session.write(("" if session.at_line_start or not line else "\n") + line)
        expected += "".join(session.reply(12)) + "\n"
    assert printed.out == expected
    assert len(session.ids) > 30
    assert b"\nreturn" in session.tokenizer.decode_bytes(session.ids)


def test_it_says_in_a_line_what_it_is(folder, monkeypatch, capsys):
    err = said(monkeypatch, capsys, folder, "").err
    assert err.count("\n") == 1
    assert "a base model: it continues text and does not answer" in err


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, True),
        ("tokenizer_config.json", {"model_max_length": 1}, False),
        ("tokenizer_config.json", ["chat_template"], False),
        ("chat_template.jinja", "{{ messages }}", True),
        ("config.json", {}, False),
    ],
)
def test_a_chat_template_makes_a_chat_model(tmp_path, file, content, expected):
    (tmp_path / file).write_text(json.dumps(content))
    assert chat.has_chat_template(tmp_path) == expected


def test_a_damaged_file_beside_the_model_is_no_template(tmp_path):
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff{")
    assert not chat.has_chat_template(tmp_path)


def test_exit_ends_and_reset_forgets(folder, monkeypatch, capsys):
    words = ["--tokens", "9", "--temperature", "0"]
    once = said(monkeypatch, capsys, folder, "moon", *words).out
    assert said(monkeypatch, capsys, folder, "moon\n/exit\nrise\n", *words).out == once
    assert said(monkeypatch, capsys, folder, "moon\n/reset\nmoon\n", *words).out == 2 * once
    assert said(monkeypatch, capsys, folder, "moon\nmoon\n", *words).out != 2 * once
    assert said(monkeypatch, capsys, folder, "/exit now\n", *words).out != ""  # text like any other


def test_wrong_calls_are_refused(folder, monkeypatch, capsys):
    for words, expected in (
        (["nowhere"], "expected a trained model, found no config.json"),
        ([str(folder), "--tokens", "0"], "argument --tokens: expected a whole number from 1 up"),
        ([str(folder), "--temperature", "-1"], "temperature: expected at least 0"),
        ([str(folder), "--top-p", "2"], "top_p: expected from 0 to 1"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("moon\n"))
        assert main(["chat", *words]) == 2
        printed = capsys.readouterr()
        assert expected in printed.err
        assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_an_interrupt_ends_a_reply_between_tokens(folder, capsys):
    """The token being made is finished, the text keeps it, and Python's own answer to Ctrl-C is back."""
    session = session_of(folder, sampling=Sampling(temperature=0))
    before = signal.getsignal(signal.SIGINT)
    step = session._draw

    def interrupted(owed):
        token = step(owed)
        if len(session.ids) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return token

    session._draw = interrupted
    chat.show_reply(session, 100)
    assert 4 <= len(session.ids) < 12  # up to the end of a character
    assert signal.getsignal(signal.SIGINT) is before
    chat.show_reply(session, 2)
    whole = session_of(folder, sampling=Sampling(temperature=0))
    list(whole.reply(len(session.ids) - 1))
    assert session.ids == whole.ids


class Terminal:
    """`perilune chat` at a terminal of its own."""

    def __init__(self, *words):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [PERILUNE, "chat", *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, text):
        """Reads on until `text` is shown; what was shown up to its end."""
        while text not in self.shown:
            self._read()
        before, text, self.shown = self.shown.partition(text)
        return before + text

    def wait_for_reply(self):
        while len(self.shown) < 40:
            self._read()

    def _read(self, seconds=60):
        assert self._ready(seconds), f"nothing came after {self.shown!r}"
        self.shown += os.read(self.master, 4096).decode(errors="replace")

    def _ready(self, seconds):
        return bool(select.select([self.master], [], [], seconds)[0])

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        """Ctrl-C, until something comes: Python overlooks one right before it waits for a key."""
        for _ in range(60):
            os.killpg(self.process.pid, signal.SIGINT)
            if self._ready(1):
                return

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_at_a_terminal(folder):
    """Ctrl-C stops a reply and not the program, nor at the prompt; Ctrl-D ends it."""
    terminal = Terminal(str(folder), "--tokens", "1000000000", "--temperature", "0")
    try:
        assert "a base model" in terminal.wait_for("> ")
        terminal.type("moon\n")
        terminal.wait_for("moon")
        terminal.wait_for_reply()
        terminal.interrupt()
        terminal.wait_for("> ")
        terminal.interrupt()
        terminal.wait_for("> ")
        terminal.type("rise\n")
        terminal.wait_for("rise")
        terminal.wait_for_reply()
        terminal.interrupt()
        terminal.wait_for("> ")
        terminal.type("\x04")
        code = terminal.process.wait(timeout=60)
    finally:
        terminal.close()
    assert code == 0

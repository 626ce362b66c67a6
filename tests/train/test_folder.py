import errno
import json
import os
from pathlib import Path

import pytest

from perilune.core.errors import CheckpointError, DataError
from perilune.data.tokenizer import ByteBPE
from perilune.train.config import OptimizerConfig
from perilune.train.folder import (
    LOCK,
    check_folder,
    differences,
    free_space,
    keep_tokenizer,
    read_run,
    spell,
    start_folder,
    write_json,
)
from tiny_run import STAGES, run


@pytest.fixture
def finished(tmp_path):
    """A folder as a run leaves it, with a note of its owner's."""
    folder = tmp_path / "runs" / "old"
    start_folder(folder, run(seed=1))
    made = ("metrics.jsonl", "snapshots.jsonl", "result.json", "report.html", "tokenizer.json", "model/config.json",
            "model/model.safetensors", "checkpoints/step-00000007/manifest.json", "tensorboard/events")  # fmt: skip
    for name in (*made, "note.txt"):
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("old")
    return folder


def files(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_new_folder_holds_the_whole_configuration(tmp_path):
    made = run(seed=5)
    start_folder(tmp_path / "a" / "b", made)
    assert set(files(tmp_path)) == {"a/b/run.json"}
    assert read_run(tmp_path / "a" / "b") == made
    assert json.loads((tmp_path / "a" / "b" / "run.json").read_text())["seed"] == 5


def test_an_empty_folder_will_do(tmp_path):
    start_folder(tmp_path, run())
    assert set(files(tmp_path)) == {"run.json"}


def test_a_run_is_kept_unless_it_is_to_be_overwritten(finished):
    before = files(finished)
    with pytest.raises(DataError, match="expected a new or empty folder, found a run; choose another, go on"):
        start_folder(finished, run(seed=2))
    assert files(finished) == before
    start_folder(finished, run(seed=2), overwrite=True)
    assert set(files(finished)) == {"run.json", "note.txt"}
    assert read_run(finished).seed == 2


def test_what_is_no_run_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="found files that are no run; choose another"):
            start_folder(tmp_path, run(), overwrite)
        with pytest.raises(DataError, match="expected a folder for the run, got a file"):
            start_folder(tmp_path / "file", run(), overwrite)
    assert files(tmp_path) == {"thesis.tex": "years of work", "file": "a file"}


def test_checking_makes_nothing(tmp_path, finished):
    check_folder(tmp_path / "new")
    check_folder(finished, overwrite=True)
    assert not (tmp_path / "new").exists()
    assert (finished / "result.json").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "expected a run, found no run.json"),
        (b"[" * 100_000, "expected a run's configuration, got maximum recursion depth"),
        (b"{", "run.json: expected a run's configuration, got"),
        (b"\xff", "run.json: expected a run's configuration, got"),
        (b"[]", "run.json: Run: expected an object"),
        (b"{}", "run.json: model: expected a value, got none"),
        (b'{"sead": 1}', "do you mean 'seed'?"),
        (b'{"init": "\\ud800"}', "run.json: init: expected text, got half of a surrogate pair in '\\ud800'; write it"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read_run(tmp_path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for owner, place in ((Path, "write_bytes"), (Path, "replace"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, place, full)
            with pytest.raises(OSError, match="No space left"):
                write_json(path, {"a": 2})
    assert files(tmp_path) == {"result.json": '{\n  "a": 1\n}\n'}


def test_the_tokenizer_is_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    bpe = ByteBPE.train(["to be or not to be"], 260)
    keep_tokenizer(tmp_path, bpe)
    before = files(tmp_path)
    assert set(before) == {"tokenizer.json"}
    assert ByteBPE.load(tmp_path).encode("to be") == bpe.encode("to be")

    def cut(self, folder):
        file = save(self, folder)
        file.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save = ByteBPE.save
    monkeypatch.setattr(ByteBPE, "save", cut)
    with pytest.raises(OSError, match="No space left"):
        keep_tokenizer(tmp_path, bpe)
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_where_nothing_can_be_written(tmp_path, monkeypatch):
    """A test that runs as root may write everywhere, so the answer of the system is given here."""
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path))
    for folder in (tmp_path / "locked", tmp_path / "locked" / "new" / "run"):
        with pytest.raises(DataError, match=r"expected a folder to write to, .*locked is read-only; choose another"):
            check_folder(folder)
    check_folder(tmp_path / "free" / "run")


def test_a_folder_that_is_only_claimed_is_empty(tmp_path):
    (tmp_path / LOCK).touch()
    check_folder(tmp_path)
    start_folder(tmp_path, run())


def test_a_folder_left_by_a_run_killed_before_it_began_is_empty(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", lambda *args, **options: None)  # a killed process clears nothing up
        with pytest.raises(KeyboardInterrupt):
            start_folder(tmp_path, run(seed=1))
    (tmp_path / LOCK).touch()
    assert set(files(tmp_path)) == {"run.json.partial", LOCK}
    start_folder(tmp_path, run(seed=2))
    assert set(files(tmp_path)) == {"run.json", LOCK}
    assert read_run(tmp_path).seed == 2


def test_a_folder_with_more_than_a_partial_file_is_left_alone(tmp_path):
    for name in ("run.json.partial", "thesis.tex"):
        (tmp_path / name).write_text("years of work")
    with pytest.raises(DataError, match="found files that are no run; choose another"):
        start_folder(tmp_path, run())


# comparing configurations


def test_differences_are_named_with_both_values():
    here = run(seed=1, optimizer=OptimizerConfig(qk_clip=None)).to_dict()
    there = run().to_dict()
    assert differences(here, here) == {}
    assert differences(here, there) == {"optimizer.qk_clip": (None, 100.0), "seed": (1, 0)}
    other = run(stages=(STAGES[0].replace(lr=0.5), STAGES[1])).to_dict()
    assert differences(other, there) == {"stages.0.lr": (0.5, 0.02)}
    assert list(differences(run(stages=STAGES[:1]).to_dict(), there)) == ["stages"]  # another number of them
    assert differences({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a.b": (1, None), "a.c": (None, 2)}


def test_differences_in_words():
    found = {"seed": (1, 0), "a.b": (None, 2), "c": ("x", "y"), "d": (1, 2), "e": (3, 4)}
    assert spell(dict(list(found.items())[:2])) == "seed=1 (there 0), a.b=None (there 2)"
    assert spell(found) == "seed=1 (there 0), a.b=None (there 2), c=x (there y) and 2 more"


def test_free_space_is_that_of_the_nearest_folder(tmp_path):
    assert free_space(tmp_path / "not" / "there") == free_space(tmp_path)
    assert free_space(tmp_path).endswith(" GB free")

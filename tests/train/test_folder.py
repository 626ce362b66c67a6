import json

import pytest

from perilune.core.errors import CheckpointError, DataError
from perilune.train.folder import check_folder, read_run, start_folder, write_json
from tiny_run import run


@pytest.fixture
def finished(tmp_path):
    """A folder as a run leaves it, with a note of its owner's."""
    folder = tmp_path / "runs" / "old"
    start_folder(folder, run(seed=1))
    for name in ("metrics.jsonl", "result.json", "note.txt", "model/config.json", "model/model.safetensors"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
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
    with pytest.raises(DataError, match="expected a new or empty folder, found a run; choose another, or add --over"):
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
        (b"{", "run.json: expected a run's configuration, got"),
        (b"\xff", "run.json: expected a run's configuration, got"),
        (b"[]", "run.json: Run: expected an object"),
        (b"{}", "run.json: model: expected a value, got none"),
        (b'{"sead": 1}', "do you mean 'seed'?"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read_run(tmp_path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert files(tmp_path) == {"result.json": '{\n  "a": 1\n}\n'}

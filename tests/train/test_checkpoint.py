"""What counts as a checkpoint, whatever happens while one is written."""

import errno
import json
import logging
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from perilune.core.errors import CheckpointError
from perilune.train import checkpoint, state
from perilune.train.checkpoint import Checkpoints, find_flaw
from tiny_run import run, trainer

pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")


def contents(text):
    """What writes a checkpoint of two files."""

    def write(folder):
        (folder / "a.txt").write_text(text)
        (folder / "b.txt").write_text(text * 1000)

    return write


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


@pytest.fixture
def two(tmp_path):
    """Checkpoints of steps 5 and 10."""
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 10):
        checkpoints.save(step, contents(f"{step}"))
    return checkpoints


# whole ones


def test_every_file_is_listed_with_its_checksum(two):
    path = two.last
    assert path == two.folder / "step-00000010"
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {"a.txt": 2, "b.txt": 2000}
    assert listed["a.txt"]["sha256"] == "4a44dc15364204a80fe80e9039455cc1608281820fe2b24f1e5233ade6af1dd5"  # of "10"
    assert find_flaw(path) is None


def test_the_newest_two_are_kept_and_the_older_go_last(two, tmp_path):
    (two.folder / "notes").mkdir()
    (two.folder / "step-00000003.partial").mkdir()

    def write(folder):
        assert {"step-00000005", "step-00000010", "step-00000015.partial"} <= set(names(two))
        contents("15")(folder)

    two.save(15, write)
    assert names(two) == ["notes", "step-00000010", "step-00000015"]
    assert Checkpoints(tmp_path).latest() == two.folder / "step-00000015"


def test_a_step_is_written_once(two):
    two.save(10, lambda folder: pytest.fail("it is there"))
    assert names(two) == ["step-00000005", "step-00000010"]


def test_steps_are_ordered_as_numbers(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (99_999_999, 100_000_000):
        checkpoints.save(step, contents("x"))
    assert Checkpoints(tmp_path).latest().name == "step-100000000"


def test_all_is_on_disk_before_it_counts(tmp_path, monkeypatch):
    """What a power cut needs: files, then the manifest, then the folder, then the name."""
    events = []
    monkeypatch.setattr(checkpoint, "sync", lambda path: events.append(path.name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append("renamed"), rename(self, to)))
    Checkpoints(tmp_path).save(1, contents("x"))
    assert events == ["a.txt", "b.txt", "manifest.json", "step-00000001.partial", "renamed", "checkpoints"]


# those that are not


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("a.txt", Path.unlink, "a.txt is missing"),
        ("b.txt", half, "b.txt has 1000 bytes of 2000"),
        ("b.txt", flip, "b.txt is not what was written"),
        ("b.txt", lambda path: (path.unlink(), path.mkdir()), "b.txt is missing"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        ("manifest.json", half, "manifest.json is damaged"),
        ("manifest.json", lambda path: path.write_bytes(b"\xff"), "manifest.json is damaged"),
        ("manifest.json", lambda path: path.write_text("[]"), "manifest.json is damaged"),
        ("manifest.json", lambda path: path.write_text('{"files": {"a.txt": 3}}'), "manifest.json is damaged"),
    ],
)
def test_a_damaged_one_is_passed_over_and_written_again(two, tmp_path, caplog, file, damage, reason):
    damage(two.last / file)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == checkpoints.last == two.folder / "step-00000005"
    (record,) = caplog.records
    assert record.getMessage() == f"{two.folder / 'step-00000010'}: passed over: {reason}"
    checkpoints.save(10, contents("again"))
    assert Checkpoints(tmp_path).latest() == two.last
    assert (two.last / "a.txt").read_text() == "again"
    assert names(two) == ["step-00000005", "step-00000010"]


def test_a_file_that_cannot_be_read_is_named(two, monkeypatch):
    def unreadable(file, method):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(two.last / "a.txt"))

    monkeypatch.setattr(checkpoint.hashlib, "file_digest", unreadable)
    assert find_flaw(two.last) == "a.txt cannot be read: Input/output error"


def test_one_that_was_never_finished_is_passed_over(two, tmp_path, caplog):
    shutil.copytree(two.last, two.folder / "step-00000015.partial")  # whole, but for its name
    assert Checkpoints(tmp_path).latest() == two.last
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "passed over: it was never finished"
    ]


def test_where_none_is_whole(two, tmp_path):
    for path in two.folder.iterdir():
        flip(path / "a.txt")
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path).latest()
    assert "expected a whole checkpoint, found none (step-00000010: a.txt is not what was written); copy" in str(
        error.value
    )


def test_before_the_first(tmp_path):
    assert Checkpoints(tmp_path).latest() is None
    (tmp_path / "checkpoints" / "step-00000001.partial").mkdir(parents=True)
    assert Checkpoints(tmp_path).latest() is None  # killed while the first was written


# what goes wrong while one is written


@pytest.mark.parametrize("place", ["write", "sync", "rename"])
def test_a_full_disk_leaves_the_last_one(two, tmp_path, monkeypatch, place):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "sync":
        monkeypatch.setattr(checkpoint, "sync", full)
    if place == "rename":
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(CheckpointError) as error:
        two.save(15, full if place == "write" else contents("15"))
    text = str(error.value)
    assert "expected to write the checkpoint of step 15, got No space left on device (" in text
    assert text.endswith(" GB free, step-00000010 is whole); make room")
    monkeypatch.undo()
    assert names(two) == ["step-00000005", "step-00000010"]
    assert two.latest() == two.folder / "step-00000010"
    two.save(15, contents("15"))
    assert names(two) == ["step-00000010", "step-00000015"]


def test_a_full_disk_before_the_first(tmp_path):
    def full(folder):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match=r"got I/O error: .* GB free, there is no older one\); make room$"):
        Checkpoints(tmp_path).save(1, full)
    assert Checkpoints(tmp_path).latest() is None


def test_an_interrupt_leaves_the_last_one(two):
    def interrupted(folder):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.save(15, interrupted)
    assert names(two) == ["step-00000005", "step-00000010"]


# the real contents, and the real system


@pytest.fixture(scope="module")
def trained():
    """A trainer after two steps."""
    made = trainer(run())
    for _ in range(2):
        made.step(made.feed.next())
    return made


def in_a_child(action):
    """Exit code of a forked process that does `action`."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("limit", [100, 5_000, 100_000, 200_000])
def test_the_system_refuses_to_write(trained, tmp_path, limit):
    """A limit on the size of files stands in for a full disk: the first bytes are written, the rest is not."""
    checkpoints = Checkpoints(tmp_path)
    trained.checkpoint(checkpoints)

    def save():
        logging.disable()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            checkpoints.save(3, lambda folder: state.write(trained, folder))
        except CheckpointError as error:
            said = "expected to write the checkpoint of step 3, got" in str(error) and "File too large" in str(error)
            os._exit(7 if said else 8)

    assert in_a_child(save) == 7
    assert names(checkpoints) == ["step-00000002"]
    assert Checkpoints(tmp_path).latest() == checkpoints.last


WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def test_death_before_any_change_on_disk_leaves_a_whole_one(trained, tmp_path):
    """A process dies before its first, second, ... change to the file system until one is saved undisturbed."""

    def save_until(change):
        left = change

        def count(event, args):
            nonlocal left
            if event in WRITES and str(tmp_path) in str(args[0]) and (event != "open" or "w" in str(args[1])):
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(count)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.latest()
        checkpoints.save(3, lambda folder: state.write(trained, folder))

    found = []
    for change in range(1, 100):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        checkpoints = Checkpoints(tmp_path)
        for step in (1, 2):
            checkpoints.save(step, lambda folder: state.write(trained, folder))
        (checkpoints.folder / "step-00000003.partial").mkdir()  # from a death before
        code = in_a_child(lambda change=change: save_until(change))
        after = Checkpoints(tmp_path)
        newest = after.latest()
        found.append(newest.name)
        after.save(4, lambda folder: state.write(trained, folder))
        assert names(after) == [newest.name, "step-00000004"]
        if code == 0:
            break
        assert code == 9
    else:
        pytest.fail("it never came to an end")
    before, since = found.count("step-00000002"), found.count("step-00000003")
    assert before + since == len(found) >= 15
    assert found == ["step-00000002"] * before + ["step-00000003"] * since
    assert since >= 3  # also deaths while older ones are removed


@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_death_inside_a_file_of_tensors(trained, tmp_path, monkeypatch, file, share):
    """The part of a file that was written before the process died counts for nothing."""
    checkpoints = Checkpoints(tmp_path)
    trained.checkpoint(checkpoints)

    def dying(tensors, path, **options):
        save(tensors, path, **options)
        if Path(path).name == file:
            os.truncate(path, int(share * os.path.getsize(path)))
            os._exit(9)

    save = state.save_file
    monkeypatch.setattr(state, "save_file", dying)
    monkeypatch.setattr("perilune.models.k3.convert.save_file", dying)
    assert in_a_child(lambda: checkpoints.save(3, lambda folder: state.write(trained, folder))) == 9
    monkeypatch.undo()
    assert "step-00000003.partial" in names(checkpoints)
    assert Checkpoints(tmp_path).latest() == checkpoints.last
    checkpoints.save(3, lambda folder: state.write(trained, folder))
    assert Checkpoints(tmp_path).latest().name == "step-00000003"
    assert names(checkpoints) == ["step-00000002", "step-00000003"]


def test_what_lies_in_it_is_safetensors_and_json(trained, tmp_path):
    path = Checkpoints(tmp_path).save(2, lambda folder: state.write(trained, folder))
    assert {p.name for p in path.iterdir()} == {
        "config.json", "manifest.json", "model.safetensors", "tokenizer.json", "training.json", "training.safetensors",
    }  # fmt: skip
    with safe_open(path / "training.safetensors", framework="pt") as tensors:
        kinds = {name.split("/")[0] for name in tensors.keys()}  # noqa: SIM118
    assert kinds == {"optimizer", "balancer", "loads", "random"}
    values = json.loads((path / "training.json").read_text())
    assert (values["step"], values["tokens"], values["stage"]) == (2, 192, "short")
    assert set(values) == {"format", "written_by", "step", "tokens", "stage", "feed", "guard", "run"}

import fcntl
import os
import signal

import pytest

from perilune.core.errors import DataError
from perilune.train.folder import LOCK
from perilune.train.lock import check_unclaimed, claimed

pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")


@pytest.fixture
def elsewhere(tmp_path):
    """Another process that has claimed the folder: its id."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with claimed(tmp_path):
            os.write(writer, b".")
            signal.pause()
    os.read(reader, 1)
    yield child
    os.close(reader)
    os.close(writer)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_another_process_is_named(elsewhere, tmp_path):
    for refuse in (check_unclaimed, lambda folder: claimed(folder).__enter__()):
        with pytest.raises(DataError) as error:
            refuse(tmp_path)
        assert f"expected no process at work there, found {elsewhere}; wait for it to end" in str(error.value)


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    child = os.fork()
    if child == 0:
        with claimed(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).read_text() == f"{child}\n"  # it had no time to tidy up
    check_unclaimed(tmp_path)
    with claimed(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_claim_makes_the_folder_and_leaves_nothing_behind(tmp_path):
    with claimed(tmp_path / "a" / "run"):
        assert (tmp_path / "a" / "run" / LOCK).exists()
    assert list((tmp_path / "a" / "run").iterdir()) == []
    check_unclaimed(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_file_removed_between_opening_and_locking_is_not_the_lock(tmp_path, monkeypatch):
    """Its holder ends just then: what this process has locked has no name, and another could lock a new file."""
    calls = []

    def late(file, mode):
        calls.append(mode)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        flock(file, mode)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", late)
    with claimed(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"

import errno
import json

import pytest

from perilune.train.metrics import Metrics

WHOLE = b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_lines_are_on_file_at_once_and_added_to(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with Metrics(path) as metrics:
            metrics.write(step=step, loss=0.1 + 0.2)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": 0.1 + 0.2}]  # to the last bit


@pytest.mark.parametrize(
    ("content", "after", "left"),
    [
        (WHOLE, 3, WHOLE),
        (WHOLE, 2, WHOLE[:24]),
        (WHOLE, 0, b""),
        (WHOLE + b'{"step": 4, "lo', 3, WHOLE),  # half written
        (WHOLE + b'{"step": 3}', 3, WHOLE),  # whole but for its end
        (WHOLE[:-1], 3, WHOLE[:24]),
        (WHOLE + b"\x00\x00\x00", 3, WHOLE),  # what a power cut leaves
        (WHOLE + b"[1]\n\xff\n3\n{}\n", 3, WHOLE),
        (b"", 3, b""),
    ],
)
def test_lines_after_a_step_are_cut_off(tmp_path, content, after, left):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with Metrics(path, after=after) as metrics:
        assert path.read_bytes() == left
        metrics.write(step=9)
        metrics.sync()
    assert path.read_bytes() == left + b'{"step": 9}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_nothing_is_cut_from_what_is_not_there(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl", after=5):
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_full_disk_while_cutting_keeps_the_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE)

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("perilune.train.folder.sync", full)
    with pytest.raises(OSError, match="No space left"):
        Metrics(path, after=1)
    assert path.read_bytes() == WHOLE

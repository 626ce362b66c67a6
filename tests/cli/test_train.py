"""Runs that stop, go on, branch off and fail, from the command line.  What judges a model in the end is left out."""

import errno
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError

from perilune.cli import progress, result
from perilune.cli import train as verb
from perilune.cli.interrupt import Interrupt
from perilune.cli.main import main
from perilune.cli.train import find_device
from perilune.core.errors import ConfigError
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import convert
from perilune.train import loop
from perilune.train.config import Stage
from perilune.train.folder import LOCK, read_run, write_json
from perilune.train.loop import Trainer
from perilune.train.metrics import Metrics
from tiny_run import OVERRIDES, write_corpus

pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
FINISH = verb.finish
SMALL = [*OVERRIDES, "stages.0.tokens=480", "stages.1.tokens=288", "checkpoint_every=2"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Relative paths lead nowhere else, a finished run is not judged, and what `--debug` shows ends with its test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "finish", lambda session: write_json(session.folder / "result.json", {}))
    monkeypatch.setattr(verb, "command", lambda: "perilune")
    logger = logging.getLogger("perilune")
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def nano(texts):
    """The words of a run of 8 steps, with a checkpoint at every second and where a stage ends, at 5 and 8."""
    return ["train", "nano", f"data.sources.text.path={texts}", *SMALL]


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """What a run says that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "finish", lambda session: None)
        words = ["train", "nano", f"data.sources.text.path={texts}", *SMALL]
        assert main([*words, "--out", str(folder)]) == 0
    return folder


def at_step(monkeypatch, step, action):
    """`action` is done in the middle of that step of the next run in this process."""
    plain = Trainer.step

    def acting(self, batch):
        if self.steps_done + 1 == step:
            action()
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "step", acting)


def asks(*numbers):
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


@pytest.fixture(scope="module")
def stopped_once(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 3, asks(signal.SIGTERM))
        assert main(["train", "nano", f"data.sources.text.path={texts}", *SMALL, "--out", str(folder)]) == 143
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path, capsys):
    """A run in the folder `run` that was stopped after step 3."""
    shutil.copytree(stopped_once, tmp_path / "run")
    capsys.readouterr()
    return Path("run")


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def lines(folder, name="metrics.jsonl"):
    return [{**json.loads(line), "seconds": None} for line in (folder / name).read_text().splitlines()]


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def is_whole(folder, whole):
    """Whether all that the run left is what it would have left undisturbed."""
    end = Path("checkpoints") / "step-00000008" / "model.safetensors"
    return (
        lines(folder) == lines(whole)
        and (folder / "snapshots.jsonl").read_bytes() == (whole / "snapshots.jsonl").read_bytes()
        and (folder / end).read_bytes() == (whole / end).read_bytes()
    )


def refused(capsys, *words) -> str:
    """The one line with which the command refuses."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("perilune train: ")
    return err.removeprefix("perilune train: ").rstrip()


def test_a_folder_whose_name_is_no_text(tmp_path, capsys, monkeypatch):
    """Before anything is made there: the configuration could not be read again."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    line = refused(capsys, "train", "nano", "data.sources.text.path=texts")
    assert line.startswith("data.sources.text.path: expected text, got half of a surrogate pair in '/")
    assert list(folder.iterdir()) == []


# stopping and going on


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_to_stop_can_go_on(nano, whole, capfd, monkeypatch, number, code):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        at_step(patch, 3, asks(number))
        assert main([*nano, "--out", "run"]) == code
    out, err = capfd.readouterr()
    assert "stopped after step 3 of 8; go on with: perilune train --resume run\n" in out
    assert err == "\nstopping after this step; once more stops at once\n"
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert checkpoints(Path("run")) == ["step-00000002", "step-00000003"]
    assert set(os.listdir("run")) == {
        "checkpoints", "metrics.jsonl", "run.json", "snapshots.jsonl", "tokenizer.json",
    }  # fmt: skip
    assert main(["train", "--resume", "run"]) == 0
    assert "going on after step 3 of 8" in capfd.readouterr().out
    assert is_whole(Path("run"), whole)
    assert checkpoints(Path("run")) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize(
    ("numbers", "code"), [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGINT, signal.SIGTERM), 143)]
)
def test_a_second_signal_stops_at_once(nano, whole, monkeypatch, numbers, code):
    with monkeypatch.context() as patch:
        at_step(patch, 3, asks(*numbers))
        assert main([*nano, "--out", "run"]) == code
    assert len(lines(Path("run"))) == 2
    assert checkpoints(Path("run")) == ["step-00000002"]
    assert main(["train", "--resume", "run"]) == 0
    assert is_whole(Path("run"), whole)


def test_a_stop_at_the_last_step_leaves_the_judging(nano, whole, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 8, asks(signal.SIGINT))
        assert main([*nano, "--out", "run"]) == 130
    assert not Path("run/result.json").exists()
    assert "stopped after step 8 of 8" in capsys.readouterr().out
    assert main(["train", "--resume", "run"]) == 0
    assert Path("run/result.json").exists()
    assert is_whole(Path("run"), whole)


def test_signals_are_let_through_outside_the_block():
    with Interrupt() as interrupt:
        assert not interrupt.asked
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_finished_run_says_so_and_is_left_alone(stopped, capsys):
    assert main(["train", "--resume", "run"]) == 0
    before = files(stopped)
    capsys.readouterr()
    assert main(["train", "--resume", "run"]) == 0
    assert capsys.readouterr().out == "run: finished; nothing is left to do\n"
    assert files(stopped) == before


def test_a_run_that_was_not_judged_is_judged(stopped, monkeypatch, texts):
    """Killed after the last step: no step is done again, the model is kept and judged."""
    killed = KeyboardInterrupt()
    monkeypatch.setattr(verb, "finish", lambda session: (_ for _ in ()).throw(killed))
    assert main(["train", "--resume", "run"]) == 130
    monkeypatch.setattr(verb, "finish", FINISH)
    monkeypatch.setattr(result, "judge", lambda trainer, model, folder, console: {
        "bits_per_byte": {"perilune": 1.5}, "expert_load": trainer.expert_load(), "samples": [],
    })  # fmt: skip
    monkeypatch.setattr(result, "show_result", lambda verdict, console: None)
    monkeypatch.setattr(Trainer, "step", lambda self, batch: pytest.fail("all steps are done"))
    assert main(["train", "--resume", "run"]) == 0
    assert json.loads(Path("run/result.json").read_text())["bits_per_byte"] == {"perilune": 1.5}
    assert Path("run/model/config.json").exists()
    assert Path("run/report.html").exists()


def test_a_copy_goes_on_elsewhere(stopped, whole, tmp_path, monkeypatch):
    shutil.copytree(stopped, tmp_path / "other" / "place")
    shutil.rmtree(stopped)
    monkeypatch.chdir(tmp_path / "other")
    assert main(["train", "--resume", "place"]) == 0
    assert is_whole(Path("place"), whole)


def test_the_tokenizer_is_never_trained_anew(stopped, whole, monkeypatch):
    monkeypatch.setattr(ByteBPE, "train", lambda *args: pytest.fail("it is there"))
    assert main(["train", "--resume", "run"]) == 0
    assert is_whole(stopped, whole)


def test_before_the_first_checkpoint_a_run_begins_again(nano, whole, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 2, asks(signal.SIGINT, signal.SIGINT))
        assert main([*nano, "--out", "run"]) == 130
    assert not Path("run/checkpoints").exists()
    with monkeypatch.context() as patch:
        patch.setattr(ByteBPE, "train", lambda *args: pytest.fail("it is there"))
        assert main(["train", "--resume", "run"]) == 0
    assert is_whole(Path("run"), whole)


def test_before_the_tokenizer_too(nano, whole, monkeypatch):
    def killed(folder, tokenizer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("perilune.train.folder.keep_tokenizer", killed)
        assert main([*nano, "--out", "run"]) == 130
    assert os.listdir("run") == ["run.json"]
    assert main(["train", "--resume", "run"]) == 0
    assert is_whole(Path("run"), whole)


@pytest.mark.parametrize(("step", "after"), [(3, 2), (2, 3)])
def test_a_damaged_checkpoint_is_passed_over(stopped, whole, capsys, caplog, step, after):
    path = stopped / "checkpoints" / f"step-{step:08}"
    (path / "model.safetensors").write_bytes(b"x")
    assert main(["train", "--resume", "run"]) == 0
    said = [record.getMessage() for record in caplog.records]
    assert [text.rstrip("0123456789") for text in said] == [
        f"{path}: passed over: model.safetensors has 1 bytes of "
    ] * (step == 3)
    assert f"going on after step {after} of 8" in capsys.readouterr().out
    assert is_whole(stopped, whole)


def test_where_no_checkpoint_is_whole_nothing_is_lost(stopped, capsys):
    for path in stopped.glob("checkpoints/*/manifest.json"):
        path.unlink()
    before = files(stopped)
    line = refused(capsys, "train", "--resume", "run")
    assert line.startswith("run/checkpoints: expected a whole checkpoint, found none (step-00000003: manifest.json is ")
    assert files(stopped) == before


# what may change


def test_the_same_recipe_may_be_given_again(stopped, nano, whole):
    assert main([*nano, "--resume", "run"]) == 0
    assert is_whole(stopped, whole)


def test_how_often_checkpoints_are_made_may_change(stopped, whole):
    assert main(["train", "--resume", "run", "checkpoint_every=7"]) == 0
    assert checkpoints(stopped) == ["step-00000007", "step-00000008"]
    assert read_run(stopped).checkpoint_every == 7
    assert lines(stopped) == lines(whole)


def test_what_of_a_step_is_kept_may_change(stopped, whole):
    """Recomputed, to the same bits; one part of a step as large as the step is the step."""
    changes = ["stages.0.recompute=layers", "stages.1.recompute=blocks", "stages.1.micro_tokens=96"]
    assert main(["train", "--resume", "run", *changes]) == 0
    assert [stage.recompute for stage in read_run(stopped).stages] == ["layers", "blocks"]
    assert lines(stopped) == lines(whole)


def test_the_text_may_lie_elsewhere_if_it_is_the_same(stopped, whole, texts, tmp_path, capsys):
    shutil.copytree(texts, tmp_path / "moved")
    (tmp_path / "moved" / "03.txt").write_text("another text\n" * 40)
    before = files(stopped)
    line = refused(capsys, "train", "--resume", "run", "data.sources.text.path=moved")
    assert "as when saved, got" in line
    assert files(stopped) == before
    shutil.copyfile(texts / "03.txt", tmp_path / "moved" / "03.txt")
    assert main(["train", "--resume", "run", "data.sources.text.path=moved"]) == 0
    assert read_run(stopped).data.sources["text"].path == str(tmp_path / "moved")
    assert is_whole(stopped, whole)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["seed=1"], "seed=1 (there 0)"),
        (["stages.1.lr=0.5", "seed=1"], "stages.1.lr=0.5 (there 0.008), seed=1 (there 0)"),
        (["model.num_experts_per_token=3"], "model.num_experts_per_token=3 (there 2)"),
        (["load_window=9"], "load_window=9 (there 50)"),
        (["optimizer.qk_clip=null"], "optimizer.qk_clip=None (there 100.0)"),
    ],
)
def test_anything_else_is_refused(stopped, nano, capsys, changes, named):
    before = files(stopped)
    for words in (["train", "--resume", "run", *changes], [*nano, *changes, "--resume", "run"]):
        line = refused(capsys, *words)
        assert line.startswith(f"run: expected the run's own configuration, got {named}; leave that out")
    assert files(stopped) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--resume nowhere", "nowhere: expected a run, found no run.json"),
        ("--resume texts.txt", "texts.txt: expected a run, found no run.json"),
        ("nano --resume nowhere", "nowhere: expected a run, found no run.json"),
        ("--resume run/checkpoints/step-7 --out x", "run/checkpoints/step-7: expected a whole checkpoint, but mani"),
        ("--resume run sead=1", "sead: unknown key 'sead'; do you mean 'seed'?"),
        ("nanoo --resume run", "there is none called 'nanoo'; do you mean 'nano'?"),
        ("nano --resume run", "run: expected the run's own configuration, got model.hidden_size=128 (there 32)"),
        ("--device gpu nano", "argument --device: expected auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("--resume run --out run/metrics.jsonl", "run/metrics.jsonl: expected a folder for the run, got a file"),
        ("", "the following arguments are required: recipe; see perilune train --help"),
    ],
)
def test_a_wrong_call_changes_nothing(stopped, capsys, words, expected):
    Path("texts.txt").write_text("text")
    before = files(Path())
    assert expected in refused(capsys, "train", *words.split())
    assert files(Path()) == before


def test_a_checkpoint_is_a_model_to_talk_to(stopped, capsys):
    path = str(stopped / "checkpoints" / "step-00000003")
    assert main(["generate", path, "--prompt", "def ", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_the_configuration_that_goes_on_is_printed(stopped, capsys):
    assert main(["train", "--resume", "run", "--print"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((stopped / "run.json").read_text())


# branching off


def test_a_run_branches_off_at_other_rates(stopped, whole, capsys):
    before = files(stopped)
    changes = ["stages.0.lr=1e-3", "stages.1.lr=5e-4", "optimizer.weight_decay=0.2"]
    assert main(["train", "--resume", "run", *changes, "--out", "lower"]) == 0
    assert files(stopped) == before
    said = lines(Path("lower"))
    assert said[:3] == lines(whole)[:3]
    assert [line["step"] for line in said] == list(range(1, 9))
    made = read_run(Path("lower"))
    assert made == read_run(stopped).override(changes)
    assert [line["lr"] for line in said[3:]] == [made.schedule.lr(line["tokens"]) for line in said[3:]]
    assert said[3]["losses"] == lines(whole)[3]["losses"]  # the same weights on the same batch
    assert said[4]["losses"] != lines(whole)[4]["losses"]
    assert (Path("lower") / "tokenizer.json").read_bytes() == (stopped / "tokenizer.json").read_bytes()
    assert "going on after step 3 of 8" in capsys.readouterr().out


def test_a_branch_without_changes_is_the_run_itself(stopped, whole):
    assert main(["train", "--resume", "run", "--out", "copy"]) == 0
    assert is_whole(Path("copy"), whole)


def test_a_branch_can_go_on_at_once(stopped, monkeypatch):
    """It is a run from its first moment, and no run before that."""
    with monkeypatch.context() as patch:
        patch.setattr("perilune.train.folder.copy_past", raising(KeyboardInterrupt()))
        assert main(["train", "--resume", "run", "--out", "early"]) == 130
    assert not Path("early/run.json").exists()
    with monkeypatch.context() as patch:
        at_step(patch, 4, asks(signal.SIGINT, signal.SIGINT))
        assert main(["train", "--resume", "run", "stages.0.lr=1e-3", "--out", "copy"]) == 130
    assert checkpoints(Path("copy")) == ["step-00000003"]
    assert main(["train", "--resume", "copy"]) == 0
    assert len(lines(Path("copy"))) == 8


def test_a_branch_from_an_older_checkpoint(stopped, whole, capsys):
    """What saves a run whose newest checkpoint was made when it had begun to diverge."""
    path = stopped / "checkpoints" / "step-00000002"
    line = refused(capsys, "train", "--resume", path)
    assert line == f"--resume: expected a run to go on in, got a checkpoint, {path}; add --out FOLDER"
    assert main(["train", "--resume", str(path), "stages.0.lr=1e-3", "--out", "older"]) == 0
    said = lines(Path("older"))
    assert said[:2] == lines(whole)[:2]
    assert said[2]["lr"] != lines(whole)[2]["lr"]
    assert [line["step"] for line in said] == list(range(1, 9))
    (path / "model.safetensors").unlink()
    line = refused(capsys, "train", "--resume", path, "--out", "copy")
    assert line == f"{path}: expected a whole checkpoint, but model.safetensors is missing; choose another"


def test_nothing_is_overwritten_by_going_on(stopped, capsys):
    for extra in ([], ["--out", "./run"]):
        line = refused(capsys, "train", "--resume", "run", "--overwrite", *extra)
        assert line.startswith("--overwrite: expected ")
    assert (stopped / "checkpoints").exists()


def test_what_a_branch_refuses(stopped, capsys):
    line = refused(capsys, "train", "--resume", "run", "seed=1", "--out", "copy")
    assert "expected a checkpoint of this run, got one with seed=1 (there 0); only rates, " in line
    assert not Path("copy").exists()
    for place in ("run/checkpoints/step-00000002", "run/checkpoints/step-00000003"):
        line = refused(capsys, "train", "--resume", place, "--out", "./run", "--overwrite")
        assert line == "--out: expected a folder for the copy, got the run's own, run; choose another"
    Path("other").mkdir()
    Path("other/thesis.tex").write_text("kept")
    assert "found files that are no run" in refused(capsys, "train", "--resume", "run", "--out", "other")
    shutil.rmtree(stopped / "checkpoints")
    assert "run: expected a checkpoint to go on from" in refused(capsys, "train", "--resume", "run", "--out", "copy")


# failures


def test_a_run_that_diverges_says_how_to_go_on_and_that_works(nano, capsys):
    line = refused(capsys, *nano, "checkpoint_every=5", "stages.1.lr=1e30", "--out", "run")
    assert line.startswith("loss: expected a number, got nan at step 7 (stage long, tokens 576 to 672); lower the")
    advice = "run/checkpoints/step-00000005 is whole, from there in a copy: perilune train --resume run "
    assert line.endswith(f"{advice}stages.1.lr=5e+29 --out run-lower")
    assert checkpoints(Path("run")) == ["step-00000005"]
    assert len(lines(Path("run"))) == 6
    before = files(Path("run"))
    again = refused(capsys, "train", "--resume", "run")  # the same step ends in the same way
    assert again == line
    assert files(Path("run")).keys() == before.keys()
    words = shlex.split(line.partition("perilune ")[2].replace("5e+29", "5e-3"))
    assert main(words) == 0
    assert [step["step"] for step in lines(Path("run-lower"))] == list(range(1, 9))


def test_a_run_that_diverges_before_its_first_checkpoint(nano, capsys):
    line = refused(capsys, *nano, "stages.0.lr=1e30", "--out", "run")
    assert line.endswith("lower the learning rate: there is no checkpoint yet, begin anew")


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_a_disk_that_fills_up_while_a_line_is_written(nano, whole, capsys, monkeypatch):
    def half(self, **values):
        if values["step"] == 5:
            self._file.write('{"step": 5, "lo')
            self._file.flush()
            raise FULL
        write(self, **values)

    write = Metrics.write
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", half)
        line = refused(capsys, *nano, "--out", "run")
    assert re.fullmatch(
        r"run: No space left on device \([\d.,]+ GB free\); mend that, then: perilune train --resume run", line
    )
    assert checkpoints(Path("run")) == ["step-00000002", "step-00000004"]
    assert main(["train", "--resume", "run"]) == 0
    assert is_whole(Path("run"), whole)


def test_a_disk_that_fills_up_while_a_checkpoint_is_written(nano, whole, capsys, monkeypatch):
    saves = []

    def third(tensors, path, **options):
        saves.append(path)
        if len(saves) == 3:
            Path(path).write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path, **options)

    save = convert.save_file
    with monkeypatch.context() as patch:
        patch.setattr(convert, "save_file", third)
        line = refused(capsys, *nano, "--out", "run")
    assert "run/checkpoints: expected to write the checkpoint of step 5, got I/O error: No space left on device" in line
    assert line.endswith("GB free, step-00000004 is whole); make room, then: perilune train --resume run")
    assert checkpoints(Path("run")) == ["step-00000002", "step-00000004"]
    assert main(["train", "--resume", "run"]) == 0
    assert is_whole(Path("run"), whole)


def test_a_disk_that_fills_up_while_a_snapshot_is_written(nano, whole, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(verb, "take_snapshot", raising(FULL))
        assert "No space left on device" in refused(capsys, *nano, "--out", "run")
    assert checkpoints(Path("run")) == ["step-00000002", "step-00000004"]
    assert main(["train", "--resume", "run"]) == 0
    assert is_whole(Path("run"), whole)


def test_a_disk_that_fills_up_while_the_model_is_kept(nano, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(verb, "finish", FINISH)
        patch.setattr(Trainer, "save", raising(FULL))
        assert "then: perilune train --resume run" in refused(capsys, *nano, "--out", "run")
    assert not Path("run/result.json").exists()
    assert main(["train", "--resume", "run"]) == 0
    assert Path("run/result.json").exists()


def test_a_snapshot_is_not_written_twice(nano, whole, monkeypatch):
    """Killed between a stage's snapshot and its checkpoint, and right after the checkpoint."""
    for step in (5, 6):
        shutil.rmtree("run", ignore_errors=True)
        with monkeypatch.context() as patch:
            if step == 5:
                patch.setattr(loop.Checkpoints, "save", killing(loop.Checkpoints.save, 5))
            else:
                at_step(patch, 6, asks(signal.SIGINT, signal.SIGINT))
            assert main([*nano, "--out", "run"]) == 130
        assert len(lines(Path("run"), "snapshots.jsonl")) == 1
        assert main(["train", "--resume", "run"]) == 0
        assert is_whole(Path("run"), whole)


def killing(save, at):
    def wrapped(self, step, write):
        if step == at:
            raise KeyboardInterrupt
        return save(self, step, write)

    return wrapped


def test_two_processes_do_not_train_in_one_folder(stopped, nano, capsys):
    before = files(stopped)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with verb_claim(stopped):
            os.write(writer, b".")
            signal.pause()
    os.read(reader, 1)
    try:
        for words in (["train", "--resume", "run"], [*nano, "--out", "run", "--overwrite"]):
            line = refused(capsys, *words)
            assert line.startswith(f"run: expected no process at work there, found {child}; wait for it to end or")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    assert {name: content for name, content in files(stopped).items() if name != LOCK} == before
    assert main(["train", "--resume", "run"]) == 0
    assert not (stopped / LOCK).exists()


def verb_claim(folder):
    from perilune.train.lock import claimed

    return claimed(folder)


def test_a_folder_that_cannot_be_written_to(stopped, nano, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: "run" not in str(path))
    monkeypatch.setattr(loop, "Trainer", raising(AssertionError("nothing is read in vain")))
    for words in (["train", "--resume", "run"], [*nano, "--out", "run/below"]):
        assert "expected a folder to write to, " in refused(capsys, *words)


# a run from another


def test_a_run_starts_from_another(whole, nano, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteBPE, "train", lambda *args: pytest.fail("it comes from there"))
    shutil.copytree(whole, "first")
    assert main([*nano, "init=first", "--out", "second"]) == 0
    assert read_run(Path("second")).init == str(tmp_path / "first")
    first, second = lines(whole), lines(Path("second"))
    assert [line["step"] for line in second] == list(range(1, 9))
    assert second[0]["losses"]["next_token"] < first[0]["losses"]["next_token"] - 0.5  # it knows something already
    shutil.rmtree("first")
    Path("second/result.json").unlink()
    assert main(["train", "--resume", "second"]) == 0  # needs it no more


def test_what_a_run_cannot_start_from(whole, nano, capsys):
    assert "expected a run or a model to start from, found neither" in refused(capsys, *nano, "init=nowhere")
    line = refused(capsys, *nano, f"init={whole}", "model.v_head_dim=8", "model.attn_res_block_size=null")
    assert "init: expected the model of " in line
    assert "got v_head_dim=8 (there 6), attn_res_block_size=None (there 2); give both the same configuration" in line
    assert not Path("runs").exists()


# what is shown


def test_the_time_left_is_judged_by_the_steps_since_the_start(monkeypatch):
    """A run of 100 steps goes on after 60 of them; each takes two seconds."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    stage = Stage(name="long", context=8, batch_tokens=64, tokens=6400, lr=1e-3, lr_end=0.0)
    with progress.watching(
        console, SimpleNamespace(steps=100, steps_done=60, guard=SimpleNamespace(skipped=0))
    ) as watch:
        for step in range(61, 101):
            now[0] += 2
            watch(SimpleNamespace(
                stage=stage, stage_number=2, stages=3, step=step, steps=100, losses={"next_token": 2.5}, seconds=2.0,
                skipped=None,
            ))  # fmt: skip
    shown = console.file.getvalue().splitlines()
    assert shown[0] == "step 68/100  stage 2/3 long  loss 2.500  32 tokens/s  1.1 min left"  # 32 steps
    assert [line.split()[1] for line in shown] == ["68/100", "76/100", "84/100", "92/100", "100/100"]
    assert shown[-1].endswith("0.0 min left")


def test_a_bar_begins_where_the_run_goes_on():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with progress.watching(console, SimpleNamespace(steps=100, steps_done=60)):
        pass
    assert "60/100" in console.file.getvalue()


# devices, and TensorBoard


@pytest.mark.parametrize(
    ("name", "count", "device"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda:0"), ("cpu", 2, "cpu"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_a_device_is_made_definite(monkeypatch, name, count, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert find_device(name) == device


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there(monkeypatch, name, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(
        ConfigError, match=f"--device: expected one of {count} GPUs, got {name}; choose another, or cpu"
    ):
        find_device(name)


def test_a_run_on_a_named_device(nano, whole):
    assert main([*nano, "--device", "cpu", "--out", "run"]) == 0
    assert is_whole(Path("run"), whole)


def test_tensorboard_gets_what_the_metrics_get(nano, whole, monkeypatch):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with monkeypatch.context() as patch:
        at_step(patch, 4, asks(signal.SIGINT, signal.SIGINT))  # the third step comes again, after the second
        assert main([*nano, "--out", "run", "--tensorboard"]) == 130
    assert main(["train", "--resume", "run", "--tensorboard"]) == 0
    assert is_whole(Path("run"), whole)
    events = reading.EventAccumulator("run/tensorboard")
    events.Reload()
    losses = {f"loss/{name}" for name in lines(whole)[0]["losses"]}
    others = {"lr", "grad_norm", "gini", "max_violation", "dead", "tokens", "step", "seconds"}
    others |= {"worst_dead", "bias_drift"}
    assert set(events.Tags()["scalars"]) == losses | others
    for tag, value in (("loss/next_token", lambda line: line["losses"]["next_token"]), ("lr", lambda line: line["lr"])):
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(1, 9))
        assert [scalar.value for scalar in scalars] == pytest.approx([value(line) for line in lines(whole)], rel=1e-6)


def test_without_tensorboard_a_line_says_so(nano, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    line = refused(capsys, *nano, "--out", "run", "--tensorboard")
    assert line == "tensorboard: expected the package, found none; pip install 'perilune[tensorboard]'"
    assert not Path("run").exists()

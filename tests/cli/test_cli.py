"""The command line as a newcomer meets it: quick help, one line for every mistake, nothing half-written."""

import errno
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from safetensors import SafetensorError

from perilune import __version__
from perilune.bench import runner
from perilune.bench.case import Candidate, Case, Gate
from perilune.cli import doctor, plan
from perilune.cli import eval as eval_verb
from perilune.cli.main import VERBS, main, one_line
from perilune.cli.numbers import human
from perilune.cli.progress import Smoothed
from perilune.core.backends import Backends
from perilune.data.source import open_source
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model, convert, presets
from perilune.train import loop
from perilune.train.folder import read_run
from tiny_run import OVERRIDES, write_corpus

PERILUNE = Path(sys.executable).with_name("perilune")
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
CHECKPOINT = (
    "config.json", "manifest.json", "model.safetensors", "tokenizer.json", "training.json", "training.safetensors",
)  # fmt: skip
BEGUN = {"run.json", "metrics.jsonl", "snapshots.jsonl", "tokenizer.json"}
FEW = ["stages.0.tokens=192", "stages.1.tokens=96"]  # three steps


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Relative paths lead nowhere else, tables are wide enough, and what `--debug` shows ends with its test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    logger = logging.getLogger("perilune")
    monkeypatch.setattr(logger, "handlers", [])
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def nano(texts):
    """The words that train a very small model on very little text."""
    return ["train", "nano", f"data.sources.text.path={texts}", *OVERRIDES]


@pytest.fixture(scope="session")
def finished(nano, tmp_path_factory):
    """A run that went well, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with redirect_stdout(io.StringIO()) as printed:
        assert main([*nano, "--out", str(folder)]) == 0
    return folder, printed.getvalue()


@pytest.fixture
def run_copy(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def refused(capsys, *words) -> str:
    """The one line with which the command refuses."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("perilune")
    return err


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# help


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS)], ids=lambda words: " ".join(words) or "perilune")
def test_help_is_quick(words):
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([PERILUNE, *words, "--help"], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
    assert done.stdout.startswith("usage: perilune")
    assert done.stderr == ""
    assert min(seconds) < 0.5


def test_help_needs_no_torch():
    lines = [["--help"], [], ["--version"], *([verb, "--help"] for verb in VERBS), ["train", "nano", "--print"]]
    code = (
        f"import sys; from perilune.cli.main import main; print([main(words) for words in {lines}], "
        "[m for m in ('torch', 'numpy', 'safetensors', 'tokenizers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[0] * len(lines)} []"


def test_help_lists_every_verb(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert all(verb in out and line in out for verb, line in VERBS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"perilune {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_says_what_it_does(verb, capsys):
    assert main([verb, "--help"]) == main(["--help", verb]) == 0
    out = capsys.readouterr().out
    assert f"usage: perilune {verb}" in out
    assert "--debug" in out


# what is not understood


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trian", "perilune: there is no verb 'trian'; do you mean 'train'?"),
        ("frobnicate", "perilune: there is no verb 'frobnicate'; there are "),
        ("--nonsense", "perilune: unrecognized arguments: --nonsense; see perilune --help"),
        ("train", "perilune train: the following arguments are required: recipe; see perilune train --help"),
        ("train nanoo", "perilune train: recipe: there is none called 'nanoo'; do you mean 'nano'?"),
        ("train nano --oops", "unrecognized arguments: --oops; see perilune train --help"),
        ("plan nano --deb", "unrecognized arguments: --deb"),  # nothing is guessed
        ("train nano seed", "seed: expected key=value, got no '='; write for example seed=1"),
        ("train nano sead=1", "sead: unknown key 'sead'; do you mean 'seed'?"),
        ("train nano model.hiden_size=1", "model.hiden_size: unknown key 'hiden_size'; do you mean 'hidden_size'?"),
        ("train nano seed=one", "seed: expected int, got 'one'"),
        ("train nano model.hidden_size=1.5", "model.hidden_size: expected int, got 1.5"),
        ("train nano stages.0.lr=fast", "stages.0.lr: expected float, got 'fast'"),
        ("train nano stages.0.lr=NaN", "stages.0.lr: expected a finite rate above 0, got nan"),
        ("train nano stages.7.lr=1", "stages.7.lr: expected an index below 4, got '7'"),
        ("train nano model.num_experts_per_token=100", "expected from 1 to num_experts (64), got 100"),
        ("train nano stages.0.context=4096", "stages.0.context: expected at most batch_tokens (2048), got 4096"),
        ("train nano data.vocab_size=9999", "data.vocab_size: expected at most the model's 2048, got 9999"),
        ("train nano seed=-1", "seed: expected a number from 0"),
        ("train nano data.sources.text.path=nowhere", "nowhere: expected a folder of *.txt files, found none"),
        ("train nano data.sources.text.path=.", "expected at least one *.txt file, found none"),
        ("train nano model.linear_attn_config.gate_lower_bound=1", "g_min: expected from -5.5 up to below 0, got 1.0"),
        ('train nano data.sources.text.path="\\ud800"', "data.sources.text.path: expected text, got half"),
        ("train nano data.sources.text.path=\udcff", "command line: expected UTF-8, got 'data."),
        ("report caf\udce9", "command line: expected UTF-8, got 'caf\\udce9'; rename the file, or type it in UTF-8"),
        ("plan", "the following arguments are required: preset"),
        ("plan nanoo", "preset: there is none called 'nanoo'; do you mean 'nano'?"),
        ("plan no/such.json", "no/such.json: expected a checkpoint, found no config.json"),
        ("plan .", ".: expected a trained model, found no config.json"),
        ("eval", "the following arguments are required: folder"),
        ("eval nowhere", "nowhere: expected a trained model, found no config.json; train one with: perilune train"),
        ("eval . --context 0", "argument --context: expected a whole number from 1 up, got '0'"),
        ("generate", "the following arguments are required: folder"),
        ("generate nowhere", "nowhere: expected a trained model, found no config.json"),
        ("generate .", ".: expected a trained model, found no config.json"),
        ("generate . --tokens -5", "argument --tokens: expected a whole number from 0 up, got '-5'"),
        ("generate . --tokens many", "argument --tokens: expected a whole number from 0 up, got 'many'"),
        ("generate . --tokens 1.5", "argument --tokens: expected a whole number from 0 up, got '1.5'"),
        ("generate . --seed -1", "argument --seed: expected a whole number from 0 up, got '-1'"),
        ("generate . --seed 99999999999999999999", "argument --seed: expected a whole number from 0 up"),
        ("generate . --temperature hot", "argument --temperature: invalid float value: 'hot'"),
        ("generate . --temperature -0.5", "temperature: expected at least 0, got -0.5"),
        ("generate . --temperature nan", "temperature: expected at least 0, got nan"),
        ("generate . --top-p 1.5", "top_p: expected from 0 to 1, got 1.5"),
        ("generate . --top-k -1", "argument --top-k: expected a whole number from 0 up"),
        ("bench kdaa", "kdaa: expected the name of a benchmark; do you mean 'kda'?"),
        ("bench kda --threads 0", "argument --threads: expected a whole number from 1 up, got '0'"),
        ("bench kda --json no/such/folder/x.json", "--json: expected a file in a folder that exists"),
        ("bench kda --json .", "--json: expected a file in a folder that exists"),
        ("doctor now", "unrecognized arguments: now"),
    ],
)
def test_a_wrong_call_is_refused_in_a_line_and_makes_nothing(words, expected, capsys, tmp_path):
    assert expected in refused(capsys, *words.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["--debug plan nanoo", "plan --debug nanoo", "plan nanoo --debug"])
def test_debug_shows_the_trace(words, capsys):
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last)")
    assert "in get" in err
    assert "ConfigError: preset: there is none called 'nanoo'" in err.splitlines()[-1]


def test_text_that_looks_like_an_option_is_text(run_copy, capsys):
    assert main(["generate", str(run_copy), "--prompt=--debug", "--tokens", "0"]) == 0
    assert capsys.readouterr().out == "--debug\n"
    assert "temperature" in refused(capsys, "generate", run_copy, "--prompt=--debug", "--temperature=-1")


def test_a_mistake_of_ours_keeps_its_trace(monkeypatch):
    def broken(args):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(plan, "run", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["plan", "nano"])


# training


def test_a_run_leaves_a_whole_folder(finished):
    folder, printed = finished
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert names == {
        "run.json", "metrics.jsonl", "snapshots.jsonl", "result.json", "report.html", "tokenizer.json",
        "model/config.json", "model/model.safetensors", "model/tokenizer.json",
        *(f"checkpoints/step-000000{step}/{name}" for step in (10, 16) for name in CHECKPOINT),
    }  # fmt: skip
    configuration = json.loads((folder / "run.json").read_text())
    assert configuration["model"]["hidden_size"] == 32
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 17))
    result = json.loads((folder / "result.json").read_text())
    assert set(result["bits_per_byte"]) == {"perilune", "gzip -9", "xz -9e", "order-5 Kneser-Ney"}
    assert set(result["expert_load"]) == {
        "gini", "max_violation", "worst_dead", "worst_layer", "dead_experts", "layers",
    }  # fmt: skip
    assert (result["tokens"], result["seed"]) == (16 * 96, 0)
    assert result["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert result["parameters"] == sum(p.numel() for p in K3Model.from_pretrained(folder / "model").parameters())
    assert result["machine"]["device"] == "cpu"
    assert result["long_context"]["trained"] == 48
    assert [sample["prompt"] for sample in result["samples"]] == ["def ", "class ", "import "]
    snapshots = [json.loads(line) for line in (folder / "snapshots.jsonl").read_text().splitlines()]
    assert [(line["step"], line["stage"], line["tokens"]) for line in snapshots] == [
        (10, "short", 960), (16, "long", 1536),
    ]  # fmt: skip
    assert f"{result['bits_per_byte']['perilune']:.3f}" in printed
    for words in ("held out in 1 documents", "step 16/16", "dead", "continues 'def '", f"generate {folder}"):
        assert words in printed


def test_the_printed_recipe_is_the_one_that_runs(finished, nano, capsys):
    assert main([*nano, "--print"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((finished[0] / "run.json").read_text())
    assert not Path("runs").exists()


def test_a_run_is_replaced_only_when_asked(nano, run_copy, capsys):
    before = files(run_copy)
    assert f"{run_copy}: expected a new or empty folder, found a run" in refused(capsys, *nano, "--out", run_copy)
    assert "sead" in refused(capsys, *nano, "sead=3", "--out", run_copy, "--overwrite")
    assert "nowhere" in refused(capsys, *nano, "data.sources.text.path=nowhere", "--out", run_copy, "--overwrite")
    assert files(run_copy) == before
    assert main([*nano, *FEW, "seed=3", "--out", str(run_copy), "--overwrite"]) == 0
    after = files(run_copy)
    assert {name for name in after if "checkpoints" not in name} == {n for n in before if "checkpoints" not in n}
    assert {name.split("/")[1] for name in after if "checkpoints" in name} == {"step-00000002", "step-00000003"}
    assert json.loads(after["run.json"])["seed"] == json.loads(after["result.json"])["seed"] == 3
    assert len(after["metrics.jsonl"].splitlines()) == 3
    assert all(after[name] != before[name] for name in ("model/model.safetensors", "metrics.jsonl", "result.json"))


def test_where_a_run_cannot_begin(nano, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "one.tex").write_text("kept")
    before = files(tmp_path)
    for extra in ([], ["--overwrite"]):
        assert "file: expected a folder for the run, got a file" in refused(capsys, *nano, "--out", "file", *extra)
        assert "thesis: expected a new or empty folder" in refused(capsys, *nano, "--out", "thesis", *extra)
        assert "file/below: Not a directory" in refused(capsys, *nano, "--out", "file/below", *extra)
    assert files(tmp_path) == before
    monkeypatch.setattr(loop, "Trainer", stop(AssertionError("the text is not read in vain")))
    assert "thesis: expected a new or empty folder" in refused(capsys, *nano, "--out", "thesis")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "expected at least one *.txt file, found none"),
        ({"a.md": b"text"}, "expected at least one *.txt file, found none"),
        ({"a.txt": b"\xff\xfe"}, "found none (1 skipped, a.txt: not UTF-8)"),
        ({"a.txt": b""}, "found none (1 skipped, a.txt: empty)"),
        ({"a.txt": b"too little"}, "expected at least 1000 bytes to learn from"),
    ],
)
def test_text_that_cannot_be_learned_from(nano, tmp_path, content, expected, capsys):
    source = tmp_path / "source"
    source.mkdir()
    for name, text in content.items():
        (source / name).write_bytes(text)
    assert expected in refused(capsys, *nano, "data.sources.text.path=source", "--out", "run")
    assert not Path("run").exists()


def test_other_files_by_pattern_and_what_was_skipped(nano, texts, tmp_path, capsys):
    source = tmp_path / "2024"  # a number is a name too
    shutil.copytree(texts, source)
    for path in source.iterdir():
        path.rename(path.with_suffix(".md"))
    (source / "bad.md").write_bytes(b"\xff")
    assert main([*nano, *FEW, "data.sources.text.path=2024", "data.sources.text.pattern=*.md", "--out", "run"]) == 0
    assert "text: 1 left out, such as bad.md: not UTF-8" in capsys.readouterr().out


def test_a_run_that_diverges(nano, capsys):
    line = refused(capsys, *nano, "stages.0.lr=1e30", "--out", "run")
    assert "expected a number, got nan at step 2 (stage short, tokens 96 to 192); lower the learning rate" in line
    assert {p.name for p in Path("run").iterdir()} == BEGUN


def test_a_model_too_large(nano, capsys):
    assert "memory: expected enough" in refused(capsys, *nano, "model.hidden_size=1000000000", "--out", "run")
    assert not Path("run").exists()


# a run cut short


def stop(error):
    def raising(*args, **kwargs):
        raise error

    return raising


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SafetensorError("I/O error: No space left on device")])
def test_a_save_cut_short_leaves_no_model(nano, run_copy, capsys, monkeypatch, error, overwrite):
    out = run_copy if overwrite else Path("new")
    monkeypatch.setattr(convert, "save_file", stop(error))
    code = main([*nano, *FEW, "--out", str(out), "--overwrite"])
    err = capsys.readouterr().err
    if isinstance(error, KeyboardInterrupt):
        assert (code, err) == (130, "perilune train: interrupted\n")
    else:
        assert code == 2
        assert err.startswith("perilune train: ")
        assert "expected to write the checkpoint of step 2, got I/O error: No space left on device (" in err
    assert set(files(out)) == BEGUN
    assert "expected a trained model, found no config.json" in refused(capsys, "generate", out)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "runs"), "runs: Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("no more is known"), "no more is known"),
        (MemoryError(), "memory: expected enough for this model, got less; choose smaller sizes"),
        (RuntimeError("CUDA out of memory. Tried to"), "memory: expected enough for this model, got less; choose"),
        (RuntimeError("size mismatch"), None),
    ],
)
def test_errors_of_the_system_in_a_line(error, line):
    assert one_line(error) == line or one_line(error).startswith(line)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written():
    words = [PERILUNE, "train", "nano", "--print"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=BUFFERED)
    assert (done.returncode, done.stderr) == (2, "perilune train: No space left on device\n")


@pytest.mark.parametrize("words", [["train", "nano", "--print"], ["--help"], ["train", "--help"]])
def test_a_reader_that_goes_away_is_no_error(words):
    run = subprocess.Popen([PERILUNE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=BUFFERED)
    run.stdout.close()
    err = run.stderr.read()
    run.stderr.close()
    assert (run.wait(timeout=60), err) == (0, b"")


# using what was trained


def test_eval_gives_the_run_its_result_again(finished, texts, capsys):
    folder, _ = finished
    bits = json.loads((folder / "result.json").read_text())["bits_per_byte"]["perilune"]
    size = sum(len(document.text.encode()) for document in held_out(folder))
    assert main(["eval", str(folder)]) == 0
    assert capsys.readouterr().out == f"{bits:.4f} bits per byte over {size:,} bytes\n"
    assert main(["eval", str(folder), "--context", "100000"]) == 0  # longer than anything
    assert float(capsys.readouterr().out.split()[0]) != pytest.approx(bits, abs=2e-4)


def held_out(folder):
    return open_source(read_run(folder).data.sources["text"]).held_out


def test_eval_of_a_text(finished, tmp_path, capsys):
    folder, _ = finished
    text = tmp_path / "any.txt"
    text.write_bytes("one\r\ntwo 漢字\n".encode())
    for place in (folder, folder / "model"):
        assert main(["eval", str(place), "--text", str(text)]) == 0
        assert "bits per byte over 16 bytes" in capsys.readouterr().out  # line ends are not translated
    text.write_bytes(b"")
    assert "any.txt: expected some text, got an empty file" in refused(capsys, "eval", folder, "--text", text)
    text.write_bytes(b"\xff")
    assert "any.txt: expected UTF-8 text, got" in refused(capsys, "eval", folder, "--text", text)
    assert "nowhere.txt: No such file" in refused(capsys, "eval", folder, "--text", "nowhere.txt")
    assert "expected a run, found no run.json" in refused(capsys, "eval", folder / "model")
    assert eval_verb.CONTEXT == 2048


def test_generate(finished, capsys):
    folder, _ = finished

    def text(*words):
        assert main(["generate", str(folder), *words]) == 0
        return capsys.readouterr().out

    prompt = "def 漢字"
    once = text("--prompt", prompt, "--tokens", "40", "--seed", "1")
    assert once.startswith(prompt)
    assert len(once) > len(prompt) + 1
    assert once == text("--seed", "1", "--tokens", "40", "--prompt", prompt)
    assert once != text("--prompt", prompt, "--tokens", "40", "--seed", "2")
    assert text("--prompt", prompt, "--tokens", "0") == prompt + "\n"
    greedy = text("--temperature", "0", "--tokens", "8")
    assert greedy == text("--temperature", "0", "--tokens", "8", "--seed", "5")
    capsys.readouterr()
    assert main(["generate", str(folder / "model"), "--temperature", "0", "--tokens", "8"]) == 0
    assert capsys.readouterr().out == greedy


def test_generate_with_fewer_tokens_than_rows(finished, capsys):
    """Little text gave fewer tokens than the model has rows: the others are never drawn."""
    model, bpe = K3Model.from_pretrained(finished[0] / "model"), ByteBPE.load(finished[0] / "model")
    assert bpe.vocab_size < model.config.vocab_size
    words = ["--tokens", "120", "--temperature", "50", "--top-p", "1"]
    assert main(["generate", str(finished[0]), *words, "--seed", "0"]) == 0


def test_a_prompt_that_is_no_text_is_not_printed(finished, capsys):
    line = refused(capsys, "generate", finished[0], "--prompt", "caf\udce9")
    assert "command line: expected UTF-8, got 'caf\\udce9'" in line
    assert capsys.readouterr().out == ""


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def other_config(path):
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "hidden_size": 48}))


def other_tokenizer(path):
    ByteBPE.train([str(list(range(3000)))] * 2, 400).save(path.parent)


@pytest.mark.parametrize(
    ("file", "damage", "expected"),
    [
        ("config.json", Path.unlink, "expected a trained model, found no config.json"),
        ("config.json", lambda p: p.write_text("{"), "config.json: expected JSON, got"),
        ("config.json", lambda p: p.write_bytes(b"\xff\xff"), "config.json: expected JSON, got"),
        ("config.json", lambda p: p.write_text("[1]"), "config.json: expected an object, got list"),
        ("config.json", lambda p: p.write_text("{}"), "hidden_size: expected a value, got none"),
        ("config.json", other_config, "the config is of another model"),
        ("model.safetensors", Path.unlink, "expected model.safetensors or its index, found neither"),
        ("model.safetensors", cut, "the file is damaged or cut short"),
        ("model.safetensors", lambda p: p.write_bytes(b""), "the file is damaged or cut short"),
        ("model.safetensors", lambda p: p.write_bytes(b"x" * 1000), "the file is damaged or cut short"),
        ("tokenizer.json", Path.unlink, "expected a tokenizer.json, found none"),
        ("tokenizer.json", lambda p: p.write_text("{}"), "expected a tokenizer, got what cannot be read"),
        ("tokenizer.json", other_tokenizer, "expected a tokenizer of at most 300 tokens, got"),
    ],
)
def test_a_damaged_model_is_refused(run_copy, file, damage, expected, capsys):
    damage(run_copy / "model" / file)
    for verb in ("generate", "eval"):
        assert expected in refused(capsys, verb, run_copy)
        assert capsys.readouterr().out == ""


def test_a_damaged_run_is_refused(run_copy, capsys):
    (run_copy / "run.json").write_text("not JSON")
    assert "run.json: expected a run's configuration, got" in refused(capsys, "eval", run_copy)
    assert main(["generate", str(run_copy), "--tokens", "1"]) == 0


# the other verbs


def test_plan_counts_k3(capsys):
    assert main(["plan", "k3"]) == 0
    out = capsys.readouterr().out
    assert "2,779,931,837,184" in out
    assert "104,189,614,848" in out
    assert "2.78T parameters, 104.2B active" in out


def test_plan_counts_what_lies_in_a_folder(finished, capsys):
    folder, _ = finished
    model = K3Model.from_pretrained(folder / "model")
    count = sum(p.numel() for p in model.parameters())
    for path in (folder, folder / "model", folder / "model" / "config.json"):
        assert main(["plan", str(path)]) == 0
        out = capsys.readouterr().out
        assert f"{human(count)} parameters" in out or f"{count:,}" in out


def vision(changes):
    """A small model's configuration inside one that names a vision tower."""
    sizes = {**presets.VISION, **changes} if changes else {}
    return json.dumps({"text_config": presets.nano().to_hf(), "vision_config": sizes}).encode()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "config.json: expected JSON, got"),
        (b"\x80abc", "config.json: expected JSON, got"),
        (b"{'a': 1}", "config.json: expected JSON, got"),
        (b"[" * 100_000, "config.json: expected JSON, got"),
        (b"3", "config.json: expected an object, got int"),
        (b"[]", "config.json: expected an object, got list"),
        (b"{}", "hidden_size: expected a value, got none"),
        (b'{"hiden_size": 3}', "unknown key 'hiden_size'; do you mean 'hidden_size'?"),
        (b'{"text_config": 3}', "text_config: expected an object, got 3"),
        (b'{"perilune": 3}', "perilune: expected an object, got 3"),
        (vision({}), "vision_config: expected the sizes of a K3 vision tower"),
        (vision({"patch_size": "14"}), "vision_config: expected the sizes of a K3 vision tower"),
    ],
)
def test_plan_of_a_file_that_is_no_configuration(content, expected, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(content)
    assert expected in refused(capsys, "plan", "config.json")


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1K"), (1234, "1.23K"), (99_949, "99.9K"), (999_499, "999.5K"),
     (999_999, "1M"), (2_779_931_837_184, "2.78T"), (104_189_614_848, "104.2B"), (5e15, "5000T")],
)  # fmt: skip
def test_large_numbers_for_people(n, text):
    assert human(n) == text


def test_doctor_names_the_machine_and_the_backends(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert __version__ in out
    for op in ("kda", "short_conv", "attn_res", "situ_glu", "grouped_experts"):
        (line,) = [line for line in out.splitlines() if f"ops.{op} " in line]
        assert "chunked, then reference" in line


def test_doctor_says_why_better_backends_stand_back(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "USUAL", {"kda": lambda device: ((device.type,), {"gate": "bounded"})})
    first, second = Backends("kda"), Backends("kda_decode")
    for name in ("gluon", "triton"):
        first.register(name, print, lambda q, gate, name=name: f"no {gate} gate on {q} for {name}")
    first.register("chunked", print)
    second.register("triton", print)
    second.register("reference", print)
    monkeypatch.setattr(doctor, "_backends", lambda: [first, second])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["doctor"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    at = rows.index(["ops.kda", "chunked"])
    assert rows[at + 1 : at + 4] == [
        ["", "not gluon: no bounded gate on cpu for gluon"],
        ["", "not triton: no bounded gate on cpu for triton"],
        ["ops.kda_decode", "triton, then reference"],
    ]


def toy(check=lambda: None):
    def build():
        return [Candidate("slow", lambda: time.sleep(0.004)), Candidate("fast", lambda: None)]

    return Case("toy", "sleeping", build, check, (Gate("fast", "slow", 2.0),))


def test_bench_runs_what_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "ROUNDS", 3)
    monkeypatch.setattr(runner, "find", lambda: {"toy": toy(), "other": toy(check=stop(AssertionError("wrong")))})
    assert main(["bench", "toy", "--json", "toy.json", "--threads", "1"]) == 0
    assert "toy: sleeping" in capsys.readouterr().out
    written = json.loads((tmp_path / "toy.json").read_text())
    assert [case["name"] for case in written["cases"]] == ["toy"]
    assert written["environment"]["threads"] == 1
    assert main(["bench"]) == 1  # a check failed
    assert "wrong" in capsys.readouterr().out


def test_progress_follows_the_last_values():
    smoothed = Smoothed()
    assert smoothed.add(4.0) == pytest.approx(4.0)
    assert smoothed.add(2.0) == pytest.approx((0.95 * 4 + 2) / 1.95)
    for _ in range(200):
        smoothed.add(1.0)
    assert smoothed.value == pytest.approx(1.0, abs=1e-3)


def test_progress_is_a_line_where_there_is_no_terminal(nano, capsys):
    assert main([*nano, *FEW, "--out", "run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert line.startswith("step 3/3  stage 2/2 long  loss ")
    assert "tokens/s" in line

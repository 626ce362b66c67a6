"""A run that went on is the run that never stopped, bit for bit."""

import io
import json
import os
import random
import shutil
import signal
import time
from contextlib import redirect_stdout

import pytest
import torch

from perilune.cli.main import main
from perilune.data.corpus import Corpus, Document
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.models.k3.config import BalanceConfig
from perilune.train import state
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import OptimizerConfig, Stage
from perilune.train.feed import Feed
from perilune.train.loop import Trainer
from perilune.train.metrics import Metrics
from tiny_run import OVERRIDES, run, trainer, write_corpus

# Stages of 3, 4 and 2 steps, and a window of loads that is longer than any of them.
THREE = (
    Stage(name="a", context=16, batch_tokens=48, tokens=144, lr=2e-2, lr_end=4e-3, warmup=0.2),
    Stage(name="b", context=32, batch_tokens=64, tokens=256, lr=8e-3, lr_end=1e-3, warmup=0.3),
    Stage(name="c", context=48, batch_tokens=48, tokens=96, lr=4e-3, lr_end=1e-3),
)
FILES = ("model.safetensors", "training.safetensors", "training.json")


def short(**changes):
    return run(**{"stages": THREE, "checkpoint_every": 1, "load_window": 6, **changes})


def balanced(kind, **options):
    return short(model={"balance": BalanceConfig(kind=kind, options=options)})


# A source and tasks in other shares in every stage; the second reads long documents alone, the third no text.
MIXED = (
    Stage(name="a", context=256, batch_tokens=768, tokens=2304, lr=2e-2, lr_end=4e-3, mix={"text": 0.5, "needle": 0.5}),
    Stage(
        name="b", context=512, batch_tokens=1024, tokens=4096, lr=8e-3, lr_end=1e-3, min_document=200,
        mix={"text": 0.6, "needle": 0.2, "variables": 0.2},
    ),
    Stage(name="c", context=384, batch_tokens=768, tokens=1536, lr=4e-3, lr_end=1e-3, mix={"variables": 1.0}),
)  # fmt: skip

RUNS = {
    "mixed": short(stages=MIXED),
    "quantile, pooled": short(),
    "quantile, smoothed": balanced("quantile", decay=None, ema=0.8),
    "quantile, exact": balanced("quantile", bins=None, decay=None),
    "sign": balanced("sign", step=1e-2),
    "band": balanced("band"),
    "aux": balanced("aux", coefficient=1e-2),
    "none": balanced("none"),
    "further tokens": short(model={"num_nextn_predict_layers": 1}),
    "clipped": short(optimizer=OptimizerConfig(qk_clip=1e-2, qk_clip_every=2, adamw_lr=5e-3)),
    "tied": short(model={"tie_word_embeddings": True}),
    "no experts": short(model={"num_experts": 0}),
}


class Keeping(Checkpoints):
    """Checkpoints of which none is ever removed."""

    def _found(self):
        return []


def lines(path):
    """What a run said, but for how long it took."""
    return [{**json.loads(line), "seconds": None} for line in path.read_text().splitlines()]


def train(folder, made, **options):
    """Trains `made` in `folder`, from a checkpoint if one is given."""
    folder.mkdir(exist_ok=True)
    built = trainer(made, **options)
    with Metrics(folder / "metrics.jsonl", after=built.steps_done) as metrics:
        built.train(metrics, checkpoints=Keeping(folder))
    return built


def checkpoint_at(folder, step):
    return folder / "checkpoints" / f"step-{step:08}"


def same_files(a, b):
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)


# every step of many kinds of runs


@pytest.mark.parametrize("kind", RUNS)
def test_every_step_leads_to_the_next(kind, tmp_path):
    """From a checkpoint one step in new objects gives the next checkpoint, to the last bit of every file: weights,
    the optimizer's state, balancers, windows, random state, rates and the place in the data."""
    made = RUNS[kind]
    train(tmp_path, made)
    said = lines(tmp_path / "metrics.jsonl")
    assert len(said) == 9
    for step in range(1, 9) if kind == "quantile, pooled" else (2, 3, 7):  # 3 and 7 are where stages end
        taken_up = trainer(made, checkpoint=checkpoint_at(tmp_path, step))
        again = tmp_path / f"from-{step}"
        again.mkdir()
        with Metrics(again / "metrics.jsonl") as metrics:
            taken_up.train(metrics, checkpoints=Keeping(again), stop=lambda: True)
        assert lines(again / "metrics.jsonl") == said[step : step + 1]
        assert same_files(checkpoint_at(again, step + 1), checkpoint_at(tmp_path, step + 1))


@pytest.mark.parametrize("kind", ["quantile, pooled", "clipped"])
def test_four_and_five_steps_are_nine(kind, tmp_path):
    """The same to the end, and what every line says: losses, rates, gradients' norm, loads."""
    made = RUNS[kind]
    whole = train(tmp_path / "whole", made)
    shutil.copytree(tmp_path / "whole", tmp_path / "rest")
    again = train(tmp_path / "rest", made, checkpoint=checkpoint_at(tmp_path / "whole", 4))
    said = lines(tmp_path / "whole" / "metrics.jsonl")
    assert lines(tmp_path / "rest" / "metrics.jsonl") == said
    assert [line["step"] for line in said] == list(range(1, 10))
    assert [line["lr"] for line in said] == [made.schedule.lr(line["tokens"]) for line in said]
    for a, b in zip(whole.model.state_dict().values(), again.model.state_dict().values()):
        assert torch.equal(a, b)
    assert whole.expert_load() == again.expert_load()
    assert same_files(checkpoint_at(tmp_path / "whole", 9), checkpoint_at(tmp_path / "rest", 9))


def test_the_optimizers_state_is_there_before_the_first_step(tmp_path):
    made = short()
    train(tmp_path, made)
    taken_up = trainer(made, checkpoint=checkpoint_at(tmp_path, 5))
    for group in taken_up.optimizer.param_groups:
        for param in group["params"]:
            values = taken_up.optimizer.state[param]
            assert set(values) == ({"momentum"} if group["kind"] == "muon" else {"step", "exp_avg", "exp_avg_sq"})
            assert all(tensor.any() for name, tensor in values.items() if name in ("momentum", "exp_avg")) or (
                param.grad is None
            )
            assert "step" not in values or values["step"] == 5


def test_balancers_and_windows_have_what_they_had(tmp_path):
    made = short()
    train(tmp_path, made)
    taken_up = trainer(made, checkpoint=checkpoint_at(tmp_path, 8))
    ((name, balancer),) = taken_up.balancers.items()
    assert balancer.pooled.any()
    assert len(taken_up.loads[name]) == 6  # the window, not all eight steps
    assert torch.equal(taken_up.loads[name].stack()[-1], balancer.loads)


def test_exact_values_survive(tmp_path):
    """1 + 2^-12 is no bfloat16, and 1.2345 no value that a start would draw."""
    made = short()
    built = trainer(made)
    exact = {
        "model.layers.0.self_attn.A_log": 1.2345,
        "model.layers.0.self_attn.dt_bias": 1 + 2**-12,
        "model.layers.1.block_sparse_moe.balancer.bias": 1 + 2**-12,
        "model.norm.weight": 1 + 2**-12,
    }
    with torch.no_grad():
        for name, value in exact.items():
            built.model.state_dict()[name].fill_(value)
    built.checkpoint(Checkpoints(tmp_path))
    path = checkpoint_at(tmp_path, 0)
    for model in (trainer(made, checkpoint=path).model, K3Model.from_pretrained(path)):
        for name, value in exact.items():
            assert (model.state_dict()[name] == torch.tensor(value)).all(), name


# data


def test_documents_are_cut_and_shuffled_alike_through_three_epochs():
    """Seven documents, packs that cut them, taken up at every one of twenty steps by a new reader."""
    texts = [Document(f"{i}.txt", f"document {i} " * (30 + 7 * i)) for i in range(8)]
    corpora = {"text": Corpus(tuple(texts[:-1]), tuple(texts[-1:]))}
    made = short(stages=(THREE[0].replace(context=32, batch_tokens=200, tokens=4000),))
    bpe = ByteBPE.train([document.text for document in texts], 300)

    def reader():
        feed = Feed(made, bpe, corpora)
        feed.begin(made.stages[0])
        return feed

    feed = reader()
    states, batches = [], []
    for _ in range(24):
        states.append(json.loads(json.dumps(feed.state_dict())))
        batches.append(feed.next())
    epochs = 24 * 200 / sum(len(d) for d in bpe.encode_documents([document.text for document in texts[:-1]]))
    assert epochs > 3
    for step in range(1, 21):
        again = reader()
        again.load_state_dict(states[step])
        for batch in batches[step : step + 4]:
            got = again.next()
            assert torch.equal(got.input_ids, batch.input_ids)
            assert torch.equal(got.labels, batch.labels)
            assert torch.equal(got.cu_seqlens, batch.cu_seqlens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_run_on_a_gpu_goes_on(tmp_path):
    """Model, optimizer, balancers and random state come back to the GPU with every bit; the losses follow the CPU's."""
    torch.use_deterministic_algorithms(False)
    made = short()
    (tmp_path / "cpu").mkdir()
    on_cpu = train(tmp_path / "cpu", made)
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        on_gpu = trainer(made, device="cuda")
        on_gpu.train(metrics, checkpoints=Keeping(tmp_path), stop=lambda: on_gpu.steps_done == 2)
    assert {p.device.type for p in on_gpu.model.parameters()} == {"cuda"}
    taken_up = trainer(made, device="cuda", checkpoint=checkpoint_at(tmp_path, 2))
    for name, tensor in state._tensors(on_gpu):
        again = dict(state._tensors(taken_up))[name]
        assert again.device == tensor.device
        assert torch.equal(again, tensor), name
    for name, tensor in on_gpu.model.state_dict().items():
        assert torch.equal(taken_up.model.state_dict()[name], tensor), name
    with Metrics(tmp_path / "metrics.jsonl", after=2) as metrics:
        taken_up.train(metrics)
    on_both = zip(lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "cpu" / "metrics.jsonl"))
    for got, expected in on_both:
        assert got["losses"]["next_token"] == pytest.approx(expected["losses"]["next_token"], rel=1e-2)
    assert (taken_up.steps_done, on_cpu.steps_done) == (9, 9)


# killed, and gone on with from the command line


def start_again(folder, texts, pipe):
    """In a forked process: the run's command, which says by a byte in the pipe that a step is done."""

    def told(self):
        progress = advance(self)
        os.write(pipe, b".")
        return progress

    advance = Trainer._advance
    Trainer._advance = told
    words = ["--resume", str(folder)] if (folder / "run.json").exists() else [*words_of(texts), "--out", str(folder)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os._exit(main(["train", *words]))


def words_of(texts):
    stages = [f"stages.{i}.{key}={value}" for i, size in enumerate((40, 70)) for key, value in {
        "batch_tokens": 48, "tokens": 48 * size, "context": (16, 48)[i],
    }.items()]  # fmt: skip
    sizes = [
        "model.num_nextn_predict_layers=0",
        "checkpoint_every=2",
        "load_window=20",
        "optimizer.qk_clip=0.5",
        "optimizer.qk_clip_every=4",
    ]
    return ["nano", f"data.sources.text.path={texts}", *OVERRIDES, *stages, *sizes]


def wait_for(steps, pipe):
    """Until that many steps are done, or the process is."""
    while steps and os.read(pipe, 1):
        steps -= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_killed_fifty_times_at_any_moment(tmp_path, texts, monkeypatch):
    """SIGKILL while it starts, steps, writes a line or saves; in the end all that it left is what an undisturbed run
    leaves."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # that is against power cuts, and most of the time
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "killed"
    with redirect_stdout(io.StringIO()):
        assert main(["train", *words_of(texts), "--out", str(undisturbed)]) == 0
    said = (undisturbed / "metrics.jsonl").read_text().splitlines()
    a_step = sorted(json.loads(line)["seconds"] for line in said)[55]
    dice = random.Random(0)
    reached = []
    for _ in range(50):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            start_again(folder, texts, writer)
        os.close(writer)
        steps = dice.choice((0, 1, 1, 2, 3, 3))
        wait_for(steps, reader)
        time.sleep(dice.uniform(0, 2 if steps else 6) * a_step)
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        os.close(reader)
        saved = folder / "checkpoints"
        reached.append(max((path.name for path in saved.iterdir()), default="") if saved.exists() else "")
    assert len(set(reached)) > 12
    with redirect_stdout(io.StringIO()) as said:
        assert main(["train", "--resume", str(folder)]) == 0
    assert "going on after step" in said.getvalue()
    assert lines(folder / "metrics.jsonl") == lines(undisturbed / "metrics.jsonl")
    assert len(lines(folder / "metrics.jsonl")) == 110
    for name in ("snapshots.jsonl", "tokenizer.json", "run.json", "model/model.safetensors", "model/config.json"):
        assert (folder / name).read_bytes() == (undisturbed / name).read_bytes(), name
    for step in (108, 110):
        assert same_files(checkpoint_at(folder, step), checkpoint_at(undisturbed, step))
    results = [json.loads((run / "result.json").read_text()) for run in (folder, undisturbed)]
    assert {**results[0], "seconds": 0} == {**results[1], "seconds": 0}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("texts"))

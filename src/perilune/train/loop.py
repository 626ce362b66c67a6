"""The training loop."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.core.errors import DataError, PeriluneError
from perilune.data.corpus import Corpus, standard_library, text_folder
from perilune.data.packing import Batch, PackedBatches
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.nn.load import LoadWindow, dead_experts, gini, max_violation
from perilune.optim import PerHeadMuon, qk_clip_
from perilune.train.config import DataConfig, Run, Stage
from perilune.train.metrics import Metrics


class Diverged(PeriluneError):
    """The loss is no number any more."""


@dataclass
class Progress:
    """What a watcher is told after every step."""

    stage: Stage
    step: int
    steps: int
    tokens: int
    """Tokens trained on so far."""
    loss: float
    """Next-token loss of the step, nats a token."""
    lr: float
    seconds: float
    """Time the step took."""


class Trainer:
    """One run: model, optimizer, data stream, and the step that moves them on.

    `train()` goes through all stages; `step()` alone is for whoever writes another loop.
    """

    def __init__(self, run: Run, corpus: Corpus | None = None) -> None:
        self.run = run
        self.corpus = open_corpus(run.data) if corpus is None else corpus
        self.tokenizer = ByteBPE.train((d.text for d in self.corpus.train), run.data.vocab_size)
        documents = self.tokenizer.encode_documents([d.text for d in self.corpus.train])
        torch.manual_seed(run.seed)
        self.model = K3Model(run.model)
        first = run.stages[0]
        self.batches = PackedBatches(documents, first.batch_tokens, first.context, run.seed)
        options = run.optimizer
        self.optimizer = PerHeadMuon(
            self.model.parameter_roles(),
            first.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            adamw_lr=options.adamw_lr,
        )
        self.schedule = run.schedule
        self.balancers = self.model.balancers()
        self.attentions = self.model.latent_attentions()
        self.loads = {name: LoadWindow(run.load_window) for name in self.balancers}
        self.steps_done = 0
        self.tokens_done = 0

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.run.stages)

    def train(self, metrics: Metrics, watch: Callable[[Progress], None] = lambda progress: None) -> None:
        """All stages, from where the run stands."""
        for stage in self.run.stages:
            self.batches.resize(stage.batch_tokens, stage.context)
            for _ in range(stage.steps):
                start = time.perf_counter()
                losses = self.step(self.batches.next())
                seconds = time.perf_counter() - start
                lr = self.optimizer.param_groups[0]["lr"]
                progress = Progress(
                    stage, self.steps_done, self.steps, self.tokens_done, losses["next_token"], lr, seconds
                )
                metrics.write(
                    step=self.steps_done,
                    stage=stage.name,
                    tokens=self.tokens_done,
                    lr=lr,
                    seconds=round(seconds, 4),
                    losses={name: round(value, 5) for name, value in losses.items()},
                    gini=round(self.expert_load()["gini"], 4),
                )
                watch(progress)

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; returns the losses' parts.  A loss of NaN raises Diverged and leaves the model alone."""
        clipping = self._clipping()
        for attention in self.attentions.values():
            attention.track_max_logits = clipping
        self._set_lr(self.schedule.lr(self.tokens_done))
        self.model.train()
        output = self.model(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels)
        assert output.loss is not None
        if not torch.isfinite(output.loss):
            for balancer in self.balancers.values():
                balancer.discard()
            raise Diverged(
                f"loss: expected a number, got {output.loss.item()} at step {self.steps_done + 1}; "
                "lower the learning rate"
            )
        output.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if clipping:
            self._clip_logits()
        for name, balancer in self.balancers.items():
            balancer.update()
            self.loads[name].add(balancer.loads)
        self.steps_done += 1
        self.tokens_done += batch.input_ids.numel()
        return {name: float(loss) for name, loss in output.losses.items()}

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _clipping(self) -> bool:
        options = self.run.optimizer
        return options.qk_clip is not None and self.steps_done % options.qk_clip_every == 0

    def _clip_logits(self) -> None:
        """QK-clip: scales down the heads whose largest logit passed the threshold."""
        threshold = self.run.optimizer.qk_clip
        assert threshold is not None
        for attention in self.attentions.values():
            if attention.max_logits is None:
                continue
            qk_clip_(
                attention.q_weight,
                attention.kv_b_proj.weight,
                attention.max_logits,
                threshold=threshold,
                nope=attention.nope,
                rope=attention.rope,
                v=attention.v_dim,
            )
            attention.max_logits = None

    def expert_load(self) -> dict[str, float]:
        """The worst layer's figures over the last `load_window` steps, and the dead experts of all layers."""
        loads = [window.total() for window in self.loads.values()]
        return {
            "gini": max(map(gini, loads), default=0.0),
            "max_violation": max(map(max_violation, loads), default=0.0),
            "dead_experts": sum(map(dead_experts, loads)),
        }

    def save(self, folder: Path) -> None:
        """The model and its tokenizer, loadable by `K3Model.from_pretrained` and `ByteBPE.load`."""
        self.model.save_pretrained(folder)
        self.tokenizer.save(folder)


def open_corpus(data: DataConfig) -> Corpus:
    return standard_library() if data.source == "standard_library" else text_folder(Path(data.source), data.pattern)


def start_folder(folder: Path, run: Run, overwrite: bool) -> None:
    """Makes the run's folder and writes its whole configuration; DataError if it holds another run."""
    if folder.exists() and any(folder.iterdir()):
        if not (overwrite and (folder / "run.json").exists()):
            raise DataError(
                f"{folder}: expected a new or empty folder, found files; choose another, or --overwrite a run"
            )
        for name in ("metrics.jsonl", "result.json"):
            (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "run.json", run.to_dict())


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)

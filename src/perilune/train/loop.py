"""The training loop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from perilune.core.errors import DataError, PeriluneError
from perilune.data.corpus import Corpus, standard_library, text_folder
from perilune.data.packing import Batch, PackedBatches
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.nn.load import LoadWindow, dead_experts, gini, max_violation
from perilune.optim import PerHeadMuon, qk_clip_
from perilune.train.config import DataConfig, Run, Stage
from perilune.train.metrics import Metrics

SMALLEST_TEXT = 1000  # bytes; less than this is a mistake


class Diverged(PeriluneError):
    """The loss, or its gradient, is no number any more."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a watcher is told after every step."""

    stage: Stage
    step: int
    steps: int
    tokens: int
    """Tokens trained on so far."""
    losses: dict[str, float]
    """The step's, by name; `next_token` in nats a token."""
    lr: float
    seconds: float
    """Time the step took."""


class Trainer:
    """One run: model, optimizer, data stream, and the step that moves them on.

    `train()` goes through all stages; `step()` alone is for whoever writes another loop.
    """

    def __init__(self, run: Run, corpus: Corpus | None = None) -> None:
        self.run = run
        torch.manual_seed(run.seed)
        self.model = K3Model(run.model)  # first: what is wrong with it shows before the text has been read
        self.corpus = open_corpus(run.data) if corpus is None else corpus
        texts = [document.text for document in self.corpus.train]
        self.tokenizer = ByteBPE.train(texts, run.data.vocab_size)
        first = run.stages[0]
        self.batches = PackedBatches(
            self.tokenizer.encode_documents(texts), first.batch_tokens, first.context, run.seed
        )
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
        """All stages, one after the other; every step leaves a line in `metrics`, then `watch` is told."""
        for stage in self.run.stages:
            self.batches.resize(stage.batch_tokens, stage.context)
            for _ in range(stage.steps):
                start = time.perf_counter()
                losses = self.step(self.batches.next())
                progress = Progress(
                    stage=stage,
                    step=self.steps_done,
                    steps=self.steps,
                    tokens=self.tokens_done,
                    losses=losses,
                    lr=self.optimizer.param_groups[0]["lr"],
                    seconds=time.perf_counter() - start,
                )
                self._record(progress, metrics)
                watch(progress)

    def _record(self, progress: Progress, metrics: Metrics) -> None:
        metrics.write(
            step=progress.step,
            stage=progress.stage.name,
            tokens=progress.tokens,
            lr=progress.lr,
            seconds=round(progress.seconds, 4),
            losses={name: round(value, 5) for name, value in progress.losses.items()},
            gini=round(self.expert_load()["gini"], 4),
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; returns the losses' parts.

        Raises Diverged where the loss or its gradient is no number, and leaves model and optimizer as they were.
        """
        tokens = self.tokens_done + batch.input_ids.numel()
        self._set_lr(self.schedule.lr(tokens))  # the rate at the step's end: at its beginning the first would be 0
        clipping = self._clipping()
        for attention in self.attentions.values():
            attention.track_max_logits = clipping
        self.model.train()
        output = self.model(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels)
        assert output.loss is not None
        output.loss.backward()
        self._check_finite(output.loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if clipping:
            self._clip_logits()
        for name, balancer in self.balancers.items():
            balancer.update()
            self.loads[name].add(balancer.loads)
        self.steps_done += 1
        self.tokens_done = tokens
        return {name: float(loss) for name, loss in output.losses.items()}

    def _check_finite(self, loss: Tensor) -> None:
        """Raises Diverged, and forgets all that the step left behind, unless the loss and its gradient are numbers."""
        norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not torch.isfinite(value):
                self._discard()
                raise Diverged(
                    f"{what}: expected a number, got {value.item()} at step {self.steps_done + 1}; "
                    "lower the learning rate"
                )

    def _discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for balancer in self.balancers.values():
            balancer.discard()
        for attention in self.attentions.values():
            attention.max_logits = None

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
        """The model and its tokenizer, loadable by `K3Model.from_pretrained` and `ByteBPE.load`.

        The model's `config.json` comes last: a folder that has one is complete.
        """
        self.tokenizer.save(folder)
        self.model.save_pretrained(folder)


def open_corpus(data: DataConfig) -> Corpus:
    """The texts of a run.  Raises DataError where they are too little to learn from, or none is left to judge on."""
    corpus = standard_library() if data.source == "standard_library" else text_folder(Path(data.source), data.pattern)
    if corpus.train_bytes < SMALLEST_TEXT or not corpus.held_out:
        raise DataError(
            f"{data.source}: expected at least {SMALLEST_TEXT} bytes to learn from and some to hold out, got "
            f"{corpus.train_bytes} and {corpus.held_out_bytes}; add text"
        )
    return corpus

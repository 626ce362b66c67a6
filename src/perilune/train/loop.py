"""The training loop."""

import itertools
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from perilune.core.errors import ConfigError, PeriluneError
from perilune.data.packing import Batch
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model, K3Output
from perilune.models.k3.parallel import shard_, whole_copy, whole_state
from perilune.models.k3.stages import keep_stage_, stages_of
from perilune.nn import Balancer, DepthStream, StatisticsPool, update_balancers
from perilune.nn.load import LoadWindow, bias_drift, dead_experts, layer_load, worst
from perilune.nn.project import plain_weights
from perilune.ops import cast_once
from perilune.ops.upload import on_device
from perilune.optim import PerHeadMuon, qk_clip_
from perilune.train import state
from perilune.train.checkpoint import Checkpoints
from perilune.train.config import Run, Stage
from perilune.train.feed import Feed
from perilune.train.guard import Guard
from perilune.train.host import Arrival
from perilune.train.metrics import Metrics
from perilune.train.micro_batches import add_losses, cut, target_counts
from perilune.train.parallel.feed import Part, SharedFeed, check_rule
from perilune.train.parallel.pipeline import Pipeline
from perilune.train.parallel.ranks import Ranks


class Diverged(PeriluneError):
    """The loss, or its gradient, is no number any more, or was too far from usual in too many steps."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step gives."""

    losses: dict[str, float]
    """By name, as computed; `next_token` in nats a token."""
    grad_norm: float
    """Of all gradients, as they came."""
    skipped: str | None = None
    """Why nothing was updated, where the guard left the step out."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a watcher is told after every step."""

    stage: Stage
    stage_number: int
    """From 1."""
    stages: int
    step: int
    steps: int
    tokens: int
    """Tokens trained on so far."""
    losses: dict[str, float]
    """The step's, by name; `next_token` in nats a token."""
    grad_norm: float
    gini: float
    """Of the worst layer's expert loads over the last `load_window` steps, as are the next two."""
    max_violation: float
    dead: float
    """Share of all experts without a token."""
    worst_dead: float
    """The same, of the layer with most of them."""
    worst_layer: str | None
    """The one with the highest Gini."""
    bias_drift: float
    """How far the step moved the selection bias of the layer that it moved most; see `perilune.nn.load.bias_drift`."""
    lr: float
    seconds: float
    """Time the step took."""
    skipped: str | None = None
    """Why the guard left the step out; None where it did not."""

    def line(self) -> dict[str, Any]:
        """As `metrics.jsonl` keeps it."""
        names = (
            "step", "tokens", "lr", "losses", "grad_norm", "gini", "max_violation", "dead", "worst_dead", "worst_layer",
            "bias_drift",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        line = {**values, "stage": self.stage.name, "seconds": round(self.seconds, 4)}
        return line if self.skipped is None else {**line, "skipped": self.skipped}


@dataclass(frozen=True, kw_only=True)
class _Balance:
    """What a step did to the experts' balance, on its way to the host."""

    loads: Arrival
    """[layers, E]"""
    biases: Arrival
    """[2, layers, E], all before the step, then all after it"""


class Trainer:
    """One run: model, optimizer, data, and the step that moves them on.

    `train()` goes through what is left of the stages; `step()` alone is for whoever writes another loop.

    feed: the data, if they are open already.  device: where model and batches are.
    checkpoint: a whole one of this run to go on from; otherwise it begins, from `run.init` or from drawn weights.
    ranks: the processes that train together (docs/parallel.md), of which each makes its trainer and calls its methods;
        left out, this one alone.  Then the first rank's feed is everybody's, and `device` is that of their mesh.
    """

    def __init__(
        self,
        run: Run,
        feed: Feed | None = None,
        *,
        device: torch.device | str = "cpu",
        checkpoint: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.run = run
        self.ranks = ranks or Ranks()
        self.device = torch.device(device)
        self.mixed = run.precision == "bfloat16"
        torch.manual_seed(run.seed)
        self.model = K3Model(run.model)  # first: what is wrong with it shows before the text is read
        self.parameters = sum(p.numel() for p in self.model.parameters())
        """How many numbers the model learns, in all stages."""
        routers = list(self.model.balancers())
        if self.ranks.flat_mesh is not None:
            check_rule(run.model.balance.kind)
            self.ranks.layout.check(self.ranks.size, run.model.num_experts, run.model.num_hidden_layers)
            if self.ranks.stages > 1:
                cut_up = stages_of(run.model, self.ranks.stages, max(stage.context for stage in run.stages))
                keep_stage_(self.model, cut_up[self.ranks.stage])
            balanced = self.ranks.layout.balanced
            shard_(self.model, self.ranks.flat_mesh, self.ranks.expert_mesh, balanced=balanced)
        self.model.to(self.device)
        if run.compile_norms:
            self.model.compile_norms()
        source = checkpoint or self.ranks.from_first(lambda: state.starting_point(run))

        def open_feed() -> Feed:
            return feed or Feed(run, ByteBPE.load(source) if source else None)

        further = run.model.num_nextn_predict_layers
        self.feed: Feed | SharedFeed = (
            open_feed() if self.ranks.mesh is None else SharedFeed(self.ranks, open_feed, further)
        )
        options = run.optimizer
        self.optimizer = PerHeadMuon(
            self.model.parameter_roles(),
            run.stages[0].lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            adamw_lr=options.adamw_lr,
            ns_dtype=torch.bfloat16 if self.mixed and self.device.type != "cpu" else None,
        )
        self.schedule = run.schedule
        self.balancers = self.model.balancers()
        self.attentions = self.model.latent_attentions()
        self.pool: StatisticsPool | None = None
        """Sums what balancers observed over the ranks that train on other tokens; None where this process is alone."""
        if self.ranks.tokens is not None:
            self.pool = StatisticsPool(self.balancers.values(), self.ranks.tokens)
        self.pipeline = Pipeline(self.model, self.ranks, self.device, routers) if self.ranks.stages > 1 else None
        self._loads = {name: LoadWindow(run.load_window) for name in routers}
        self._bias_drift = dict.fromkeys(routers, 0.0)
        self._arriving: deque[_Balance | None] = deque()
        """Of steps that are not in `_loads` yet; None of one that was left out."""
        self.guard = Guard(run.guard)
        self.ahead = self.device.type == "cuda"
        """Whether a step is begun before the line of the step before is made: the device then never waits for that."""
        self._ends = list(itertools.accumulate(stage.steps for stage in run.stages))
        self.steps_done = 0
        self.tokens_done = 0
        self._told_at = 0.0
        if checkpoint is not None:
            state.restore(self, checkpoint)
        else:
            self.feed.begin(self.stage)
            if source is not None:
                state.start_from(self, source)

    @property
    def steps(self) -> int:
        return self._ends[-1]

    @property
    def stage(self) -> Stage:
        """The next step's; after the last step, the last one."""
        return self.run.stages[self._stage_index]

    @property
    def _stage_index(self) -> int:
        return min(bisect_right(self._ends, self.steps_done), len(self._ends) - 1)

    @property
    def loads(self) -> dict[str, LoadWindow]:
        """By layer, its experts' loads in the last `load_window` steps."""
        self._settle()
        return self._loads

    @property
    def bias_drift(self) -> dict[str, float]:
        """By layer, how far the last step moved its selection bias."""
        self._settle()
        return self._bias_drift

    def train(
        self,
        metrics: Metrics | None,
        watch: Callable[[Progress], None] = lambda progress: None,
        at_stage_end: Callable[[Stage], None] = lambda stage: None,
        *,
        checkpoints: Checkpoints | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """What is left of all stages, or what `stop`, asked after every step, leaves of it.

        Every step leaves a line in `metrics`, then `watch` is told.  `at_stage_end` comes once a stage, before the
        checkpoint there, so that whoever goes on from a checkpoint knows that it was called for all stages before.
        Checkpoints are made every `checkpoint_every` steps, where a stage ends and before a stop.

        Of several ranks only the first has `metrics` and is told; all make checkpoints, and stop if one is asked to.
        """

        def tell(figures: Callable[[], Progress]) -> None:
            progress = figures()
            if metrics is not None:
                metrics.write(**progress.line())
                watch(progress)

        last: Callable[[], Progress] | None = None  # the figures of a step which the device may be at yet
        while self.steps_done < self.steps:
            stage = self.stage
            try:
                figures = self._advance()
            finally:  # also where this step diverged: what was before it is told
                if last is not None:
                    tell(last)
            last = figures
            if not self.ahead:
                tell(last)
                last = None
            stage_ended, stopped = self.steps_done in self._ends, self.ranks.any(stop())
            due = checkpoints and (stage_ended or stopped or self.steps_done % self.run.checkpoint_every == 0)
            if last is not None and (stage_ended or stopped or due):
                tell(last)
                last = None
            if stage_ended:
                at_stage_end(stage)
                self.feed.begin(self.stage)
                self.guard.begin()
            if checkpoints and due:
                if metrics is not None:
                    metrics.sync()
                self.checkpoint(checkpoints)
            if stopped:
                return

    def _advance(self) -> Callable[[], Progress]:
        """One step on the data's next batch; gives what waits for its figures."""
        number, stage, start = self._stage_index + 1, self.stage, time.perf_counter()
        update = self.step(self.feed.next())
        step, tokens, lr = self.steps_done, self.tokens_done, self.optimizer.param_groups[0]["lr"]

        def figures() -> Progress:
            self._settle(leaving=self.steps_done - step)
            load = self._load_figures()
            now, since = time.perf_counter(), max(start, self._told_at)
            self._told_at = now
            return Progress(
                stage=stage,
                stage_number=number,
                stages=len(self.run.stages),
                step=step,
                steps=self.steps,
                tokens=tokens,
                losses=update.losses,
                grad_norm=update.grad_norm,
                gini=load["gini"],
                max_violation=load["max_violation"],
                dead=load["dead_experts"] / max(len(self._loads) * self.run.model.num_experts, 1),
                worst_dead=load["worst_dead"],
                worst_layer=load["worst_layer"],
                bias_drift=max(self._bias_drift.values(), default=0.0),
                lr=lr,
                seconds=now - since,
                skipped=update.skipped,
            )

        return figures

    def _settle(self, leaving: int = 0) -> None:
        """Waits for what steps did to the experts' balance, all but the last `leaving`, and takes it up."""
        while len(self._arriving) > leaving:
            balance = self._arriving.popleft()
            if balance is None:
                for loads in self._loads.values():
                    if not len(loads):  # there is something to sum up, also where nothing was counted yet
                        loads.add(torch.zeros(self.run.model.num_experts, dtype=torch.long))
                self._bias_drift = dict.fromkeys(self._loads, 0.0)
                continue
            before, after = balance.biases.tensor()
            for name, own, old, new in zip(self._loads, balance.loads.tensor(), before, after):
                self._loads[name].add(own)
                self._bias_drift[name] = bias_drift(old, new)

    def step(self, batch: Batch) -> Update:
        """One optimizer step, in micro-batches where the stage asks for them.

        A step that the guard leaves out counts, its batch is read, and nothing else changes.
        Raises Diverged where the loss or its gradient is no number (under a guard, where it has left out as many steps
        in a row as it may), ConfigError where a document of the batch is longer
        than a micro-batch may be or the device's memory too small; either leaves model and optimizer as they were.
        """
        tokens = self.tokens_done + batch.size
        parts = self._parts(batch)
        self._set_lr(self._next_lr())
        clipping = self._clipping()
        self.model.train()
        self.model.recompute_activations(self.stage.recompute)
        try:
            whole = self._whole_step(batch, parts)
            self._track_logits(clipping)
            update = self._checked(self._accumulate(parts, whole), tokens)
        except BaseException as error:
            self._discard()
            if isinstance(error, torch.OutOfMemoryError):
                raise ConfigError(self._too_large(parts)) from error
            raise
        if update.skipped is None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if clipping:
                self._clip_logits()
            self._balance()
        else:
            self._discard()
            self._arriving.append(None)
        self.steps_done += 1
        self.tokens_done = tokens
        return update

    def _parts(self, batch: Batch) -> list[Batch]:
        """What goes through the model at once: on several ranks cut where the batch was dealt."""
        if isinstance(batch, Part):
            return list(batch.parts or (batch,))
        return cut(batch, self.stage.micro_tokens)

    def _too_large(self, parts: list[Batch]) -> str:
        stage, largest = f"stages.{self._stage_index}", max(part.input_ids.numel() for part in parts)
        return (
            f"{stage}.micro_tokens: expected as many as {self.device} has memory for, got {largest:,} at once; "
            f"lower it, or keep less with {stage}.recompute=layers, or blocks"
        )

    def _whole_step(self, batch: Batch, parts: list[Batch]) -> dict[str, list[int]] | None:
        """What the losses of parts need to know of the whole step; None where it is in one part.

        Costs a forward pass more where a balancer's loss has to know the step's loads before its first gradient.
        """
        if len(parts) == 1:
            return None
        whole = batch.targets if isinstance(batch, Part) else target_counts(batch, len(self.model.model.mtp))
        if any(balancer.counts_first for balancer in self.balancers.values()):
            self._track_logits(False)  # not here, where the step before may have
            with torch.no_grad():
                for part in parts:
                    self._pass(part, whole)
            for balancer in self.balancers.values():
                balancer.begin_parts()
        return whole

    def _accumulate(self, parts: list[Batch], whole: dict[str, list[int]] | None) -> dict[str, Tensor]:
        """The step's gradients, summed over its parts in the parameters' own precision; its losses, the one that is
        minimised first."""
        if self.pipeline is not None:
            return self.pipeline.accumulate(parts, lambda part, stream: self._pass(part, whole, stream))
        sums: dict[str, Tensor] = {}
        with cast_once(self._weights_to_cast(), torch.bfloat16):
            for part in parts:
                output = self._pass(part, whole)
                assert output.loss is not None
                output.loss.backward()
                add_losses(sums, output)
        return sums

    def _weights_to_cast(self) -> list[Tensor]:
        """All that autocast would cast layer by layer and part by part; those in shards are gathered in bits."""
        if not self.mixed or self.ranks.mesh is not None:
            return []
        return plain_weights(*self.model.model.layers, *self.model.model.mtp)

    def _pass(self, batch: Batch, whole: dict[str, list[int]] | None, stream: DepthStream | None = None) -> K3Output:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            return self.model(
                on_device(batch.input_ids, self.device),
                cu_seqlens=batch.cu_seqlens,
                targets=on_device(batch.labels, self.device),
                answers=None if batch.answers is None else on_device(batch.answers, self.device),
                counts=whole,
                group=self.ranks.context,
                mean_over=self.ranks.tokens,
                padding=batch.padding,
                stream=stream,
            )

    def _checked(self, losses: dict[str, Tensor], tokens: int) -> Update:
        """The step's figures, in one transfer, and the guard's word on them; raises Diverged as `step` says.

        The one place in a step where the host waits for a device: an update that is not wanted cannot be undone.  It
        costs a launch's delay, for what follows is few and large."""
        params = self.model.parameters() if self.pipeline is None else self.pipeline.parameters()
        grads = [p.grad for p in params if p.grad is not None]
        grad_norm, loss, *others = Arrival(self.ranks.figures(grads, list(losses.values()))).tensor().tolist()
        judged = {"loss": loss, "gradient norm": grad_norm}
        skipped = self.guard.judge(judged)
        where = f"at step {self.steps_done + 1} (stage {self.stage.name}, tokens {self.tokens_done:,} to {tokens:,})"
        if skipped is not None and self.guard.spent:
            raise Diverged(f"{skipped} {where}, number {self.guard.in_a_row} in a row; lower the learning rate")
        for what, value in judged.items():
            if skipped is None and not math.isfinite(value):
                raise Diverged(f"{what}: expected a number, got {value} {where}; lower the learning rate")
        return Update(losses=dict(zip(list(losses)[1:], others)), grad_norm=grad_norm, skipped=skipped)

    @record_function("balance")
    def _balance(self) -> None:
        """Moves the selection biases by what all ranks observed; sends them and the loads to the host, all at once."""
        if not self._loads:
            return
        balancers = self.balancers.values()
        if self.pool is not None:
            self.pool.sum_()
        biases = _biases(balancers)
        update_balancers(balancers)
        biases += _biases(balancers)
        if self.pipeline is not None:
            loads, moved = self.pipeline.of_all_layers(balancers, biases)
        else:
            loads, moved = torch.stack([balancer.loads for balancer in balancers]), torch.stack(biases)
        self._arriving.append(_Balance(loads=Arrival(loads), biases=Arrival(moved.unflatten(0, (2, -1)))))

    def _discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for balancer in self.balancers.values():
            balancer.discard()
        for attention in self.attentions.values():
            attention.max_logits = None

    def _next_lr(self) -> float:
        """The rate at the next step's end: at its beginning the first would be 0.

        Batches count as `batch_tokens` each: those of whole samples may be shorter, and stages would blur.
        """
        number = self._stage_index
        before = sum(stage.steps * stage.batch_tokens for stage in self.run.stages[:number])
        within = self.steps_done + 1 - (self._ends[number - 1] if number else 0)
        return self.schedule.lr(before + within * self.stage.batch_tokens)

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _clipping(self) -> bool:
        options = self.run.optimizer
        return options.qk_clip is not None and self.steps_done % options.qk_clip_every == 0

    def _track_logits(self, wanted: bool) -> None:
        for attention in self.attentions.values():
            attention.track_max_logits = wanted

    def _clip_logits(self) -> None:
        """QK-clip: scales down the heads whose largest logit passed the threshold."""
        threshold = self.run.optimizer.qk_clip
        assert threshold is not None
        for attention in self.attentions.values():
            if attention.max_logits is None:
                continue
            self.ranks.max_(attention.max_logits)
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

    def expert_load(self) -> dict[str, Any]:
        """Over the last `load_window` steps: each figure of the layer where it is worst, the name of the one with the
        highest Gini, the dead experts of all layers, and what every layer has."""
        self._settle()
        return self._load_figures()

    def _load_figures(self) -> dict[str, Any]:
        loads = {name: window.total() for name, window in self._loads.items()}
        layers = {name: layer_load(own) for name, own in loads.items()}
        name, highest = worst(layers)
        return {
            "gini": highest.gini,
            "max_violation": highest.max_violation,
            "worst_dead": highest.dead,
            "worst_layer": name,
            "dead_experts": sum(map(dead_experts, loads.values())),
            "layers": {name: figures._asdict() for name, figures in layers.items()},
        }

    def checkpoint(self, checkpoints: Checkpoints) -> None:
        """Keeps all that going on needs.  Raises CheckpointError where the disk does not take it."""
        checkpoints.save(self.steps_done, partial(state.write, self))

    def save(self, folder: Path) -> None:
        """The model and its tokenizer, loadable by `K3Model.from_pretrained` and `ByteBPE.load`.

        The model's `config.json` comes last: a folder that has one is complete.
        """
        model = self.whole_model()

        def write() -> None:
            assert model is not None
            self.feed.tokenizer.save(folder)
            model.save_pretrained(folder)

        self.ranks.from_first(write)

    def whole_model(self) -> K3Model | None:
        """The model in one piece, on the first rank; None on others, who all have to call this.  Alone it is `model`
        itself, else a copy."""
        if self.ranks.mesh is None:
            return self.model
        state = self.ranks.to_first(whole_state(self.model, self.ranks.leads))
        return whole_copy(self.model, state, self.device) if self.ranks.first else None


def _biases(balancers: Iterable[Balancer]) -> list[Tensor]:
    """As they are now, copied in one go."""
    biases = [balancer.bias for balancer in balancers]
    return list(torch.stack(biases).unbind()) if biases else []

"""One run: a model under one form of the residual, trained, judged and looked into."""

import logging
import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import perilune.nn.attn_res
from experiments.depth import measures
from experiments.depth.bypass import add_bypasses, roles_of
from experiments.depth.compute import fitted, spent
from experiments.depth.graph import Graph
from experiments.depth.recipes import Scale, Stack, Variant
from experiments.depth.texts import Rows
from perilune.core.errors import PeriluneError
from perilune.models.k3 import K3Model
from perilune.nn import update_balancers
from perilune.ops import attn_res
from perilune.optim import PerHeadMuon
from perilune.optim.schedule import LearningRateStage, Schedule
from perilune.train.evaluate import judging

log = logging.getLogger("perilune.depth")
MOMENTUM = 0.9
ADAMW = 1.5  # its rate beside Muon's
WARMUP, LAST = 0.1, 0.1  # share of the steps; of the rate
LOOK_EVERY = 8  # steps between two looks at the loss, for which a GPU has to be waited for
HOPELESS = 20.0  # nats a token


class OutOfTime(PeriluneError):
    """The time given ended before the run."""


@dataclass(frozen=True)
class Place:
    """Where and how models compute."""

    device: torch.device
    bf16: bool = False
    graphs: bool = False
    """Whether steps of models without experts are recorded as CUDA graphs."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Products in bfloat16, if so; weights are cast anew in every pass, or a graph would keep old casts."""
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def machine(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {"device": name, "torch": torch.__version__, "python": sys.version.split()[0]}


def use_backend(name: str) -> None:
    """Has all mixers of this process compute by that backend of `attn_res`."""
    perilune.nn.attn_res.attn_res = attn_res if name == "auto" else partial(attn_res, backend=name)


class Net(nn.Module):
    """The model, with bypasses where the variant has them."""

    def __init__(self, stack: Stack, variant: Variant, seed: int, place: Place) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = fitted(stack, variant)
        self.compute = spent(stack, variant, config)
        self.model = K3Model(config)
        pairs = stack.bypasses() if variant.bypass else ()
        self.bypasses = add_bypasses(self.model, pairs, stack.rank)
        self.place = place
        self.to(place.device)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean nats a token.  `ids, targets: [B, T]`."""
        with self.place.autocast():
            logits = self.model(ids).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Training:
    """A run's net, optimizer, and steps."""

    def __init__(self, net: Net, stack: Stack, rows: Rows, rate: float, seed: int, steps: int) -> None:
        self.net, self.stack, self.rows, self.seed = net, stack, rows, seed
        self.balancers = list(net.model.balancers().values())
        roles = {**net.model.parameter_roles(), **roles_of(net.bypasses)}
        dtype = torch.bfloat16 if net.place.bf16 else None
        self.optimizer = PerHeadMuon(roles, rate, momentum=MOMENTUM, adamw_lr=ADAMW * rate, ns_dtype=dtype)
        self.schedule = Schedule((LearningRateStage(tokens=steps, peak=rate, end=LAST * rate, warmup=WARMUP),))
        self.done = 0
        self.graph: Graph | None = None
        self.recorded = net.place.graphs and not self.balancers
        """Whether its passes are, or are to be, a graph; routing to experts looks at numbers on the way."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rows = self.rows.train[self.rows.order(self.seed, step, self.stack.rows).to(self.rows.train.device)]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def gradients(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss; its gradient is left where the optimizer looks for it."""
        if self.recorded and self.graph is None:
            try:
                self.graph = Graph(self.net, self.net.loss, ids, targets)
            except RuntimeError as error:
                self.recorded = False
                log.warning("no graph was recorded, every kernel is launched: %s", str(error).partition("\n")[0])
        if self.graph is not None:
            return self.graph(ids, targets).clone()
        self.net.zero_grad(set_to_none=True)
        loss = self.net.loss(ids, targets)
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """One update; returns the loss before it, without waiting for a GPU."""
        self.net.train()
        loss = self.gradients(*self.batch(self.done))
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(self.done + 1)
        self.optimizer.step()
        update_balancers(self.balancers)
        self.done += 1
        return loss


def train(
    scale: Scale, stack: Stack, variant: Variant, rate: float, seed: int, steps: int,
    *, rows: Rows, place: Place, deadline: float = math.inf, look: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The run's figures; those by depth if `look`.  Raises OutOfTime at the deadline, in `time.time()`'s seconds.

    A run whose loss is no number any more, or beyond hope, ends there: its `bits_per_byte` is None.
    """
    start = time.monotonic()
    net = Net(stack, variant, seed, place)
    training = Training(net, stack, rows, rate, seed, steps)
    seen = rows.held_out[: scale.looked_at]
    before = measures.by_depth(net, seen) if look else None
    losses: list[Tensor] = []
    diverged = False
    while training.done < steps and not diverged:
        losses.append(training.step())
        if training.done % LOOK_EVERY == 0 or training.done == steps:
            diverged = not float(losses[-1]) < HOPELESS
            if time.time() > deadline and training.done < steps:
                raise OutOfTime(f"{stack.name}, {variant.name}: out of time at step {training.done} of {steps}")
    place.wait()
    seconds = time.monotonic() - start
    training.graph = None
    net.zero_grad(set_to_none=True)
    return {
        "stack": stack.name, "variant": variant.name, "rate": rate, "seed": seed, "steps": steps,
        "parameters": sum(p.numel() for p in net.parameters()), "flops": round(net.compute),
        "inner": net.model.config.intermediate_size,
        "loss": [round(float(loss), 4) for loss in losses],
        "bits_per_byte": None if diverged else round(bits_per_byte(net, rows, stack.rows), 5),
        "recorded": training.recorded, "before": before,
        "after": measures.by_depth(net, seen) if look and not diverged else None,
        "seconds": round(seconds, 2), "machine": place.machine(),
    }  # fmt: skip


def bits_per_byte(net: Net, rows: Rows, size: int) -> float:
    """Of the held-out rows."""
    with judging(net):
        losses = [net.loss(part[:, :-1], part[:, 1:]) * len(part) for part in rows.held_out.split(size)]
    return float(sum(losses)) / len(rows.held_out) / math.log(2) * rows.tokens_a_byte

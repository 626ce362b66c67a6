"""The peer's training loop: autocast, AdamW fused, the loss of a step read while the next one is under way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

from perilune.bench.peer.model import PeerModel
from perilune.bench.peer.parts import Parts, from_fla
from perilune.data.packing import Batch
from perilune.ops.upload import on_device
from perilune.train.config import Run
from perilune.train.feed import Feed


class PeerTrainer:
    """Trains `PeerModel` on a run's batches, in its precision: weights, gradients and state are float32 either way.

    AdamW takes every parameter: torch's Muon takes no stacked experts, and one matrix at a time it would launch
    thousands of kernels a layer.  It costs less than any Muon, and no norm of the gradient is taken, for which ours
    waits before it updates: both are in the peer's favour.

    Raises ConfigError for a model that the peer has no form for, ImportError without its parts.
    """

    def __init__(self, run: Run, feed: Feed, device: torch.device, parts: Parts | None = None) -> None:
        self.device, self.feed, self.schedule = device, feed, run.schedule
        self.mixed = run.precision == "bfloat16"
        torch.manual_seed(run.seed)
        with device:
            self.model = PeerModel(run.model, parts or from_fla(), torch.bfloat16 if self.mixed else torch.float32)
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for parameter in self.model.parameters():
            (matrices if parameter.dim() > 1 else others).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": run.optimizer.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=run.stages[0].lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.tokens_done = 0
        self._boundaries: tuple[Tensor, Tensor] | None = None  # of the last batch, on the host and on the device
        feed.begin(run.stages[0])

    def train(self, steps: int, watch: Callable[[float], None]) -> None:
        """So many steps; `watch` is told the loss of each once it is there, when the next one has been begun."""
        with tf32():
            begun: Tensor | None = None
            for _ in range(steps):
                loss = self.step(self.feed.next())
                if begun is not None:
                    watch(float(begun))
                begun = loss
            if begun is not None:
                watch(float(begun))

    def step(self, batch: Batch) -> Tensor:
        """The loss, on the device."""
        self.tokens_done += batch.size
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(self.tokens_done)
        cu_seqlens, lengths = self._on_device(batch.cu_seqlens), batch.cu_seqlens.diff().tolist()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed):
            ids, targets = (on_device(x, self.device) for x in (batch.input_ids, batch.labels))
            loss = self.model(ids, targets, cu_seqlens, lengths)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with record_function("balance"):
            self.model.balance()
        return loss.detach()

    def _on_device(self, cu_seqlens: Tensor) -> Tensor:
        """The same tensor for the same boundaries: flash-linear-attention keeps what it derives from them by identity,
        and would otherwise wait for the device in every step."""
        if self._boundaries is None or not torch.equal(self._boundaries[0], cu_seqlens):
            self._boundaries = cu_seqlens, on_device(cu_seqlens, self.device)
        return self._boundaries[1]


@contextmanager
def tf32() -> Iterator[None]:
    """Float32 products on tensor cores, of which the head's gradient is one: its operands were bfloat16, so that their
    rounding loses nothing."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

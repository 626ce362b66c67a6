"""The stages of a pipeline: a step's micro-batches go up through them, and their gradients come down.

A stage has some of the layers.  What it hands on is a `DepthStream`'s sources, finished blocks and live sum, [1, T, D]
each: how many there are follows from the place, how long they are from the micro-batch, so no shapes travel.  Every
stage makes the same passes in the order of 1F1B: as many forward passes ahead as there are stages behind it, then one
forward, one backward in turn, so that it holds no more micro-batches than that.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from perilune.data.packing import Batch
from perilune.models.k3 import K3Model, K3Output
from perilune.models.k3.layer import DecoderLayer
from perilune.models.k3.stages import reads_embedding
from perilune.nn import DepthStream
from perilune.nn.balancer import Balancer
from perilune.optim.sharded import local
from perilune.train.micro_batches import add_losses
from perilune.train.parallel.ranks import Ranks

Pass = Callable[[Batch, DepthStream | None], K3Output]
"""One micro-batch through the layers that are here."""


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward pass."""

    taken: list[Tensor]
    """Sources from the stage before; none in the first."""
    given: list[Tensor]
    """Sources for the next stage; in the last one the loss."""
    sent: list[dist.Work] = field(default_factory=list)


class Pipeline:
    """This rank's stage.

    model: what is left of it there, spread over the stage's ranks.
    routers: the names of all stages' balancers, in their order.
    """

    def __init__(self, model: K3Model, ranks: Ranks, device: torch.device, routers: Sequence[str]) -> None:
        self.model, self.ranks, self.device = model, ranks, device
        self.last = model.model.ends
        self.behind = ranks.stages - 1 - ranks.stage
        """How many stages come after this one."""
        each = ranks.size // ranks.stages
        self.above, self.below = ranks.rank + each, ranks.rank - each
        self.dtype = cast("DecoderLayer", model.model.layers[model.model.stage.start]).input_layernorm.weight.dtype
        own = [name for name in routers if name in model.balancers()]
        first = routers.index(own[0]) if own else 0
        self._beside = (first, len(routers) - first - len(own))
        self._sent: list[dist.Work] = []
        self._held: list[Tensor] = []

    def accumulate(self, parts: Sequence[Batch], run: Pass) -> dict[str, Tensor]:
        """The step's gradients, and its losses, the one that is minimised first; those are 0 but in the last stage."""
        losses: dict[str, Tensor] = {}
        flying: deque[_Flight] = deque()
        assert isinstance(self.model, FSDPModule)
        self.model.set_reshard_after_backward(False, recurse=False)  # micro-batches in flight read what it gathered
        try:
            for number, part in enumerate(parts):
                flying.append(self._forward(part, run, losses))
                if number >= self.behind:
                    self._backward(flying.popleft())
            while flying:
                self._backward(flying.popleft())
            self._wait()
        finally:
            self.model.reshard()
        self._sum_embedding()
        return losses

    def _forward(self, part: Batch, run: Pass, losses: dict[str, Tensor]) -> _Flight:
        taken, stream = [], None
        if self.ranks.stage > 0:
            backbone = self.model.model
            reads = 2 * backbone.stage.start
            shape = (*part.input_ids.shape, self.model.config.hidden_size)
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            taken = [like.new_empty(shape) for _ in range(DepthStream.depth(backbone.period, reads))]
            self._receive(taken, self.below, self.ranks.forth)
            stream = DepthStream.resume([x.requires_grad_() for x in taken], backbone.period, reads)
        output = run(part, stream)
        if self.last:
            assert output.loss is not None
            add_losses(losses, output)
            return _Flight(taken, [output.loss])
        for name in self._loss_names(part):
            losses[name] = torch.zeros((), device=self.device)
        assert output.stream is not None
        given = [cast("Tensor", x).contiguous() for x in output.stream.sources]
        return _Flight(taken, given, self._send(given, self.above, self.ranks.forth))

    def _backward(self, flight: _Flight) -> None:
        grads = None
        if not self.last:
            grads = [torch.empty_like(x) for x in flight.given]
            self._receive(grads, self.above, self.ranks.back)
            for work in flight.sent:  # has arrived, or there were no gradients; until now it may have been read
                work.wait()
        torch.autograd.backward(flight.given, grads)
        if self.ranks.stage > 0:
            self._wait()
            self._held = [x.grad.contiguous() for x in flight.taken if x.grad is not None]
            assert len(self._held) == len(flight.taken), "every source is read"
            self._sent = self._send(self._held, self.below, self.ranks.back)

    def _wait(self) -> None:
        """Until the gradients sent last have arrived."""
        for work in self._sent:
            work.wait()
        self._sent, self._held = [], []

    def _send(self, tensors: Iterable[Tensor], rank: int, group: "dist.ProcessGroup | None") -> list[dist.Work]:
        """Begins to; what is sent stays as it is until that has been waited for."""
        begun = [dist.isend(x.detach(), dst=rank, group=group) for x in tensors if x.numel()]
        return [work for work in begun if work is not None]

    def _receive(self, tensors: Iterable[Tensor], rank: int, group: "dist.ProcessGroup | None") -> None:
        begun = [dist.irecv(x, src=rank, group=group) for x in tensors if x.numel()]
        for work in begun:
            if work is not None:
                work.wait()

    def _loss_names(self, part: Batch) -> list[str]:
        """In the last stage's order."""
        further = self.model.config.num_nextn_predict_layers > 0
        return ["loss", "next_token", *["mtp"] * further, *["answers"] * (part.answers is not None)]

    # parameters that two stages have

    def _sum_embedding(self) -> None:
        """Sums the gradients that the first and the last stage have of the embedding, where both read it."""
        if not reads_embedding(self.model.config) or not (self.last or self.ranks.stage == 0):
            return
        grad = self.model.model.embed_tokens.weight.grad
        assert grad is not None, "a row without tokens gives one too"
        own = local(grad)
        other, far = torch.empty_like(own), (self.ranks.stages - 1) * (self.ranks.size // self.ranks.stages)
        ways = (self.ranks.forth, self.ranks.back) if self.ranks.stage == 0 else (self.ranks.back, self.ranks.forth)
        rank = self.ranks.rank + (far if self.ranks.stage == 0 else -far)
        sent = self._send([own], rank, ways[0])
        self._receive([other], rank, ways[1])
        for work in sent:
            work.wait()
        own.add_(other)  # the same sum in both, to the bit, so that they stay copies

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter that is here, those of which another stage has a copy in the first one alone."""
        copied = self.last and reads_embedding(self.model.config)
        copy = self.model.model.embed_tokens.weight if copied else None
        return (param for param in self.model.parameters() if param is not copy)

    # what all stages know of each

    def of_all_layers(self, balancers: Iterable[Balancer], biases: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loads of every stage's experts [layers, E], and biases [2 layers, E], all before a step, then all after
        it, from those here: `biases` are of each balancer before, then of each after."""
        experts = self.model.config.num_experts
        rows = [x.double() for x in (*(balancer.loads for balancer in balancers), *biases)]  # in which all are exact
        own = torch.stack(rows) if rows else torch.zeros(0, experts, dtype=torch.float64, device=self.device)
        whole = F.pad(own.view(3, len(rows) // 3, experts), (0, 0, *self._beside))  # [3, layers, E]
        dist.all_reduce(whole, group=self.ranks.across)
        return whole[0].long(), whole[1:].flatten(0, 1).float()

"""How a model lies on GPUs, and what of it each of them has."""

from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Literal

from perilune.models.k3 import K3Config
from perilune.models.k3.config import Recompute
from perilune.models.k3.flops import mixer_sources
from perilune.plan.activations import Alike, alike
from perilune.plan.sizes import Share, Sizes

Sharding = Literal["weights", "states"]


@dataclass(frozen=True)
class Work:
    """A stretch of training."""

    name: str
    context: int
    batch_tokens: int
    tokens: int

    @property
    def sequences(self) -> int:
        """Of a step, each one context long."""
        return max(1, self.batch_tokens // self.context)

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / self.batch_tokens))


@dataclass(frozen=True)
class Layout:
    """data x context x pipeline GPUs; those of data x context share a stage's experts, `expert` ways."""

    data: int
    """Replicas, each with sequences of its own."""
    context: int
    """Parts that a sequence is cut into (KDA context parallelism: contiguous, equal)."""
    pipeline: int
    """Stages."""
    expert: int
    """Ways that a layer's experts are spread, tokens travelling to them; a divisor of data x context."""
    sharding: Sharding
    """What is spread over data x context: weights too, gathered layer by layer (FSDP), or the optimizer's states and
    masters alone (ZeRO-1), weights and gradients staying whole through a step."""
    recompute: Recompute
    """What keeps its input alone."""
    rows: int
    """Sequences of a micro-batch."""

    @property
    def gpus(self) -> int:
        return self.data * self.context * self.pipeline

    @property
    def shards(self) -> int:
        """GPUs that a stage is spread over."""
        return self.data * self.context

    def micro_batches(self, work: Work) -> int:
        """Of a step, for each replica."""
        return -(-work.sequences // (self.data * self.rows))

    def micro_tokens(self, work: Work) -> int:
        """Of a micro-batch, on one GPU."""
        return self.rows * work.context // self.context

    def idle(self, work: Work) -> float:
        """Share of the replicas' rows that have no sequence, as the step's do not divide among them."""
        return 1 - work.sequences / (self.micro_batches(work) * self.data * self.rows)


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: layers, and the parameters of all it holds."""

    layers: range
    sorts: Alike
    mixers: tuple[int, ...]
    """How many sources each of its attention-residual mixers reads; none without."""
    handed: int
    """Tensors that go to the next stage: the live sum and, with mixers, every finished block."""
    share: Share
    largest: Share
    """Of its layers, the one with most parameters."""
    last: bool
    ahead: int
    """Stages behind it, itself counted: micro-batches that it holds at most (1F1B)."""


def stages(config: K3Config, sizes: Sizes, number: int) -> list[Stage]:
    """The layers in as many equal runs, longer ones first; the embedding before the first, the head in the last."""
    L, every = len(sizes.layers), mixer_sources(config)
    lengths = [L // number + (s < L % number) for s in range(number)]
    made = []
    for s, (a, b) in enumerate(pairwise([0, *accumulate(lengths)])):
        held = [*sizes.layers[a:b]]
        held += [sizes.first] * (s == 0) + [sizes.last] * (s == number - 1)
        largest = max(sizes.layers[a:b], key=lambda share: share.total)
        sorts = alike(config, range(a, b))
        mixers = tuple(every[2 * a : 2 * b + (s == number - 1)])
        handed = every[2 * b] if every else 1
        made.append(Stage(range(a, b), sorts, mixers, handed, reduce(add, held), largest, s == number - 1, number - s))
    return made

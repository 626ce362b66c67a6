"""One reader for all ranks: the first rank has the data, and hands every rank its documents of each batch."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.data.packing import IGNORE, Batch
from perilune.data.tokenizer import ByteBPE
from perilune.train.config import Stage
from perilune.train.feed import Feed
from perilune.train.micro_batches import cut, target_counts
from perilune.train.parallel.ranks import Ranks


@dataclass(frozen=True)
class Part(Batch):
    """A rank's documents of a batch, perhaps none; or its shard of a row of them, with the whole row's boundaries."""

    size: int = 0
    """Tokens in the whole batch, of all ranks."""
    padding: int = 0
    parts: tuple["Part", ...] = ()
    """The same in micro-batches, as many on every rank, if the step is in several."""
    targets: dict[str, list[int]] | None = None
    """Then how many targets the losses have in the whole batch."""


class SharedFeed:
    """A `Feed` to every rank: the first one's, which it alone opens.

    So no rank can read another text than the others, and a run's place in its data is that of one process.
    """

    def __init__(self, ranks: Ranks, open_feed: Callable[[], Feed], further: int = 0) -> None:
        """further: how many layers predict further tokens."""
        self.ranks = ranks
        self._further = further
        self._micro_tokens: int | None = None
        self._feed: Feed | None = None

        def tokenizer() -> ByteBPE:
            self._feed = open_feed()
            return self._feed.tokenizer

        self.tokenizer = ranks.from_first(tokenizer)

    @property
    def feed(self) -> Feed:
        """The feed itself, on the first rank alone."""
        assert self._feed is not None, "only the first rank reads"
        return self._feed

    def begin(self, stage: Stage) -> None:
        """See `Feed`."""
        self.ranks.from_first(lambda: self.feed.begin(stage))
        self._micro_tokens = stage.micro_tokens

    def next(self) -> Batch:
        """This rank's part of the next batch."""
        context, micro, stages = self.ranks.layout.context, self._micro_tokens, self.ranks.stages

        def parts() -> list[Part]:
            batch = self.feed.next()
            rows = dealt(batch, self.ranks.size // (context * stages))
            whole = [shard for row in rows for shard in shards(row, context)]
            passes = in_passes(rows, None if micro is None else micro * context)
            if len(passes[0]) == 1:
                return whole * stages  # one stage's ranks after the other's
            own = [shard for row in passes for shard in zip(*(shards(part, context) for part in row))]
            targets = target_counts(batch, self._further)
            return [replace(part, parts=each, targets=targets) for part, each in zip(whole, own)] * stages

        return self.ranks.scatter(parts)

    def state_dict(self) -> dict[str, Any]:
        """See `Feed`; on the first rank alone, empty elsewhere."""
        return self.feed.state_dict() if self.ranks.first else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Feed`."""
        self.ranks.from_first(lambda: self.feed.load_state_dict(state))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)  # corpora, held_out and whatever else only who speaks has to know


def dealt(batch: Batch, ranks: int) -> list[Part]:
    """A batch's documents dealt to so many ranks, the longest first to whoever has the fewest tokens.

    A document stays whole, for it is one thing to recurrent layers and attention, so ranks have unequal parts, and none
    at all where there are fewer documents than ranks.  Each part keeps the batch's order.
    """
    spans = list(itertools.pairwise(batch.cu_seqlens.tolist()))
    tokens, mine = [0] * ranks, [[] for _ in range(ranks)]  # type: ignore[var-annotated]
    for n in sorted(range(len(spans)), key=lambda n: (spans[n][0] - spans[n][1], n)):
        rank = tokens.index(min(tokens))
        tokens[rank] += spans[n][1] - spans[n][0]
        mine[rank].append(n)
    return [part_of(batch, [spans[n] for n in sorted(numbers)]) for numbers in mine]


def part_of(batch: Batch, spans: list[tuple[int, int]]) -> Part:
    """The documents of a batch at these places."""

    def of(x: Tensor) -> Tensor:
        return torch.cat([x[:, :0], *(x[:, start:end] for start, end in spans)], 1)

    return Part(
        of(batch.input_ids),
        of(batch.labels),
        torch.tensor([0, *itertools.accumulate(end - start for start, end in spans)]),
        None if batch.answers is None else of(batch.answers),
        size=batch.size,
    )


def in_passes(rows: list[Part], tokens: int | None) -> list[list[Part]]:
    """Every row in parts of at most so many tokens, as many of each, the last perhaps empty: ranks pass together."""
    cut_up = [[_of(part) for part in cut(row, tokens)] for row in rows]
    most = max(map(len, cut_up))
    return [parts + [part_of(row, [])] * (most - len(parts)) for row, parts in zip(rows, cut_up)]


def _of(batch: Batch) -> Part:
    return Part(batch.input_ids, batch.labels, batch.cu_seqlens, batch.answers, size=batch.size)


def shards(row: Part, ranks: int) -> list[Part]:
    """A row cut into so many contiguous shards of one length, filled up at its end if need be.

    What fills it is the row's first token again, documents of one token each: what attention computes of them it has
    computed already, so that not even a maximum over tokens changes.
    """
    padding = -row.input_ids.shape[1] % ranks

    def cut(x: Tensor, fill: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([x, fill.expand(1, padding)], 1).chunk(ranks, 1) if x.shape[1] else (x,) * ranks

    nothing = row.labels.new_tensor(IGNORE)
    ids, labels = cut(row.input_ids, row.input_ids[:, :1]), cut(row.labels, nothing)
    answers = (None,) * ranks if row.answers is None else cut(row.answers, nothing)
    end = int(row.cu_seqlens[-1])
    cu = torch.cat([row.cu_seqlens, torch.arange(end + 1, end + padding + 1)])
    return [Part(i, label, cu, answer, row.size, padding) for i, label, answer in zip(ids, labels, answers)]


def check_rule(kind: str) -> None:
    """Raises ConfigError for a balancer whose loss is not a sum over ranks."""
    if kind == "aux":
        raise ConfigError(
            "model.balance.kind: expected a rule without a loss of its own on several ranks, got 'aux'; "
            "use 'quantile', or one rank"
        )

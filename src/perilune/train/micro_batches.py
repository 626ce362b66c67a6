"""A step's batch in parts that go through the model one after the other.

What is summed over the parts is what one pass would give: documents stay whole, and every loss is divided by the
targets of the whole batch, however they fall on the parts.
"""

from itertools import pairwise

from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.data.packing import IGNORE, Batch
from perilune.models.k3.model import K3Output, shifted


def cut(batch: Batch, tokens: int | None) -> list[Batch]:
    """Its documents in their order, as few parts of at most `tokens` as there can be; None for all at once.

    Raises ConfigError where a document alone is longer.
    """
    cu = batch.cu_seqlens.tolist()
    if tokens is None or cu[-1] <= tokens:
        return [batch]
    longest = max(end - start for start, end in pairwise(cu))
    if longest > tokens:
        raise ConfigError(
            f"micro_tokens: expected at least {longest}, the longest document of this batch, got {tokens}; "
            "raise it, or shorten the stage's context"
        )
    edges = [0]  # indices into cu
    for i, end in enumerate(cu):
        if end - cu[edges[-1]] > tokens:
            edges.append(i - 1)
    edges.append(len(cu) - 1)
    return [_part(batch, cu, first, last) for first, last in pairwise(edges)]


def _part(batch: Batch, cu: list[int], first: int, last: int) -> Batch:
    """Documents `first` to before `last`."""
    tokens = slice(cu[first], cu[last])
    return Batch(
        batch.input_ids[:, tokens],
        batch.labels[:, tokens],
        batch.cu_seqlens[first : last + 1] - cu[first],
        None if batch.answers is None else batch.answers[:, tokens],
    )


def target_counts(batch: Batch, further: int) -> dict[str, list[int]]:
    """How many targets each of the model's losses has, as `K3Model` takes them.

    further: how many layers predict further tokens.
    """
    cu, ahead = batch.cu_seqlens.tolist(), [batch.labels]
    for _ in range(further):
        ahead.append(shifted(ahead[-1], cu))
    counts = {"next_token": [_number(batch.labels)], "mtp": [_number(targets) for targets in ahead[1:]]}
    return counts if batch.answers is None else {**counts, "answers": [_number(batch.answers)]}


def add_losses(sums: dict[str, Tensor], output: K3Output) -> None:
    """Adds a part's losses to those of the parts before it, the one that is minimised first."""
    assert output.loss is not None
    for name, loss in {"loss": output.loss.detach(), **output.losses}.items():
        sums[name] = sums[name] + loss if name in sums else loss


def _number(targets: Tensor) -> int:
    return int((targets.numpy() != IGNORE).sum())

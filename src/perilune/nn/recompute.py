"""Activations that the backward pass computes again instead of keeping them: `torch.utils.checkpoint`, as used here."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


def recomputed(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, of which the backward pass keeps the tensors among `args` alone; it runs once more there.

    The graph, and with it every bit of the gradients, is that of a plain call: the second run only fills in what the
    first one did not keep.  So it must compute the same.  Random numbers are not put back; decisions on which shapes
    depend are, if they pass through `decided`; what a forward notes down beside its result it must note down once
    (`recomputing`).  Calls may be nested.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    record = _Record()

    def run(*args: Any) -> T:
        record.begin()
        token = _records.set((*_records.get(), record))
        try:
            return function(*args)
        finally:
            _records.reset(token)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def recomputing() -> bool:
    """Whether a forward is running for the second time: only then is autograd's engine at work."""
    return torch._C._current_graph_task_id() != -1


def decided(choose: Callable[[], Tensor]) -> Tensor:
    """What `choose()` gives; inside a second run, what it gave in the first.

    Which experts a token takes must not change because a score came out a bit apart, as sums in another order do.
    """
    if torch.compiler.is_compiling():
        return choose()
    records = _records.get()
    known = next((record for record in records if record.again), None)
    value = choose() if known is None else known.next()
    for record in records:
        if not record.again:
            record.values.append(value)
    return value


class _Record:
    """The decisions of one function's first run, in their order."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.runs = 0
        self.place = 0

    def begin(self) -> None:
        self.runs, self.place = self.runs + 1, 0

    @property
    def again(self) -> bool:
        return self.runs > 1

    def next(self) -> Tensor:
        self.place += 1
        return self.values[self.place - 1]


_records: ContextVar[tuple[_Record, ...]] = ContextVar("_records", default=())
"""Of the functions that run now in this thread, the outermost first: a backward pass has threads of its own."""

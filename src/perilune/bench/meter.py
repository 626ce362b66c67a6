"""Measures calls on a GPU by its own clock."""

import time
from collections.abc import Callable
from statistics import median

import torch

BUDGET_MS = 120.0
"""A call is repeated for about this long, at least 3 and at most 100 times."""
ONCE_S = 0.1
"""A call that takes longer is timed once: it is far from what it is compared with."""
LIMIT_S = 1.0
"""A call that takes longer is not worth repeating."""

Call = Callable[[], object]


class TooSlow(Exception):
    """A call takes over LIMIT_S."""


class Meter:
    def median_ms(self, call: Call) -> float:
        """Of the time between events around calls that are queued one behind the other, as a model queues them.

        The first call compiles and tunes, the second says how many are affordable, and is the only one to count where
        it takes over ONCE_S.  Raises TooSlow.
        """
        call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if seconds > LIMIT_S:
            raise TooSlow(f"{seconds:.1f} s a call, over {LIMIT_S:g} s")
        if seconds > ONCE_S:
            return begin.elapsed_time(end)
        runs = min(100, max(3, round(BUDGET_MS / 1e3 / seconds)))
        for _ in range(runs // 4):  # brings the clock up
            call()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for begin, end in pairs:
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in pairs)

    def held(self) -> int:
        """Bytes of tensors that live now."""
        return torch.cuda.memory_allocated()

    def peak(self, call: Call) -> int:
        """Bytes of tensors that live at once during a call."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def captured(self, call: Call) -> Call:
        """The call as a CUDA graph, whose replay launches everything at once; its tensors have to outlive it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles before anything is captured
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

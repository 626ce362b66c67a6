"""What a profiler saw, by kind of work.

A kernel's kind follows from its name where the name says it; otherwise from what was going on on the host when it was
launched: operations lie inside one another there, and the innermost that says something decides.  Kernels are joined to
their launches by the profiler's correlation numbers.  Without a device the host's operations themselves are counted,
each without those inside it.
"""

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_HOST = ("cpu_op", "user_annotation")

KERNELS: dict[str, tuple[str, ...]] = {  # kind: what the name of one of its kernels begins with
    "KDA": (
        "prepare_", "solve_", "scan_", "reverse_scan_", "value_grads_", "key_grads_", "border_", "pair_grads_",
        "conv_kernel", "conv_grads_", "filter_grads_", "state_grads_", "final_state_", "final_grads_",
    ),
    "experts": (
        "row_product_", "outer_product_", "spread_", "gather_kernel", "slopes_", "count_kernel", "blocks_kernel",
        "tiles_kernel", "place_kernel",
    ),
    "attention residuals": ("mix_kernel", "unmix_kernel", "score_kernel", "bank_kernel", "merge_kernel"),
    "routing and balance": ("histogram_kernel", "route_kernel", "route_grads_kernel"),
}  # fmt: skip
ATTENTION = ("flash", "fmha", "cudnn_generated_fort_native_sdpa", "scaled_dot_product", "sdpa", "mha_")
PRODUCTS = ("gemm", "nvjet", "cutlass", "cublas", "splitk", "gemv", "matmul", "xmma", "dot_kernel")

OUTERMOST: dict[str, tuple[str, ...]] = {  # decides wherever it stands around
    "optimizer": ("Optimizer.step#", "Optimizer.zero_grad#"),
    "routing and balance": ("balance",),
}
INSIDE: dict[str, tuple[str, ...]] = {  # kind: operations and autograd's nodes that are all of one kind
    "attention": ("scaled_dot_product", "ScaledDotProduct"),
    "KDA": ("_Chunked", "ShortConv", "_Border", "ChunkKDA", "CausalConv1d"),
    "experts": ("_GroupedExperts", "grouped_mm", "GroupedMm"),
    "attention residuals": ("AttnRes", "Attnres", "Stacked", "_Shared"),
    "head and loss": ("_LinearCrossEntropy", "FusedLinearCrossEntropy"),
    "routing and balance": ("aten::topk", "aten::sort", "aten::histc", "aten::searchsorted"),
    "products": ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot"),
    "copies": ("aten::copy_", "aten::fill_", "aten::zero_", "Memcpy", "Memset"),
}
REST = "elementwise and norms"
GAPS = "gaps"


@dataclass
class Spent:
    """Seconds of a kind, and in how many kernels (operations, on a CPU)."""

    seconds: float = 0.0
    count: int = 0
    longest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by name."""

    def add(self, name: str, seconds: float) -> None:
        self.seconds += seconds
        self.count += 1
        self.longest[name] += seconds


def kind_of(name: str, around: Sequence[str]) -> str:
    """name: of a kernel, or of an operation.  around: the operations it lies in, outermost first."""
    for kind, starts in OUTERMOST.items():
        if any(within.startswith(starts) for within in (*around, name)):
            return kind
    for kind, starts in KERNELS.items():
        if name.startswith(starts):
            return kind
    for kind in ("head and loss", "attention", "KDA", "experts", "attention residuals", "routing and balance"):
        if any(part in within for part in INSIDE[kind] for within in (*around, name)):
            return kind
    lower = name.lower()
    if any(part in lower for part in ATTENTION):
        return "attention"
    if any(part in lower for part in PRODUCTS):
        return "products"
    for within in (name, *reversed(around)):
        for kind in ("products", "copies"):
            if within.startswith(INSIDE[kind]):
                return kind
    return REST


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that `torch.profiler` exported."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def by_kind(events: Iterable[dict[str, Any]], wall: float) -> dict[str, Spent]:
    """Seconds by kind, the largest first, then the gaps: what is left of `wall` seconds when nothing of it ran."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in spans if event.get("cat") in ON_DEVICE]
    host = _Nested([event for event in spans if event.get("cat") in ON_HOST])
    found: dict[str, Spent] = defaultdict(Spent)
    if kernels:
        launched = {
            event["args"]["correlation"]: event
            for event in spans
            if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
        }
        for kernel in kernels:
            launch = launched.get(kernel.get("args", {}).get("correlation"))
            around = host.around(launch) if launch is not None else []
            found[kind_of(kernel["name"], around)].add(kernel["name"], kernel["dur"] / 1e6)
        busy = covered((kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels) / 1e6
    else:
        for name, around, microseconds in host.own_times():
            found[kind_of(name, around)].add(name, microseconds / 1e6)
        busy = sum(spent.seconds for spent in found.values())
    ordered = dict(sorted(found.items(), key=lambda item: -item[1].seconds))
    return {**ordered, GAPS: Spent(max(wall - busy, 0.0), 0)}


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of their union: kernels on several streams run at the same time."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


class _Nested:
    """The host's operations, a stack for each thread at any time."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._threads: dict[Any, list[tuple[float, float, str, int]]] = {}  # start, stop, name, the one around
        self._starts: dict[Any, list[float]] = {}
        threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            threads[event["pid"], event["tid"]].append(event)
        for thread, own in threads.items():
            spans: list[tuple[float, float, str, int]] = []
            open_: list[int] = []
            for event in sorted(own, key=lambda x: (x["ts"], -x["dur"])):
                start, stop = event["ts"], event["ts"] + event["dur"]
                while open_ and spans[open_[-1]][1] < stop:
                    open_.pop()
                spans.append((start, stop, event["name"], open_[-1] if open_ else -1))
                open_.append(len(spans) - 1)
            self._threads[thread] = spans
            self._starts[thread] = [span[0] for span in spans]

    def around(self, event: dict[str, Any]) -> list[str]:
        """Names of the operations in which it begins, outermost first."""
        thread, at = (event["pid"], event["tid"]), event["ts"]
        if thread not in self._threads:
            return []
        spans = self._threads[thread]
        i = bisect_right(self._starts[thread], at) - 1
        while i >= 0 and spans[i][1] < at:
            i = spans[i][3]
        return self._path(spans, i)

    def own_times(self) -> Iterable[tuple[str, list[str], float]]:
        """Of every operation its name, those around it, and its time without those inside."""
        for spans in self._threads.values():
            own = [stop - start for start, stop, _, _ in spans]
            for start, stop, _, outer in spans:
                if outer >= 0:
                    own[outer] -= stop - start
            for i, (_, _, name, outer) in enumerate(spans):
                yield name, self._path(spans, outer), max(own[i], 0.0)

    @staticmethod
    def _path(spans: list[tuple[float, float, str, int]], i: int) -> list[str]:
        names = []
        while i >= 0:
            names.append(spans[i][2])
            i = spans[i][3]
        return names[::-1]

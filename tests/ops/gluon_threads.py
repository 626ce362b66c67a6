"""Gluon for Hopper, as far as the experts' kernels use it, in threads of Python: no GPU, no Triton.

Every partition of a program is a thread, and barriers count arrivals and bytes as the hardware does.  Of all orders the
hardware may choose, the ones that hurt most: copies land at once, where somebody may still be reading; products and
copies out read their operands only when they are waited for, when somebody may have written over them.
Layouts, fences and rounding of shared memory are not there.
"""

import random
import runpy
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

PATIENCE = 10.0
"""Seconds after which a wait is a deadlock."""


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.expected = self.missing = self.bytes = 0

    def init(self, count: int) -> None:
        self.expected = self.missing = count

    def count(self, arrivals: int, size: int) -> None:
        time.sleep(random.random() * 1e-3 if random.random() < 0.02 else 0)
        with self.changed:
            self.missing -= arrivals
            self.bytes += size
            assert self.missing >= 0, "more arrivals than expected"
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.expected
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            passed = self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE)
        assert passed, f"deadlock in phase {self.phase}: {self.missing} arrivals and {self.bytes} bytes are missing"


class Memory:
    """Shared memory: float32, NaN at first; or barriers."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def index(self, i: int) -> Any:
        assert 0 <= i < len(self.x)
        return self.x[i] if isinstance(self.x, list) else Memory(self.x[i])

    def slice(self, start: int, length: int) -> "Memory":
        return Memory(self.x[start : start + length])

    def permute(self, order: tuple[int, int]) -> "Memory":
        return Memory(self.x.permute(order))

    def load(self, layout: Any) -> Tensor:
        return self.x.clone()

    def store(self, value: Tensor) -> None:
        self.x.copy_(value)


class Pointer:
    def __init__(self, x: Tensor, offset: Any = 0) -> None:
        self.x, self.offset = x.view(-1), offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.x, self.offset + offset)


class Descriptor:
    """x, its last dimension a row, in blocks; zeros behind its ends, and nothing is written there."""

    def __init__(self, x: Tensor, *block: int) -> None:
        self.x, self.block = x.view(-1, x.shape[-1]), block

    def at(self, corner: list[int]) -> Tensor:
        assert min(corner) >= 0
        return self.x[tuple(slice(first, first + side) for first, side in zip(corner, self.block))]


class Program(threading.local):
    """What a thread has under way."""

    def __init__(self) -> None:
        self.products: deque[Callable[[], Any]] = deque()
        self.stores: list[Callable[[], Any]] = []


own = Program()
place = {"id": 0, "of": 1}


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
    return Memory([Barrier() for _ in range(shape[0])] if dtype == torch.int64 else torch.full(shape, torch.nan))


def load(pointer: Pointer) -> int:
    return int(pointer.x[pointer.offset])


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    offset, mask, value = torch.broadcast_tensors(pointer.offset, mask, value)
    pointer.x[offset[mask]] = value[mask].to(pointer.x.dtype)


def where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else yes if condition else no


def assembly(text: str, constraints: str, arguments: list[Tensor], **options: Any) -> Tensor:
    return {"rcp": torch.reciprocal, "tanh": torch.tanh}[text.split(".")[0]](*arguments)


def copy_in(source: Descriptor, corner: list[int], barrier: Barrier, target: Memory, pred: bool = True) -> None:
    if pred:
        assert target.x.shape == source.block
        block = source.at(corner)
        target.x.zero_()
        target.x[: block.shape[0], : block.shape[1]] = block
        barrier.count(0, -2 * target.x.numel())


def copy_out(target: Descriptor, corner: list[int], source: Memory) -> None:
    assert source.x.shape == target.block
    block = target.at(corner)
    own.stores.append(lambda: block.copy_(source.x[: block.shape[0], : block.shape[1]]))


def store_wait(left: int) -> None:
    assert left == 0
    while own.stores:
        own.stores.pop()()


def mma(a: Memory, b: Memory, sums: Tensor, is_async: bool) -> Tensor:
    own.products.append(lambda: sums.add_(a.x @ b.x))
    return sums


def mma_wait(left: int, sums: list[Tensor]) -> Any:
    while len(own.products) > left:
        own.products.popleft()()
    return sums[0] if len(sums) == 1 else sums


def warp_specialize(parts: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
    failures: list[str] = []

    def run(part: Callable, arguments: tuple) -> None:
        try:
            part(*arguments)
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)


def jit(function: Callable | None = None, **options: Any) -> Any:
    return function or (lambda function: function)


def kernels(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the file at `path` defines, for threads."""
    language = SimpleNamespace(
        constexpr=type("constexpr", (), {"__new__": lambda cls, x: x}),
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
        program_id=lambda axis: place["id"],
        num_programs=lambda axis: place["of"],
        load=load,
        store=store,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape),
        where=where,
        exp2=torch.exp2,
        inline_asm_elementwise=assembly,
        cast=lambda x, dtype: x,
        cdiv=lambda a, b: -(-a // b),
        minimum=min,
        static_range=range,
        thread_barrier=lambda: None,
        bfloat16=torch.bfloat16,
        float32=torch.float32,
        int64=torch.int64,
        **dict.fromkeys(
            ("NVMMADistributedLayout", "NVMMASharedLayout", "BlockedLayout", "SliceLayout"), lambda *parts: None
        ),
    )
    hopper = {
        "fence_async_shared": lambda: None,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, size, pred=True: barrier.count(1, size) if pred else None,
            arrive=lambda barrier, pred=True: barrier.count(1, 0) if pred else None,
            wait=lambda barrier, parity: barrier.wait(int(parity)),
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=store_wait
        ),
        "warpgroup_mma": mma,
        "warpgroup_mma_wait": mma_wait,
    }
    gluon = "triton.experimental.gluon"
    for name, contents in (
        ("triton.experimental", {"gluon": SimpleNamespace(jit=jit)}),
        (gluon, {"language": language}),
        (f"{gluon}.language.nvidia.hopper", hopper),
    ):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(path))


def launch(kernel: Callable, programs: int, *arguments: Any, **options: Any) -> None:
    """One program after the other."""
    for program in range(programs):
        place.update(id=program, of=programs)
        kernel(*arguments, **options)

"""Gluon for Hopper and what Triton shares with it, as far as kernels here use them, in threads of Python: no GPU.

Every partition of a program is a thread, and barriers count arrivals and bytes as the hardware does.  Of all orders the
hardware may choose, the ones that hurt most: a copy into shared memory wipes out at once what stood there, where
somebody may still be reading, and lands only when its barrier or group is waited for; products and copies out read
their operands only when they are waited for, when somebody may have written over them.

Numbers are rounded as their types say, and products of float32 cut to tf32.  Shared memory is bytes, NaN at first, and
may be seen as several types and shapes; so may a swizzled or linear layout be seen as another, but tiles for the tensor
cores lie in rows.  Pointers are addresses: what is read or written lies in a tensor that the kernel was given.  What a
thread stored has to be fenced before the asynchronous units read it.  Layouts of registers, and barriers within a
warpgroup, are not there.
"""

import inspect
import pkgutil
import random
import re
import runpy
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

PATIENCE = 10.0
"""Seconds after which a wait is a deadlock."""


# Values


class Value(Tensor):
    """A tensor or scalar of a kernel: nothing changes it in place."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **(kwargs or {}))
        if isinstance(out, tuple | list) and all(isinstance(x, Tensor) for x in out):
            return tuple(x.as_subclass(cls) for x in out)
        return out.as_subclass(cls) if isinstance(out, Tensor) else out

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def value(x: Any, dtype: torch.dtype | None = None) -> Value:
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


def constexpr(x: Any) -> Any:
    """x, with itself as its value."""
    if isinstance(x, int | float) and not isinstance(x, bool):
        return type(type(x).__name__, (type(x),), {"value": x})(x)
    return x


@dataclass(frozen=True)
class Layout:
    name: str
    parts: tuple

    @property
    def value(self) -> "Layout":
        return self


def frozen(x: Any) -> Any:
    return tuple(map(frozen, x)) if isinstance(x, list | tuple) else x


def where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, Pointer):
        return Pointer(yes.dtype.element_ty, torch.where(condition, yes.address, no.address))
    return torch.where(value(condition), yes, no).as_subclass(Value)


def of_one(operation: Callable) -> Callable:
    return lambda x: operation(value(x))


def of_two(operation: Callable) -> Callable:
    """Of tensors, or a tensor and a number."""

    def of_any(a: Any, b: Any) -> Any:
        kind = next((x.dtype for x in (a, b) if isinstance(x, Tensor)), None)
        return operation(*(x if isinstance(x, Tensor) else value(x, kind) for x in (a, b)))

    return of_any


def scan_along(x: Tensor, axis: int, combine: Callable) -> Tensor:
    parts = list(x.unbind(axis))
    for i in range(1, len(parts)):
        parts[i] = combine(parts[i - 1], parts[i])
    return torch.stack(parts, axis)


def reduce(xs: tuple[Tensor, ...], axis: int, combine: Callable) -> tuple[Tensor, ...]:
    while (n := xs[0].shape[axis]) > 1:
        halves = [x.split(n // 2, axis) for x in xs]
        xs = combine(*(h[0] for h in halves), *(h[1] for h in halves))
    return tuple(x.squeeze(axis) for x in xs)


def flushed(x: Tensor) -> Tensor:
    """Without numbers below the least normal one."""
    return torch.where(x.abs() < 2.0**-126, 0.0 * x, x)


ASSEMBLY: dict[str, Callable] = {  # by the names of its instructions
    "ex2": lambda x: flushed(torch.exp2(x)),
    "neg ex2": lambda x: flushed(torch.exp2(-x)),
    "rcp": lambda x: flushed(torch.reciprocal(flushed(x))),
    "tanh": torch.tanh,
    "shl and": lambda x: x.to(torch.float32),
    "setp cvt cvt selp": lambda x, above: torch.where(
        above != 0, x.to(torch.bfloat16).view(torch.int16), x.to(torch.float16).view(torch.int16)
    ),
}


def assembly(text: str, constraints: str, arguments: list[Any], dtype: torch.dtype, **options: Any) -> Tensor:
    steps = (step.strip() for step in re.split("[;{}]", text))
    y = ASSEMBLY[" ".join(step.split(".")[0] for step in steps if step and step[0] != ".")](*map(value, arguments))
    assert y.dtype == dtype
    return y


def product(a: Tensor, b: Tensor, exact: bool = False) -> Tensor:
    """a b, in float32; of factors in float32, which the tensor cores cut to tf32 unless `exact`."""
    assert a.dtype == b.dtype
    if a.dtype == torch.float32 and not exact:
        a, b = ((x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32) for x in (a, b))
    return a.float() @ b.float()


# Memory


class Storages:
    """Where the tensors that a kernel was given lie."""

    def __init__(self, tensors: list[Tensor]) -> None:
        held = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
        self.held = [held[start] for start in sorted(held)]
        self.starts = sorted(held)

    def find(self, addresses: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(x, index, which): `addresses[which]` are the elements `index` of x."""
        low, high = (bisect_right(self.starts, int(address)) - 1 for address in addresses.aminmax())
        for i in range(max(low, 0), high + 1):
            x = torch.empty(0, dtype=dtype).set_(self.held[i])
            which = (addresses >= self.starts[i]) & (addresses < self.starts[i] + x.numel() * x.element_size())
            yield x, (addresses[which] - self.starts[i]) // x.element_size(), which


class Pointer:
    """Addresses, of numbers of one type."""

    def __init__(self, dtype: torch.dtype, address: Tensor) -> None:
        self.dtype, self.address = SimpleNamespace(element_ty=dtype), address

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.dtype.element_ty, self.address + offset * self.dtype.element_ty.itemsize)

    def __sub__(self, offset: Any) -> "Pointer":
        return self + -offset


def live(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    """(addresses where mask is true, mask), one element for one of the pointer's."""
    address, mask = torch.broadcast_tensors(pointer.address, value(True if mask is None else mask))
    return address[mask].as_subclass(Tensor), mask


def load(pointer: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    addresses, mask = live(pointer, mask)
    dtype = pointer.dtype.element_ty
    found = torch.full(addresses.shape, torch.nan if dtype.is_floating_point else -(1 << 7)).to(dtype)
    left = addresses.numel()
    for x, index, which in place.storages.find(addresses, dtype) if left else ():
        found[which] = x[index]
        left -= index.numel()
    assert left == 0, "a kernel reads outside of its tensors"
    out = torch.full(mask.shape, torch.nan if other is None and dtype.is_floating_point else other or 0).to(dtype)
    out[mask.as_subclass(Tensor)] = found
    return out.as_subclass(Value)


def store(pointer: Pointer, x: Any, mask: Any = None, **hints: Any) -> None:
    dtype = pointer.dtype.element_ty
    addresses, mask = live(pointer, mask)
    x = torch.broadcast_to(value(x), mask.shape)[mask].as_subclass(Tensor).to(dtype)
    left = addresses.numel()
    for target, index, which in place.storages.find(addresses, dtype) if left else ():
        target[index] = x[which]
        left -= index.numel()
    assert left == 0, "a kernel writes outside of its tensors"


@dataclass
class Descriptor:
    """Blocks of a matrix; zeros behind its ends, and nothing is written there.  For kernels, and for their launches."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any = None

    @classmethod
    def from_tensor(cls, x: Tensor, block: list[int], layout: Any = None) -> "Descriptor":
        """Of x with its last dimension as rows."""
        x = x.view(-1, x.shape[-1])
        return cls(x, list(x.shape), list(x.stride()), block, layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=prod(self.block_shape) * self.dtype.itemsize)

    def at(self, corner: list[Any]) -> Tensor:
        """The part of a block that there is."""
        assert min(corner) >= 0
        step = self.base.element_size()
        assert self.base.data_ptr() % 16 == self.strides[0] * step % 16 == 0, "copies want multiples of 16 bytes"
        x = self.base.detach().as_strided(self.shape, self.strides)
        return x[tuple(slice(int(first), int(first) + side) for first, side in zip(corner, self.block_shape))]


class Buffer:
    """Bytes of shared memory."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.full([size], 0xFF, dtype=torch.uint8)  # a NaN of every type


@lru_cache(maxsize=256)
def offsets(shape: tuple[int, ...], layout: Any) -> Tensor:
    """Where each element of a shape lies."""
    index = torch.arange(prod(shape)).view(shape)
    name, parts = (layout.name, layout.parts) if isinstance(layout, Layout) else ("", ())
    if name == "SwizzledSharedLayout" and parts[0] * parts[2] > 1 and len(shape) > 1:
        vector, per_phase, phases = parts[:3]
        row, column = index // shape[-1] % shape[-2], index % shape[-1]
        moved = (column // vector ^ row // per_phase % phases) * vector + column % vector
        return index - column + moved
    if name == "SharedLinearLayout":
        (bases,) = parts
        rank = len(bases[0])
        linear = torch.empty(shape[-rank:], dtype=torch.int64)
        for i in range(linear.numel()):
            at = [0] * rank
            for bit, basis in enumerate(bases):
                if i >> bit & 1:
                    at = [a ^ b for a, b in zip(at, basis)]
            linear[tuple(at)] = i
        return linear + index[(..., *[slice(0, 1)] * rank)]
    return index


class Memory:
    """Shared memory, as numbers of one type in some shape."""

    def __init__(self, buffer: Buffer, dtype: torch.dtype, index: Tensor) -> None:
        self.buffer, self.dtype, self.index_of = buffer, dtype, index

    @property
    def shape(self) -> torch.Size:
        return self.index_of.shape

    @property
    def numbers(self) -> Tensor:
        return self.buffer.bytes.view(self.dtype)

    def part(self, index: Tensor) -> "Memory":
        return Memory(self.buffer, self.dtype, index)

    def index(self, i: Any) -> "Memory":
        assert 0 <= i < self.shape[0]
        return self.part(self.index_of[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Memory":
        return self.part(self.index_of.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Memory":
        return self.part(self.index_of.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Memory":
        assert self.index_of.numel() * self.dtype.itemsize == len(self.buffer.bytes)
        assert prod(shape) * dtype.itemsize <= len(self.buffer.bytes)
        return Memory(self.buffer, dtype, offsets(tuple(shape), layout))

    def read(self) -> Tensor:
        return self.numbers[self.index_of]

    def write(self, x: Any) -> None:
        self.numbers[self.index_of] = x

    def load(self, layout: Any) -> Value:
        return self.read().as_subclass(Value)

    def store(self, x: Tensor) -> None:
        assert (x.dtype, x.shape) == (self.dtype, self.shape)
        own.unfenced.add(self.buffer)
        self.write(x.as_subclass(Tensor))

    def fenced(self) -> "Memory":
        """Itself, for the asynchronous units to read."""
        assert self.buffer not in own.unfenced, "a fence is missing"
        return self


def allocate(dtype: torch.dtype, shape: list[int], layout: Any, x: Tensor | None = None) -> Any:
    if isinstance(layout, Layout) and layout.name == "MBarrierLayout":
        return Barriers(Barrier() for _ in range(shape[0]))
    memory = Memory(Buffer(prod(shape) * dtype.itemsize), dtype, offsets(tuple(shape), layout))
    if x is not None:
        memory.store(x)
    return memory


# What goes on at a time


def dawdle() -> None:
    """So that threads take turns in many ways."""
    time.sleep(random.random() * 1e-3 if random.random() < 0.1 else 0)


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.expected = self.missing = self.bytes = 0
        self.copies: list[tuple[int, Callable[[], None]]] = []  # under way, each with its phase
        place.barriers.append(self)

    def init(self, count: int) -> None:
        self.expected = self.missing = count

    def invalidate(self) -> None:
        assert self.expected, "no barrier stands there"
        self.expected = 0

    def count(self, arrivals: int, size: int, copy: Callable[[], None] | None = None) -> None:
        assert self.expected, "no barrier stands there"
        dawdle()
        with self.changed:
            if copy is not None:
                self.copies.append((self.phase, copy))
            self.missing -= arrivals
            self.bytes += size
            assert self.missing >= 0, "more arrivals than expected"
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.expected
                self.changed.notify_all()
        dawdle()

    def wait(self, parity: int) -> None:
        assert self.expected, "no barrier stands there"
        with self.changed:
            passed = self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE)
            assert passed, f"deadlock in phase {self.phase}: {self.missing} arrivals and {self.bytes} bytes are missing"
            landed = [copy for phase, copy in self.copies if phase < self.phase]
            self.copies = [(phase, copy) for phase, copy in self.copies if phase >= self.phase]
            for copy in landed:
                copy()


class Barriers(list):
    def index(self, i: Any) -> "Barriers":
        assert 0 <= i < len(self)
        return Barriers([self[int(i)]])

    def one(self) -> Barrier:
        (barrier,) = self
        return barrier


class Program(threading.local):
    """What a thread has under way."""

    def __init__(self) -> None:
        self.products: deque[Callable[[], Any]] = deque()
        self.stores: deque[Callable[[], Any]] = deque()
        self.groups: deque[list[Callable[[], Any]]] = deque([[]])  # of copies in, the last one open
        self.unfenced: set[Buffer] = set()

    def end(self) -> None:
        assert not self.products, "a product is not waited for"
        assert not self.stores, "a copy out of shared memory is not waited for"
        assert self.groups == deque([[]]), "a copy into shared memory is not waited for"
        self.unfenced.clear()


own = Program()
place = SimpleNamespace(id=0, of=1, storages=Storages([]), barriers=[])


def copy_in(source: Descriptor, corner: list[Any], barrier: Barriers, target: Memory, pred: Any = True) -> None:
    if not pred:
        return
    assert (list(target.shape), target.dtype) == (source.block_shape, source.dtype)
    block = source.at(corner)

    def land() -> None:
        whole = torch.zeros(target.shape, dtype=target.dtype)
        whole[tuple(slice(side) for side in block.shape)] = block
        target.write(whole)

    target.write(torch.nan)
    barrier.one().count(0, -source.block_type.nbytes, land)


def copy_out(target: Descriptor, corner: list[Any], source: Memory) -> None:
    assert (list(source.shape), source.dtype) == (target.block_shape, target.dtype)
    block = target.at(corner)
    source.fenced()
    own.stores.append(lambda: block.copy_(source.read()[tuple(slice(side) for side in block.shape)]))


def store_wait(left: int) -> None:
    while len(own.stores) > left:
        own.stores.popleft()()


def group_copy(target: Memory, pointer: Pointer, **hints: Any) -> None:
    target.write(torch.nan)
    own.groups[-1].append(lambda: target.write(load(pointer)))


def group_wait(left: int) -> None:
    while len(own.groups) - 1 > left:
        for copy in own.groups.popleft():
            copy()


def mma(a: Any, b: Memory, sums: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    out = torch.full_like(sums, torch.nan)
    left = a.fenced().read if isinstance(a, Memory) else lambda: a
    b.fenced()
    own.products.append(lambda: out.copy_(product(left(), b.read()) + (sums if use_acc else 0.0)))
    return out if is_async else mma_wait(0, [out])


def mma_wait(left: int, deps: list[Tensor]) -> Any:
    while len(own.products) > left:
        own.products.popleft()()
    return deps[0] if len(deps) == 1 else deps


def warp_specialize(parts: list[tuple[Callable, tuple]], warps: list[int], registers: list[int]) -> None:
    failures: list[str] = []

    @torch.no_grad()
    def run(part: Callable, arguments: tuple) -> None:
        try:
            part(*arguments)
            own.end()
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)


class Kernel:
    """A function of the device: called by others there, or launched from here."""

    def __init__(self, function: Callable) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self.launch(grid[0], arguments, options)

    @torch.no_grad()
    def launch(self, programs: int, arguments: tuple, options: dict[str, Any]) -> None:
        """One program after the other, in some order."""
        parameters = inspect.signature(self.function).parameters
        given = dict(zip(parameters, arguments)) | {k: x for k, x in options.items() if k in parameters}
        tensors = [x.base if isinstance(x, Descriptor) else x for x in given.values()]
        place.storages = Storages([x for x in tensors if isinstance(x, Tensor)])
        for name, x in given.items():
            if isinstance(x, Tensor):
                given[name] = Pointer(x.dtype, torch.tensor(x.data_ptr()))
            elif isinstance(x, float) and parameters[name].annotation is not constexpr:
                given[name] = value(x, torch.float32)
        for program in random.sample(range(programs), programs):
            place.id, place.of, place.barriers = value(program), programs, []
            self.function(**given)
            own.end()
            assert not any(barrier.copies for barrier in place.barriers), "a copy into shared memory is not waited for"
            # Or the compiler may put other numbers there while it is one to the hardware
            assert not any(barrier.expected for barrier in place.barriers), "a barrier is not retired at the end"


def jit(function: Callable | None = None, **options: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DotOperandLayout", "DistributedLinearLayout", "NVMMADistributedLayout",
    "NVMMASharedLayout", "SwizzledSharedLayout", "SharedLinearLayout",
)  # fmt: skip


def make_layout(name: str) -> Callable[..., Layout]:
    return lambda *parts: Layout(name, frozen(parts))


def dot(a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision: str = "tf32") -> Tensor:
    y = product(a, b, input_precision == "tf32x3")
    return y if acc is None else acc + y


SHARED = ("perilune.ops.barriers",)
"""Modules with functions of the device that several packages of kernels import."""


def languages() -> dict[str, dict[str, Any]]:
    """What Triton's modules have, by their names."""
    language = SimpleNamespace(
        constexpr=constexpr,
        dtype=torch.dtype,
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
        program_id=lambda axis: place.id,
        num_programs=lambda axis: place.of,
        load=load,
        store=store,
        arange=lambda start, end, layout=None: value(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout=None: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, layout=None: value(torch.full(shape, x, dtype=dtype)),
        zeros_like=torch.zeros_like,
        where=where,
        sum=lambda x, axis: torch.sum(x, axis),
        max=lambda x, axis: torch.amax(x, axis),
        associative_scan=scan_along,
        reduce=reduce,
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        trans=lambda x: Pointer(x.dtype.element_ty, x.address.mT) if isinstance(x, Pointer) else x.mT,
        join=lambda a, b: torch.stack(torch.broadcast_tensors(a, b), -1),
        split=lambda x: x.unbind(-1),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        dot=dot,
        **{name: of_one(getattr(torch, name)) for name in ("abs", "exp", "exp2", "log", "rsqrt")},
        inline_asm_elementwise=assembly,
        cast=lambda x, dtype: value(x).to(dtype),
        cdiv=lambda a, b: -(-a // b),
        minimum=of_two(torch.minimum),
        maximum=of_two(torch.maximum),
        static_range=range,
        static_assert=lambda condition: None,
        thread_barrier=lambda: None,
        debug_barrier=lambda: None,
        **{name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int16", "int32", "int64")},
        **{name: make_layout(name) for name in LAYOUTS},
    )
    hopper = {
        "fence_async_shared": lambda: own.unfenced.clear(),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=make_layout("MBarrierLayout"),
            init=lambda barrier, count: barrier.one().init(count),
            invalidate=lambda barrier: barrier.one().invalidate(),
            expect=lambda barrier, size, pred=True: barrier.one().count(1, size) if pred else None,
            arrive=lambda barrier, pred=True: barrier.one().count(1, 0) if pred else None,
            wait=lambda barrier, parity: barrier.one().wait(int(parity)),
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=store_wait
        ),
        "warpgroup_mma": mma,
        "warpgroup_mma_wait": mma_wait,
    }
    ampere = {
        "mma_v2": lambda a, b, acc: acc + product(a, b),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=group_copy,
            commit_group=lambda: own.groups.append([]),
            wait_group=group_wait,
        ),
    }
    gluon = "triton.experimental.gluon"
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    return {
        "triton": {
            "jit": jit,
            "language": language,
            "knobs": knobs,
            "cdiv": language.cdiv,
            "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        },
        "triton.language": vars(language),
        "triton.tools.tensor_descriptor": {"TensorDescriptor": Descriptor},
        "perilune.ops.launcher": {"Launcher": lambda kernel: kernel},
        "triton.experimental": {"gluon": SimpleNamespace(jit=jit)},
        gluon: {"language": language},
        f"{gluon}.language": vars(language),
        f"{gluon}.language.nvidia.ampere": ampere,
        f"{gluon}.language.nvidia.hopper": hopper,
        f"{gluon}.nvidia.hopper": {"TensorDescriptor": Descriptor},
    }


@contextmanager
def imports() -> Iterator[pytest.MonkeyPatch]:
    """What is imported meanwhile is for threads."""
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in languages().items():
            module = ModuleType(name)
            vars(module).update(contents)
            patch.setitem(sys.modules, name, module)
        for name in SHARED:
            origin = find_spec(name).origin
            shared = ModuleType(name)
            patch.setitem(sys.modules, name, shared)
            vars(shared).update(runpy.run_path(origin))
        yield patch


def kernels(path: Path) -> dict[str, Any]:
    """What the file at `path` defines, for threads."""
    with imports():
        return runpy.run_path(str(path))


@contextmanager
def simulated(package: str) -> Iterator[None]:
    """The modules of a package of kernels are for threads meanwhile, whoever imports them."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]

    parent, _, name = package.rpartition(".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module(parent), name, None, raising=False)
        for module in loaded():
            patch.delitem(sys.modules, module)
        with imports():
            for module in pkgutil.iter_modules(import_module(package).__path__, f"{package}."):
                import_module(module.name)
        try:
            yield
        finally:
            for module in loaded():
                del sys.modules[module]

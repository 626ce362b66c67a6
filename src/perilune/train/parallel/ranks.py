"""The ranks of a run: one process for each device, started by `torchrun`, or this process alone.

Collectives between devices go through the mesh; what ranks have to say to each other besides, through a gloo group on
the host, which waits long enough for rank 0 to read a corpus or to judge a model.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from perilune.core.errors import BackendError, ConfigError
from perilune.train.parallel.layout import Layout

T = TypeVar("T")
PATIENCE = timedelta(hours=24)
"""How long ranks wait for one that is at work alone; one that has ended is noticed at once."""


class Ranks:
    """`Ranks()` is this process alone; `Ranks("cpu")`, or "cuda", is all processes of the default group, laid out.

    mesh: dimensions "pp", the stages of a pipeline, "dp", whose ranks have documents of their own, and "cp", over whose
        ranks rows are cut.
    flat_mesh: the ranks of this one's stage in one dimension, "dp_cp".
    expert_mesh: the same otherwise, "ep" over whose neighbours experts are spread, "dp_shard" the rest.
    """

    def __init__(self, kind: str | None = None, layout: Layout | None = None) -> None:
        self.layout = layout or Layout()
        self.size, self.rank = 1, 0
        self.stages, self.stage = 1, 0
        """How many a pipeline has, and which of them this rank is in."""
        self.mesh: DeviceMesh | None = None
        self.flat_mesh: DeviceMesh | None = None
        self.expert_mesh: DeviceMesh | None = None
        self.control: dist.ProcessGroup | None = None
        self.tokens: dist.ProcessGroup | None = None
        """All ranks that have different tokens, those of a stage; None where this process is alone."""
        self.all: dist.ProcessGroup | None = None
        """The ranks of all stages."""
        self.context: dist.ProcessGroup | None = None
        """The ranks that have the other shards of this one's rows; None where rows are not cut."""
        self.across: dist.ProcessGroup | None = None
        """The ranks that have this one's tokens in the other stages; None without a pipeline, as are the next two."""
        self.forth: dist.ProcessGroup | None = None
        """All ranks, for what goes to the next stage."""
        self.back: dist.ProcessGroup | None = None
        """And what goes to the one before: on a GPU neither way may wait for the other."""
        if kind is None:
            return
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        pp, cp, ep = self.layout.pipeline, self.layout.context, self.layout.expert
        self.layout.check(self.size, ep, pp)
        each = self.size // pp
        self.stages, self.stage = pp, self.rank // each
        self.mesh = init_device_mesh(kind, (pp, each // cp, cp), mesh_dim_names=("pp", "dp", "cp"))
        self.flat_mesh = init_device_mesh(kind, (pp, each), mesh_dim_names=("pp", "dp_cp"))["dp_cp"]
        if ep > 1:
            names = ("pp", "dp_shard", "ep")
            self.expert_mesh = init_device_mesh(kind, (pp, each // ep, ep), mesh_dim_names=names)["dp_shard", "ep"]
        self.control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.tokens = self.all = self.flat_mesh.get_group()
        self.context = self.mesh.get_group("cp") if cp > 1 else None
        if pp > 1:
            self.all, self.across = dist.group.WORLD, self.mesh.get_group("pp")
            self.forth, self.back = dist.new_group(), dist.new_group()

    @property
    def first(self) -> bool:
        """Whether this is the rank that reads, writes and speaks."""
        return self.rank == 0

    @property
    def leads(self) -> bool:
        """Whether this is its stage's first."""
        return self.rank == self.stage * (self.size // self.stages)

    # on devices

    def sum_(self, x: Tensor) -> Tensor:
        """x summed over the ranks of all stages, in place."""
        if self.all is not None:
            dist.all_reduce(x, group=self.all)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """The largest of the ranks that have different tokens, in place."""
        if self.tokens is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.tokens)
        return x

    def figures(self, grads: list[Tensor], losses: list[Tensor]) -> Tensor:
        """The norm of all gradients, then the losses summed over ranks: one tensor, the same on every rank.

        Every number of a gradient lies on one rank, so the squares of the ranks' norms add up.
        """
        norm = get_total_norm([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads])
        if self.tokens is None:
            return torch.stack([norm, *losses])
        parts = self.sum_(torch.stack([norm.double().square(), *losses]))  # float64: a square must not overflow
        return torch.cat([parts[:1].sqrt(), parts[1:]])

    # on the host

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        if self.control is None:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        return bool(flags)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on the first rank, on all of them; what it raises there, they all raise."""
        if self.control is None:
            return make()
        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = make()
            except Exception as error:
                said[1] = error
        dist.broadcast_object_list(said, src=0, group=self.control)
        if said[1] is not None:
            raise said[1]
        return said[0]

    def only_first(self, make: Callable[[], T]) -> T | None:
        """What `make` gives on the first rank, there alone; what it raises, they all raise."""
        made: list[T] = []
        self.from_first(lambda: made.append(make()))
        return made[0] if made else None

    def scatter(self, make: Callable[[], list[Any]]) -> Any:
        """To every rank its item of the list that `make` gives on the first one; errors as in `from_first`."""
        if self.control is None:
            return make()[0]
        items: list[Any] | None = None
        if self.first:
            try:
                items = [(item, None) for item in make()]
            except Exception as error:
                items = [(None, error)] * self.size
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, items, src=0, group=self.control)
        item, failure = mine[0]
        if failure is not None:
            raise failure
        return item

    def names(self, own: Iterable[str]) -> set[str]:
        """Those of all stages, on every rank."""
        if self.stages == 1:
            return set(own)
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, set(own), group=self.control)
        return set().union(*every)

    def to_first(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the first rank also what the first ranks of other stages give, on the CPU, one tensor at a time; what is
        given elsewhere.  Every rank has to call it."""
        whole = dict(tensors)
        for leader in range(self.size // self.stages, self.size, self.size // self.stages):
            if self.rank == leader:
                alike = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
                dist.send_object_list([alike], dst=0, group=self.control)
                for tensor in tensors.values():
                    dist.send(tensor.cpu().contiguous(), dst=0, group=self.control)
            elif self.first:
                listed: list[Any] = [None]
                dist.recv_object_list(listed, src=leader, group=self.control)
                for name, shape, dtype in listed[0]:
                    whole[name] = torch.empty(shape, dtype=dtype)
                    dist.recv(whole[name], src=leader, group=self.control)
        return whole

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """All ranks get to the end of the block, or all raise: each its own error, or else that of the lowest rank."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        if self.control is not None:
            every: list[Any] = [None] * self.size
            dist.all_gather_object(every, own, group=self.control)
            own = own or next((error for error in every if error is not None), None)
        if own is not None:
            raise own


def launched() -> bool:
    """Whether `torchrun` started this process, as one of several or alone."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


@contextmanager
def joined(device: str, layout: Layout | None = None) -> Iterator[tuple[Ranks, str]]:
    """The ranks that `torchrun` started, and this one's device, of the kind of `device`; alone, if it started none.

    Raises ConfigError where a device is named by number, there are fewer than ranks on this machine, or ranks do not
    divide as the layout says.
    """
    if not launched():
        if layout is not None:
            layout.check(1, layout.expert, layout.pipeline)
        yield Ranks(), device
        return
    kind, _, number = device.partition(":")
    if number not in ("", "0"):
        raise ConfigError(f"--device: expected cuda on several ranks, got {device}; each takes the GPU of its number")
    if kind == "cuda":
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise ConfigError(f"nproc-per-node: expected at most {there}, one for each GPU, got more; start fewer")
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing writes into it
        yield Ranks(kind, layout), device
    dist.destroy_process_group()  # not after an error: the other ranks may be waiting


@contextmanager
def explained(ranks: Ranks) -> Iterator[None]:
    """Says in one line that another rank has ended, in place of what gloo or NCCL say."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if ranks.mesh is None or not (isinstance(error, dist.DistError) or "gloo" in text or "onnection" in text):
            raise
        raise BackendError(f"ranks: expected all to go on, lost one ({text[:200]}); see what it said") from error

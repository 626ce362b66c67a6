"""Processes of this machine as the ranks of a gloo group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(ranks: int, folder: Path, check: Callable[..., None], *args: Any) -> None:
    """Calls check(rank, ranks, *args), a function of a module, in so many processes at once; raises what one raises."""
    loaded_once = [
        "perilune.nn",
        "perilune.train.loop",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "pytest",
    ]
    mp.set_forkserver_preload(loaded_once)
    mp.start_processes(_as_rank, args=(ranks, str(folder), check, args), nprocs=ranks, start_method="forkserver")


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """This process as a group of one."""
    _join(0, 1, str(folder))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _as_rank(rank: int, ranks: int, folder: str, check: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    _join(rank, ranks, folder)
    check(rank, ranks, *args)
    dist.destroy_process_group()


def _join(rank: int, ranks: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=3))

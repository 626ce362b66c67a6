"""The kernels as functions of tensors: how the rows and channels are divided among programs."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.fused import processors
from perilune.ops.short_conv.kernels.backward import conv_grads_kernel, filter_grads_kernel
from perilune.ops.short_conv.kernels.forward import conv_kernel
from perilune.ops.short_conv.kernels.states import final_grads_kernel, final_state_kernel, state_grads_kernel
from perilune.ops.upload import on_device

WIDTH = 128  # channels of a program, which is one warp: 4 to a thread
ROWS = 8  # under way in a program
LEAST = 32  # rows of a program, for it reads up to 2 (W-1) beside its own
FORWARD, BACKWARD = 20, 10  # programs on a processor: what registers leave room for


class Documents(NamedTuple):
    """Of a packed row, on its device."""

    bounds: Tensor  # [N+1] int32
    number: Tensor  # [T] int32, which document a row is of
    before: Tensor  # [T] int32, rows of the document before it


def documents_of(cu: list[int] | None, device: torch.device) -> Documents | None:
    return None if cu is None else _documents(tuple(cu), device)


@lru_cache(maxsize=16)  # the convolutions of a model share them
def _documents(cu: tuple[int, ...], device: torch.device) -> Documents:
    """The host writes the boundaries; what is as long as the row is made on the device."""
    bounds = on_device(torch.tensor(cu, dtype=torch.int32), device)
    rows = torch.arange(cu[-1], dtype=torch.int32, device=device)
    number = torch.searchsorted(bounds[1:], rows, right=True, out_int32=True)
    return Documents(bounds, number, rows - bounds.index_select(0, number))


class Plan(NamedTuple):
    """How x [B, T, D] is divided: a program takes WIDTH channels of `length` rows of one sequence."""

    length: int  # a multiple of ROWS
    chunks: int  # of a sequence
    groups: int  # of all sequences
    programs: int


@lru_cache
def plan(shape: torch.Size, programs: int) -> Plan:
    """As equal a share as there is for each of so many programs."""
    B, T, D = shape
    chunks = max(min(programs // max(B * tiles(D), 1), T // LEAST), 1)
    length = ROWS * -(-T // (chunks * ROWS))
    chunks = -(-T // length) if T else 0
    return Plan(length, chunks, B * chunks, B * chunks * tiles(D))


def tiles(D: int) -> int:
    return -(-D // WIDTH)


def convolve(
    x: Tensor, weight: Tensor, state: Tensor | None, documents: Documents | None, activate: bool
) -> Tensor:  # fmt: skip
    """y [B, T, D] of x [B, T, D], whose rows are dense; weight [D, W] and state [N, W-1, D] are in one piece."""
    (_, T, D), W, cut = x.shape, weight.shape[1], plan(x.shape, FORWARD * processors(x.device))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    number, before = (None, None) if documents is None else documents[1:]
    if cut.programs:
        conv_kernel[(cut.programs,)](
            x, weight, state, number, before, y, T, cut.length, cut.chunks, x.stride(0), x.stride(1),
            D=D, W=W, ACTIVATE=activate, ROWS=ROWS, WIDTH=WIDTH, num_warps=1,
        )  # fmt: skip
    return y


def gradients(
    x: Tensor, weight: Tensor, state: Tensor | None, documents: Documents | None, activate: bool, dy: Tensor,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Those of x and weight, as far as wanted.

    Sums over rows are taken in an order of their own, which shapes and the device alone decide.
    """
    (_, T, D), W, cut = x.shape, weight.shape[1], plan(x.shape, BACKWARD * processors(x.device))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted[0] else None
    dtaps = torch.empty(cut.groups, W, D, dtype=torch.float32, device=x.device) if wanted[1] else None
    number, before = (None, None) if documents is None else documents[1:]
    if cut.programs and any(wanted):
        conv_grads_kernel[(cut.programs,)](
            x, weight, state, number, before, dy, dx, dtaps, T, cut.length, cut.chunks,
            x.stride(0), x.stride(1), dy.stride(0), dy.stride(1),
            D=D, W=W, ACTIVATE=activate, ROWS=ROWS, WIDTH=WIDTH, num_warps=1,
        )  # fmt: skip
    return dx, None if dtaps is None else filter_gradient(dtaps, weight)


def filter_gradient(dtaps: Tensor, weight: Tensor) -> Tensor:
    """dtaps [G, W, D] summed to the shape and dtype of weight [D, W]."""
    G, W, D = dtaps.shape
    dweight = torch.empty_like(weight)
    if D:
        filter_grads_kernel[(-(-D // 32) * W,)](dtaps, dweight, G, D=D, W=W, ROWS=64, WIDTH=32, num_warps=4)
    return dweight


def state_gradient(
    x: Tensor, weight: Tensor, state: Tensor, documents: Documents | None, activate: bool, dy: Tensor
) -> Tensor:
    """That of state [N, W-1, D]."""
    (_, T, D), N = x.shape, len(state)
    dstate = torch.empty_like(state)
    bounds = None if documents is None else documents.bounds
    if dstate.numel():
        state_grads_kernel[(N * tiles(D),)](
            x, weight, state, bounds, dy, dstate, T, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1),
            D=D, W=weight.shape[1], ACTIVATE=activate, WIDTH=WIDTH, num_warps=1,
        )  # fmt: skip
    return dstate


def final_state(x: Tensor, state: Tensor | None, documents: Documents | None, N: int, W: int) -> Tensor:
    """The last W-1 rows of every document behind its state: [N, W-1, D]."""
    _, T, D = x.shape
    final = torch.empty(N, W - 1, D, dtype=x.dtype, device=x.device)
    bounds = None if documents is None else documents.bounds
    if final.numel():
        final_state_kernel[(N * tiles(D),)](
            x, state, bounds, final, T, x.stride(0), x.stride(1), D=D, W=W, WIDTH=WIDTH, num_warps=1
        )
    return final


def scatter(dfinal: Tensor, documents: Documents | None, dx: Tensor | None, dstate: Tensor | None, T: int) -> None:
    """Writes what `final_state` gives x and state, which are zero, as far as they are wanted."""
    N, reach, D = dfinal.shape
    bounds = None if documents is None else documents.bounds
    if dfinal.numel():
        final_grads_kernel[(N * tiles(D),)](dfinal, bounds, dx, dstate, T, D=D, W=reach + 1, WIDTH=WIDTH, num_warps=1)

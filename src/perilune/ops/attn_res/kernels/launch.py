"""The kernels as functions of tensors: how many programs, how wide, and how far copies run ahead."""

from collections.abc import Iterable, Sequence

import torch
import triton
from torch import Tensor

from perilune.ops.attn_res.kernels.backward import unmix_kernel
from perilune.ops.attn_res.kernels.forward import mix_kernel
from perilune.ops.fused import processors

ROOM = 192 * 1024  # bytes of shared memory for sources under way, of all programs on a processor
WARPS = 8  # on a processor: what a row held in registers leaves room for
AHEAD = 4  # sources under way in a program, at most; more of them, or of programs, were slower on an H200


class Plan:
    """How a row of D elements is spread: `across` of them to a thread, 32 threads to a warp.

    beside: bytes that are copied ahead with each element.
    """

    def __init__(self, x: Tensor, across: int, beside: int = 0) -> None:
        R, D = x.shape
        self.width = triton.next_power_of_2(D)
        self.warps = min(WARPS, max(1, self.width // (32 * across)))
        each = WARPS // self.warps  # programs on a processor
        self.programs = min(R, processors(x.device) * each)
        self.stages = 1 + min(AHEAD, max(1, ROOM // (each * self.width * (x.element_size() + beside))))


def mix(
    query: Tensor, sources: Sequence[Tensor], key_weight: Tensor, eps: float,
    norm_weight: Tensor | None, norm_eps: float, dtype: torch.dtype, kept: Tensor | None,
) -> Tensor:  # fmt: skip
    """The mixture of sources [R, D], whose rows are dense; `kept: [2, R, N]`: to take scores and inverse norms."""
    R, D = sources[0].shape
    out = sources[0].new_empty(R, D, dtype=dtype)
    score, inverse_rms = (None, None) if kept is None else kept.unbind()
    plan = Plan(sources[0], 64)
    if out.numel():
        mix_kernel[(plan.programs,)](
            tuple(sources), tuple(x.stride(0) for x in sources), query, key_weight, norm_weight, out,
            score, inverse_rms, R, eps, norm_eps,
            N=len(sources), D=D, WIDTH=plan.width, STAGES=plan.stages, num_warps=plan.warps,
        )  # fmt: skip
    return out


def unmix(
    query: Tensor, sources: Sequence[Tensor], key_weight: Tensor, norm_weight: Tensor | None, norm_eps: float,
    kept: Tensor, dout: Tensor, dsources: Sequence[Tensor | None], adds: Sequence[bool],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Writes the gradients [R, D] that are wanted, or adds to them; those of query * key_weight and norm_weight, [D].

    Sums over rows are taken in an order of their own, which shapes and the device alone decide.
    """
    N, (R, D) = len(sources), dout.shape
    plan = Plan(sources[0], 32, beside=0 if dout.dtype == sources[0].dtype else dout.element_size())
    # Every program writes its row, and of dgain, where there is a norm.
    dw, dgain = query.new_empty(2, plan.programs, D, dtype=torch.float32).unbind()
    if dout.numel():
        same = dout.dtype == sources[0].dtype
        tensors = (dout if same else sources[0], *sources)
        unmix_kernel[(plan.programs,)](
            tensors, tuple(x.stride(0) for x in tensors), None if same else dout, dout.stride(0),
            tuple(x if dx is None else dx for x, dx in zip(sources, dsources)),
            query, key_weight, norm_weight, *kept.unbind(), dw, dgain,
            R, bits(dx is not None for dx in dsources), bits(adds), norm_eps,
            N=N, D=D, WIDTH=plan.width, COUNT=triton.next_power_of_2(N), STAGES=plan.stages, num_warps=plan.warps,
        )  # fmt: skip
    return dw.sum(0), None if norm_weight is None else dgain.sum(0)


def bits(flags: Iterable[bool]) -> int:
    return sum(flag << i for i, flag in enumerate(flags))

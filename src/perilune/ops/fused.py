"""What fused kernels for rows of numbers share on the host: where they run, and how rows lie for them."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from perilune.ops.blocks import as_rows

TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")  # as Triton reads it
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_ROWS = 2**30  # counted in 32 bits, with room for a step behind the last


def out_of_reach(x: Tensor) -> str | None:
    """Why no kernel in Triton runs where x lies, or None."""
    if not TRITON:
        return "Triton is not installed"
    if not x.is_cuda and not INTERPRETED:
        return f"its kernels run on a GPU, and the tensors are on {x.device.type}"
    return None


def unfit(first: Tensor, *others: Tensor | None) -> str | None:
    """Why kernels in Triton that compute in float32 cannot serve these tensors, or None."""
    if (reason := out_of_reach(first)) is not None:
        return reason
    for x in (first, *others):
        if x is None:
            continue
        if x.dtype not in DTYPES:
            return f"its kernels compute in float32, and an input is {x.dtype}"
        if x.device != first.device:
            return "the tensors are on more than one device"
    return None


def left_to_compiler() -> str | None:
    """Why kernels for what a compiler fuses as well are not called, or None."""
    return "torch.compile fuses the plain form itself" if torch.compiler.is_compiling() else None


def dense_rows(x: Tensor) -> Tensor:
    """[..., D] as [R, D] whose elements stand side by side in a row; a view where that is so."""
    rows = as_rows(x)
    return rows if rows.stride(1) == 1 else rows.contiguous()


@cache
def processors(device: torch.device) -> int:
    """2 on a CPU, which only interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2

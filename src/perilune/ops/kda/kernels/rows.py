"""The rows of a chunk of one head, to and from tensors over tokens, and what they retain.

A kernel may work on some of the heads alone: then its tensors over tokens begin at the first of them, and `stride`
counts all heads, from one token to the next.
"""

import triton
import triton.language as tl

from perilune.ops.kda.kernels.gate import log2_decay

LEAST = tl.constexpr(-160.0)  # in log2; less than float32 can hold


@triton.jit
def slice_of_head(H, V, W: tl.constexpr):
    """(first of W columns of V, head, sequence or segment) of a program; neighbours share a head."""
    slices = V // W
    program = tl.program_id(0)
    return program % slices * W, program // slices % H, program // slices // H


@triton.jit
def load_rows(x, start, length, head, stride, first, C: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """[C, W] as stored: columns first .. first + W of one head of x [tokens, stride, D]; zeros from `length` on."""
    rows = tl.arange(0, C)
    at = (start + rows).to(tl.int64)[:, None] * stride * D + head * D + first + tl.arange(0, W)[None, :]
    return tl.load(x + at, mask=(rows < length)[:, None], other=0.0)


@triton.jit
def store_rows(x, y, start, length, head, stride, first, C: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """The reverse of `load_rows`."""
    rows = tl.arange(0, C)
    at = (start + rows).to(tl.int64)[:, None] * stride * D + head * D + first + tl.arange(0, W)[None, :]
    tl.store(x + at, y.to(x.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit
def load_decay(
    z, A_log, dt_bias, start, length, head, stride, first, g_min,
    C: tl.constexpr, W: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """(logits, exp(A_log), bias, g): g [C, W] the log2 of what each row retains, 0 where there is none."""
    raw = load_rows(z, start, length, head, stride, first, C, W, K).to(tl.float32)
    if GATE == 0:
        rate = 1.0
        bias = tl.zeros([1, W], tl.float32)
    else:
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head * K + first + tl.arange(0, W)).to(tl.float32)[None, :]
    g = tl.maximum(log2_decay(raw, rate, bias, g_min, GATE), LEAST)
    return raw, rate, bias, tl.where((tl.arange(0, C) < length)[:, None], g, 0.0)

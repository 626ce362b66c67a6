"""States at the borders between the segments of a sequence.

A segment takes the state S to M S + S~ (Kimi K3 report, on context parallelism), with S~ what it makes of no state and
M what it makes of the identity without values.  Both come from all segments at once; this serial pass joins them, and
then all segments can run at once from the states they really start from.  It is exact whatever the decay.
"""

import triton
import triton.language as tl

from perilune.ops.kda.kernels.dot import dot
from perilune.ops.kda.kernels.rows import slice_of_head
from perilune.ops.launcher import Launcher


@Launcher
@triton.jit
def border_kernel(
    maps, made, outer, inner, sequences, H, V, K: tl.constexpr, W: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """One program: W columns of V, of one sequence and head.

    maps [segments, H, K, K], made [segments, H, K, V]; outer [N, H, K, V]: the state that enters each sequence (or the
    gradient of the one that leaves it, with REVERSE, where maps are transposed); inner [segments, H, K, V]: that of
    each segment, written.  All float32.
    """
    first, head, sequence = slice_of_head(H, V, W)
    channels = tl.arange(0, K)
    state = channels[:, None] * V + first + tl.arange(0, W)[None, :]
    square = channels[:, None] * K + channels[None, :]
    S = tl.load(outer + (sequence * H + head).to(tl.int64) * K * V + state)  # [K, W]
    begin = tl.load(sequences + sequence)
    end = tl.load(sequences + sequence + 1)
    for step in range(end - begin - 1):
        if REVERSE:
            segment = end - 1 - step
        else:
            segment = begin + step
        record = (segment * H + head).to(tl.int64)
        tl.store(inner + record * K * V + state, S)
        M = tl.load(maps + record * K * K + square)
        if REVERSE:
            M = tl.trans(M)
        S = dot(M, S, acc=tl.load(made + record * K * V + state), PRECISION="tf32x3")
    last = begin if REVERSE else end - 1
    tl.store(inner + (last * H + head).to(tl.int64) * K * V + state, S)

"""The mixture in one reading of the sources: a softmax that goes along with them."""

import triton
import triton.language as tl

from perilune.ops.attn_res.kernels.rows import load_vector, two_sums
from perilune.ops.chosen import chosen
from perilune.ops.launcher import Launcher

LOWEST = tl.constexpr(-3.0e38)  # of scores; finite, so that its distance to itself is 0


@Launcher
@triton.jit
def mix_kernel(
    sources, strides, query, key_weight, norm_weight, out, score, inverse_rms, R, eps, norm_eps,
    N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [R, D] of N sources, tensors [R, D] whose rows are `strides` apart; its RMSNorm if there is a weight.

    score, inverse_rms: [R, N] for the backward pass, or None.

    A program goes through its rows source by source, in one loop, so that copies to shared memory run several sources
    ahead, over the end of a row too.  Of a row it holds the weighted sum, rescaled where a larger score comes.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    here = column < D
    w = load_vector(query, column, D) * load_vector(key_weight, column, D)
    turns = (R - program + programs - 1) // programs
    top = LOWEST
    total = 0.0
    mixed = tl.zeros([WIDTH], tl.float32)
    for turn in tl.range(0, turns * N, num_stages=STAGES):
        i = turn % N
        row = (program + turn // N * programs).to(tl.int64)
        v = tl.load(chosen(sources, i, N) + row * chosen(strides, i, N) + column, mask=here, other=0.0).to(tl.float32)
        squares, along = two_sums(v * v, v * w)
        r = tl.rsqrt(squares / D + eps)
        s = along * r
        if score is not None:
            tl.store(score + row * N + i, s)
            tl.store(inverse_rms + row * N + i, r)
        if s > top:
            old = tl.exp(top - s)
            mixed = mixed * old
            total = total * old
            top = s
        new = tl.exp(s - top)
        mixed += v * new
        total += new
        if i == N - 1:
            share = tl.div_rn(1.0, total)
            y = mixed * share
            y += (mixed - y * total) * share  # as a division rounds
            if norm_weight is not None:
                y *= tl.rsqrt(tl.sum(y * y, 0) / D + norm_eps) * load_vector(norm_weight, column, D)
            tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=here)
            top = LOWEST
            total = 0.0
            mixed = tl.zeros([WIDTH], tl.float32)

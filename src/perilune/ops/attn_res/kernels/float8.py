"""The mixture over a bank in float8, and its gradients: rows are read as codes and a scale, never written whole."""

import triton
import triton.language as tl

from perilune.ops.attn_res.kernels.rows import entry, load_vector, two_sums, weights_of
from perilune.ops.launcher import Launcher

LOWEST = tl.constexpr(-3.0e38)  # of scores; finite, so that its distance to itself is 0


@triton.jit
def decoded(codes, scales, row, column, D: tl.constexpr):
    """A row of float8, seen as bytes, in float32; zeros behind it.  NaN is in the scale, if anywhere."""
    code = tl.load(codes + row * D + column, mask=column < D, other=0)
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(scales + row)


@triton.jit
def taken(v, w, eps, mixed, total, top, D: tl.constexpr):
    """The running softmax with one source more: its sum, the sum of weights and the largest score; its score and
    inverse norm."""
    squares, along = two_sums(v * v, v * w)
    r = tl.rsqrt(squares / D + eps)
    s = along * r
    higher = tl.maximum(top, s)
    old = tl.exp(top - higher)
    new = tl.exp(s - higher)
    return mixed * old + v * new, total * old + new, higher, s, r


@Launcher
@triton.jit
def mix_float8_kernel(
    codes, scales, live, live_stride, query, key_weight, out, score, inverse_rms, R, eps,
    N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [R, D] of N sources, codes [R, D] and scales [R], and of `live` [R, D] if there is one.

    score, inverse_rms: [R, number of sources] for the backward pass, or None.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    here = column < D
    w = load_vector(query, column, D) * load_vector(key_weight, column, D)
    ALL: tl.constexpr = N + (1 if live is not None else 0)
    for turn in range((R - program + programs - 1) // programs):
        row = (program + turn * programs).to(tl.int64)
        mixed, total, top = tl.zeros([WIDTH], tl.float32), 0.0, LOWEST
        for i in tl.static_range(ALL):
            if i < N:
                v = decoded(codes[i], scales[i], row, column, D)
            else:
                v = tl.load(live + row * live_stride + column, mask=here, other=0.0).to(tl.float32)
            mixed, total, top, s, r = taken(v, w, eps, mixed, total, top, D)
            if score is not None:
                tl.store(score + row * ALL + i, s)
                tl.store(inverse_rms + row * ALL + i, r)
        share = tl.div_rn(1.0, total)
        y = mixed * share
        y += (mixed - y * total) * share  # as a division rounds
        tl.store(out + row * D + column, y.to(out.dtype.element_ty), mask=here)


@Launcher
@triton.jit(do_not_specialize=["writes", "adds"])
def unmix_float8_kernel(
    codes, scales, live, live_stride, dout, dout_stride, dsources, query, key_weight, score, inverse_rms, dw,
    R, writes, adds,
    N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Gradients of all sources, as `unmix_kernel` has them; COUNT: a power of two, at least their number.

    dsources: [R, D] each; bit i of `writes`: the i-th is wanted; of `adds`: it is added to what stands there.
    dw: [programs, D].
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    here = column < D
    number = tl.arange(0, COUNT)
    w = load_vector(query, column, D) * load_vector(key_weight, column, D)
    ALL: tl.constexpr = N + (1 if live is not None else 0)
    sum_w = tl.zeros([WIDTH], tl.float32)
    for turn in range((R - program + programs - 1) // programs):
        row = (program + turn * programs).to(tl.int64)
        d = tl.load(dout + row * dout_stride + column, mask=here, other=0.0).to(tl.float32)
        r = tl.load(inverse_rms + row * ALL + number, mask=number < ALL, other=0.0)
        s, a = weights_of(score, row, number, ALL, COUNT)
        da = tl.zeros([COUNT], tl.float32)
        mean = 0.0
        for i in tl.static_range(ALL):
            if i < N:
                v = decoded(codes[i], scales[i], row, column, D)
            else:
                v = tl.load(live + row * live_stride + column, mask=here, other=0.0).to(tl.float32)
            slope = tl.sum(d * v, 0)
            da = tl.where(number == i, slope, da)
            mean += entry(a, i) * slope
        for i in tl.static_range(ALL):  # from the second-level cache, as a rule
            if i < N:
                v = decoded(codes[i], scales[i], row, column, D)
            else:
                v = tl.load(live + row * live_stride + column, mask=here, other=0.0).to(tl.float32)
            a_i = entry(a, i)
            r_i = entry(r, i)
            along_w = a_i * (entry(da, i) - mean) * r_i
            sum_w += along_w * v
            dv = a_i * d + along_w * w - (along_w * entry(s, i) * r_i / D) * v
            to = dsources[i] + row * D + column
            if (adds >> i) & 1:
                dv += tl.load(to, mask=here, other=0.0).to(tl.float32)
            if (writes >> i) & 1:
                tl.store(to, dv.to(dsources[i].dtype.element_ty), mask=here)
    tl.store(dw + program.to(tl.int64) * D + column, sum_w, mask=here)

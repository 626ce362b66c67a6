"""The gradients of all sources: a row of each is read twice, the second time from the second-level cache as a rule."""

import triton
import triton.language as tl

from perilune.ops.attn_res.kernels.rows import entry, load_vector, weights_of
from perilune.ops.chosen import chosen
from perilune.ops.launcher import Launcher


@Launcher
@triton.jit(do_not_specialize=["writes", "adds"])
def unmix_kernel(
    tensors, strides, dout, dout_stride, dsources, query, key_weight, norm_weight, score, inverse_rms, dw, dgain,
    R, writes, adds, norm_eps,
    N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of N sources [R, D] from that of their mixture, and from what the forward kept [R, N].

    tensors: the mixture's gradient, then the sources; rows of each are `strides` apart.  A gradient of another dtype is
    `dout`, and the first of the tensors is not read; else dout is None.  dsources: [R, D] each; bit i of `writes`: the
    i-th is wanted; of `adds`: it is added to what stands there.  COUNT: a power of two, at least N.
    dw, dgain: [programs, D], what each program's rows give query * key_weight, and the norm's weight if there is one.

    With a the weights, s the scores, r the inverse norms, w = query * key_weight and d the gradient of the mixture:

        ds_i = a_i (<d, v_i> - sum_j a_j <d, v_j>)
        dv_i = a_i d + ds_i r_i w - (ds_i s_i r_i^2 / D) v_i,   dw = sum over rows and i of ds_i r_i v_i

    One loop, as in the forward: d; with a norm all sources for the mixture h; all sources for <d, v_i>; all for dv_i.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    here = column < D
    number = tl.arange(0, COUNT)
    w = load_vector(query, column, D) * load_vector(key_weight, column, D)
    NORM: tl.constexpr = N if norm_weight is not None else 0
    ITEMS: tl.constexpr = 1 + NORM + 2 * N
    turns = (R - program + programs - 1) // programs
    sum_w = tl.zeros([WIDTH], tl.float32)
    sum_gain = tl.zeros([WIDTH], tl.float32)
    d = tl.zeros([WIDTH], tl.float32)
    h = tl.zeros([WIDTH], tl.float32)
    a = tl.zeros([COUNT], tl.float32)
    s = tl.zeros([COUNT], tl.float32)
    r = tl.zeros([COUNT], tl.float32)
    da = tl.zeros([COUNT], tl.float32)
    mean = 0.0
    for turn in tl.range(0, turns * ITEMS, num_stages=STAGES):
        item = turn % ITEMS
        which = tl.where(item == 0, 0, (item - 1) % N + 1)
        i = which - 1
        row = (program + turn // ITEMS * programs).to(tl.int64)
        at = chosen(tensors, which, N + 1) + row * chosen(strides, which, N + 1) + column
        if dout is None:
            x = tl.load(at, mask=here, other=0.0).to(tl.float32)
            given = x
        else:  # both are copied ahead, so neither stands in a branch; what is masked is not read
            x = tl.load(at, mask=here & (item > 0), other=0.0).to(tl.float32)
            given = tl.load(dout + row * dout_stride + column, mask=here & (item == 0), other=0.0).to(tl.float32)
        if item == 0:
            d = given
            r = tl.load(inverse_rms + row * N + number, mask=number < N, other=0.0)
            s, a = weights_of(score, row, number, N, COUNT)
            mean = 0.0
            if norm_weight is not None:
                h = tl.zeros([WIDTH], tl.float32)
        elif item > NORM + N:
            a_i = entry(a, i)
            r_i = entry(r, i)
            along_w = a_i * (entry(da, i) - mean) * r_i
            along_v = along_w * entry(s, i) * r_i / D
            sum_w += along_w * x
            dx = a_i * d + along_w * w - along_v * x
            to = chosen(dsources, i, N) + row * D + column
            if (adds >> i) & 1:
                dx += tl.load(to, mask=here, other=0.0).to(tl.float32)
            if (writes >> i) & 1:
                tl.store(to, dx.to(dsources[0].dtype.element_ty), mask=here)
        elif item > NORM:
            slope = tl.sum(d * x, 0)
            da = tl.where(number == i, slope, da)
            mean += entry(a, i) * slope
        elif norm_weight is not None:  # y = h rho gain: from the gradient of y to that of h
            h += entry(a, i) * x
            if item == NORM:
                rho = tl.rsqrt(tl.sum(h * h, 0) / D + norm_eps)
                sum_gain += d * h * rho
                d *= load_vector(norm_weight, column, D)
                d = rho * (d - h * (tl.sum(d * h, 0) * rho * rho / D))
    at = program.to(tl.int64) * D + column
    tl.store(dw + at, sum_w, mask=here)
    if norm_weight is not None:
        tl.store(dgain + at, sum_gain, mask=here)

"""What Muon does element by element around the iteration, each side in one pass over memory."""

import triton
import triton.language as tl

from perilune.ops.chosen import chosen
from perilune.ops.launcher import Launcher


@triton.jit
def place(count, BLOCK: tl.constexpr):
    """A program's tensor, of several of `count` numbers each, and where in it its block begins."""
    programs = tl.cdiv(count, BLOCK)
    which = tl.program_id(0) // programs
    return which, (tl.program_id(0) - which * programs).to(tl.int64) * BLOCK


@Launcher
@triton.jit
def direction_kernel(
    momenta, grads, directions, count, mu, N: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):
    """M <- mu M + G, and D = G + mu M (M without NESTEROV) in its own dtype, for N tensors of `count` numbers each;
    their D lie one behind the other."""
    which, first = place(count, BLOCK)
    at = first + tl.arange(0, BLOCK)
    here = at < count
    momentum = chosen(momenta, which, N) + at
    g = tl.load(chosen(grads, which, N) + at, mask=here, other=0.0).to(tl.float32)
    m = mu * tl.load(momentum, mask=here, other=0.0) + g
    tl.store(momentum, m, mask=here)
    d = g + mu * m if NESTEROV else m
    to = directions + which.to(tl.int64) * count + at
    tl.store(to, d.to(directions.dtype.element_ty), mask=here)


@Launcher
@triton.jit
def descend_kernel(weights, updates, count, keep, rate, N: tl.constexpr, BLOCK: tl.constexpr):
    """W <- keep W - rate U, for N tensors of `count` numbers each; their U lie one behind the other."""
    which, first = place(count, BLOCK)
    at = first + tl.arange(0, BLOCK)
    here = at < count
    weight = chosen(weights, which, N) + at
    u = tl.load(updates + which.to(tl.int64) * count + at, mask=here, other=0.0).to(tl.float32)
    tl.store(weight, keep * tl.load(weight, mask=here, other=0.0) - rate * u, mask=here)

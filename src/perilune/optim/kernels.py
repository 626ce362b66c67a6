"""What Muon does element by element around the iteration, each side in one pass over memory."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher


@Launcher
@triton.jit
def direction_kernel(momentum, grad, direction, count, mu, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    """M <- mu M + G, and N = G + mu M (M without NESTEROV) in the direction's own dtype; `count` numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    g = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    m = mu * tl.load(momentum + at, mask=here, other=0.0) + g
    tl.store(momentum + at, m, mask=here)
    n = g + mu * m if NESTEROV else m
    tl.store(direction + at, n.to(direction.dtype.element_ty), mask=here)


@Launcher
@triton.jit
def descend_kernel(weight, update, count, keep, rate, BLOCK: tl.constexpr):
    """W <- keep W - rate U; `count` numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    w = tl.load(weight + at, mask=here, other=0.0)
    u = tl.load(update + at, mask=here, other=0.0).to(tl.float32)
    tl.store(weight + at, keep * w - rate * u, mask=here)

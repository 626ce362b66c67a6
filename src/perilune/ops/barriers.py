"""Barriers of programs in Gluon, and when their memory is anything else's: never.

A barrier whose memory the compiler gives to other numbers once nobody waits for it any more is still one to the
hardware, which changes those numbers where it puts the program aside for another process' (docs/log.md).  So barriers
stay until they are retired, at a program's end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n of them, each for `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def retire(bars, n: gl.constexpr):
    """Gives up n barriers that no warp is going to wait for."""
    for i in gl.static_range(n):
        mbarrier.invalidate(bars.index(i))

"""A matrix in bfloat16 parts, in one pass: by torch's operations it is five."""

import triton
import triton.language as tl

from perilune.ops.launcher import Launcher


@Launcher
@triton.jit
def split_kernel(
    x, row_stride, column_stride, parts, part_stride, parts_row_stride, count, N,
    TWICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parts [3, M, N], [4, M, N] if TWICE, of the `count` numbers of x [M, N] float32, whose sum the first three are,
    the smallest first; the fourth is the third again.  Columns of parts lie side by side."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    row = at // N
    column = at - row * N
    v = tl.load(x + row * row_stride + column * column_stride, mask=here, other=0.0)
    first = v.to(tl.bfloat16)
    rest = v - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    to = parts + row * parts_row_stride + column
    tl.store(to, third, mask=here)
    tl.store(to + part_stride, second, mask=here)
    tl.store(to + 2 * part_stride, first, mask=here)
    if TWICE:
        tl.store(to + 3 * part_stride, first, mask=here)

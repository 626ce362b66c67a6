"""`solve_kernel` for normalized keys in 16 bits, in Gluon: a warp for every chunk and head.

S = A X of a block [[A1, 0], [E, A2]] is [[S1, 0], [(I - S2 D) E (I - D S1), S2]], with D = Diag(beta): so from single
rows to 64 by doubling, without X, whose identity would cost S bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from perilune.ops.launcher import Launcher

TILES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1, 1], [1, 16, 8]))  # [n, 16, 16]
HALVES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))  # [32, 32]


@gluon.jit
def product(left, right, acc):
    """acc + left right, of float16; all in one layout."""
    a = gl.convert_layout(left.to(gl.float16), gl.DotOperandLayout(0, acc.type.layout, 2))
    b = gl.convert_layout(right.to(gl.float16), gl.DotOperandLayout(1, acc.type.layout, 2))
    return mma_v2(a, b, acc)


@gluon.jit
def joined(E, S1, S2, minus1, minus2):
    """The block below S1 and beside S2; minus: -beta of their rows."""
    T = product(E, minus1 * S1, E)
    return product(S2, minus2 * T, T)


@gluon.jit
def tiles(x):
    """[32, 32] -> those of 16 rows on the diagonal and the one below it, [1, 16, 16] each."""
    upper, lower = gl.split(gl.permute(gl.reshape(x, [2, 16, 2, 16]), (1, 2, 3, 0)))
    first, _ = gl.split(gl.permute(upper, (0, 2, 1)))
    below, second = gl.split(gl.permute(lower, (0, 2, 1)))
    return gl.reshape(first, [1, 16, 16]), gl.reshape(second, [1, 16, 16]), gl.reshape(below, [1, 16, 16])


@gluon.jit
def side_by_side(a, b):
    """[n, 16, 16] twice -> [2 n, 16, 16]; those of a at even places."""
    n: gl.constexpr = a.shape[0]
    return gl.reshape(gl.permute(gl.join(a, b), (0, 3, 1, 2)), [2 * n, 16, 16])


@gluon.jit
def apart(x):
    """The reverse of `side_by_side`."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0] // 2, 2, 16, 16]), (0, 2, 3, 1)))


@gluon.jit
def assembled(first, second, below):
    """[1, 16, 16] three times -> [32, 32], the reverse of `tiles`, zeros at the upper right."""
    upper = gl.join(first, gl.zeros_like(first))
    lower = gl.join(below, second)
    whole = gl.reshape(gl.permute(gl.join(upper, lower), (0, 4, 1, 3, 2)), [32, 32])
    return gl.convert_layout(whole, HALVES, assert_trivial=True)


@Launcher
@gluon.jit
def solve_hopper_kernel(pairs, solve, strength):
    """pairs: A [chunks, H, 64, 64], read below the diagonal; solve: -A X, may be the same memory."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])  # [32, 32] in 16-byte pieces
    record = gl.program_id(0).to(gl.int64)
    line = gl.arange(0, 32, gl.SliceLayout(1, LINES))[:, None]
    at = line * 64 + gl.arange(0, 32, gl.SliceLayout(0, LINES))[None, :]
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))[None, :][:, None, :]
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))[:, None][:, :, None]
    row = gl.arange(0, 32, gl.SliceLayout(1, HALVES))[:, None]
    pairs += record * 64 * 64
    solve += record * 64 * 64
    strength += record * 64
    upper = gl.convert_layout(gl.load(pairs + at), HALVES).to(gl.float32)
    lower = gl.convert_layout(gl.load(pairs + 32 * 64 + 32 + at), HALVES).to(gl.float32)
    across = gl.convert_layout(gl.load(pairs + 32 * 64 + at), HALVES).to(gl.float32)
    minus = -gl.load(strength + 16 * tile + i)
    minus1 = -gl.load(strength + row)
    minus2 = -gl.load(strength + 32 + row)

    # Within 16 rows, the four tiles in order
    first0, second0, below0 = tiles(upper)
    first1, second1, below1 = tiles(lower)
    A = side_by_side(side_by_side(first0, first1), side_by_side(second0, second1))
    A = gl.convert_layout(A, TILES, assert_trivial=True)
    S = gl.where((i == j + 1) & (i % 2 == 1), A, 0.0)
    for e in gl.static_range(1, 4):
        E = gl.where((i >> (e + 1) == j >> (e + 1)) & (i >> e > j >> e), A, 0.0)
        S += joined(E, S, S, minus, minus)

    # Within 32 rows, both halves at once
    first, second = apart(S)
    first = gl.convert_layout(first, TILES, assert_trivial=True)
    second = gl.convert_layout(second, TILES, assert_trivial=True)
    below = gl.convert_layout(side_by_side(below0, below1), TILES, assert_trivial=True)
    pair = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, TILES)))[:, None][:, :, None]
    below = joined(below, first, second, -gl.load(strength + 32 * pair + i), -gl.load(strength + 32 * pair + 16 + i))
    first0, first1 = apart(first)
    second0, second1 = apart(second)
    below0, below1 = apart(below)
    upper = assembled(first0, second0, below0)
    lower = assembled(first1, second1, below1)

    across = joined(across, upper, lower, minus1, minus2)
    out: gl.constexpr = solve.dtype.element_ty
    gl.store(solve + at, gl.convert_layout((-upper).to(out), LINES))
    gl.store(solve + 32 + at, gl.zeros([32, 32], out, LINES))
    gl.store(solve + 32 * 64 + at, gl.convert_layout((-across).to(out), LINES))
    gl.store(solve + 32 * 64 + 32 + at, gl.convert_layout((-lower).to(out), LINES))

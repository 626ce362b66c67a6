"""Products of rows sorted by expert with their experts' matrices, for Hopper's tensor cores, in Gluon.

Persistent programs of one warp that copies and warpgroups that multiply, which meet at barriers only.  An expert has
about as many rows as a tile, so a tile is as tall as registers allow: its expert's matrices are then read once.
A tile that ends within the rows of the next expert multiplies those too, and does not write them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from perilune.ops.barriers import barriers, retire

ROWS = gl.constexpr(192)  # of a tile: three warpgroups of 64
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))  # [64, 256]
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [64, 128]
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [16, 128] in 16-byte pieces
CORNER = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # [64, 64]
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def activated(gate, up, beta_gate, beta_up, SITU: gl.constexpr):
    """f(gate, up), to a quarter of bfloat16's rounding.

    Special functions are what an epilogue waits for, so the up branch has none of its own: tanh by its continued
    fraction, whose denominator joins that of the sigmoid.  It is off by 2e-5 up to 2 and by 1e-3 where it is cut.
    """
    below = 1.0 + gl.exp2(gate * -1.4426950408889634)
    if SITU:
        opened = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [gate * (1.0 / beta_gate)], dtype=gl.float32, is_pure=True, pack=1
        )  # fmt: skip
        x = up * (1.0 / beta_up)
        x = gl.where(x > 3.64, 3.64, gl.where(x < -3.64, -3.64, x))  # NaN stays
        z = x * x
        below *= (15.0 * z + 420.0) * z + 945.0
        above = opened * (beta_gate * beta_up) * x * ((z + 105.0) * z + 945.0)
    else:
        above = gate * up
    return above * reciprocal(below)


@gluon.jit
def write(x, staged, out, first, limit, column, N):
    """x [64, 128] as rows first .. limit of out [., N], in whole lines."""
    gl.thread_barrier()  # the lines before may still be read
    staged.store(x.to(gl.bfloat16))
    gl.thread_barrier()
    row = gl.arange(0, 16, gl.SliceLayout(1, LINES))[:, None]
    at = column + gl.arange(0, 128, gl.SliceLayout(0, LINES))[None, :]
    for part in gl.static_range(4):
        here = first + 16 * part
        lines = staged.slice(16 * part, 16).load(LINES)
        gl.store(out + gl.cast(here, gl.int64) * N + row * N + at, lines, mask=(row < limit - here) & (at < N))


@gluon.jit
def copy_tiles(
    x, first_matrix, second_matrix, tiles, room, bars, N, K,
    STAGES: gl.constexpr, GATED: gl.constexpr, TURNED: gl.constexpr, DOUBLE: gl.constexpr,
):  # fmt: skip
    """The copying warp of `row_product_kernel`."""
    rows, halves = room
    full, free = bars
    experts, firsts, limits, number = tiles
    columns = gl.cdiv(N, 128 if GATED else 256)
    i = 0
    for task in range(gl.program_id(0), gl.load(number) * columns, gl.num_programs(0)):
        expert = gl.load(experts + task // columns)
        first = gl.load(firsts + task // columns)
        slabs = gl.minimum(gl.cdiv(gl.load(limits + task // columns) - first, 64), 3)
        column = task % columns * (128 if GATED else 256)
        for k in range(0, K, 64):
            s = i % STAGES
            bar = full.index(s)
            mbarrier.wait(free.index(s), (i // STAGES + 1) & 1)
            mbarrier.expect(bar, (256 + 64) * 64 * 2, pred=slabs == 1)
            mbarrier.expect(bar, (256 + 128) * 64 * 2, pred=slabs == 2)
            mbarrier.expect(bar, (256 + 192) * 64 * 2, pred=slabs == 3)
            for slab in gl.static_range(3):
                at = first + 64 * slab
                tma.async_copy_global_to_shared(x, [at, k], bar, rows.index(3 * s + slab), pred=slab < slabs)
            low = halves.index(2 * s)
            high = halves.index(2 * s + 1)
            if GATED:
                tma.async_copy_global_to_shared(first_matrix, [expert * N + column, k], bar, low)
                tma.async_copy_global_to_shared(second_matrix, [expert * N + column, k], bar, high)
            elif DOUBLE:
                half = K // 2
                early = k < half
                at = expert * half + gl.where(early, k, k - half)
                tma.async_copy_global_to_shared(first_matrix, [at, column], bar, low, pred=early)
                tma.async_copy_global_to_shared(first_matrix, [at, column + 128], bar, high, pred=early)
                tma.async_copy_global_to_shared(second_matrix, [at, column], bar, low, pred=k >= half)
                tma.async_copy_global_to_shared(second_matrix, [at, column + 128], bar, high, pred=k >= half)
            elif TURNED:
                tma.async_copy_global_to_shared(first_matrix, [expert * K + k, column], bar, low)
                tma.async_copy_global_to_shared(first_matrix, [expert * K + k, column + 128], bar, high)
            else:
                tma.async_copy_global_to_shared(first_matrix, [expert * N + column, k], bar, low)
                tma.async_copy_global_to_shared(first_matrix, [expert * N + column + 128, k], bar, high)
            i += 1


@gluon.jit
def side(matrix, TURNED: gl.constexpr):
    """[64, 128]."""
    return matrix if TURNED else matrix.permute((1, 0))


@gluon.jit
def multiply(
    outputs, tiles, room, bars, N, K, beta_gate, beta_up,
    SLAB: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, TURNED: gl.constexpr, SITU: gl.constexpr,
    KEEP: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `row_product_kernel`: 64 rows of every tile."""
    out, gates, ups = outputs
    rows, halves, staged = room
    full, free = bars
    _, firsts, limits, number = tiles
    columns = gl.cdiv(N, 128 if GATED else 256)
    steps = K // 64
    i = 0
    for task in range(gl.program_id(0), gl.load(number) * columns, gl.num_programs(0)):
        first = gl.load(firsts + task // columns) + 64 * SLAB
        limit = gl.load(limits + task // columns)
        column = task % columns * (128 if GATED else 256)
        if first < limit:
            low = gl.zeros([64, 128], gl.float32, HALF)
            high = gl.zeros([64, 128], gl.float32, HALF)
            for k in range(steps):
                s = (i + k) % STAGES
                mbarrier.wait(full.index(s), (i + k) // STAGES & 1)
                left = rows.index(3 * s + SLAB)
                low = warpgroup_mma(left, side(halves.index(2 * s), TURNED), low, is_async=True)
                high = warpgroup_mma(left, side(halves.index(2 * s + 1), TURNED), high, is_async=True)
                low, high = warpgroup_mma_wait(2, [low, high])
                mbarrier.arrive(free.index((i + k + STAGES - 1) % STAGES), pred=k > 0)
            low, high = warpgroup_mma_wait(0, [low, high])
            mbarrier.arrive(free.index((i + steps - 1) % STAGES))
            mine = staged.index(SLAB)
            if GATED:
                f = activated(low, high, beta_gate, beta_up, SITU)
                write(f, mine, out, first, limit, column, N)
                if KEEP:
                    write(low, mine, gates, first, limit, column, N)
                    write(high, mine, ups, first, limit, column, N)
            else:
                write(low, mine, out, first, limit, column, N)
                write(high, mine, out, first, limit, column + 128, N)
        else:
            for k in range(steps):
                s = (i + k) % STAGES
                mbarrier.wait(full.index(s), (i + k) // STAGES & 1)
                mbarrier.arrive(free.index(s))
        i += steps


@gluon.jit
def row_product_kernel(
    x, first_matrix, second_matrix, out, gates, ups, experts, firsts, limits, number, N, K, beta_gate, beta_up,
    STAGES: gl.constexpr, GATED: gl.constexpr, TURNED: gl.constexpr, DOUBLE: gl.constexpr, SITU: gl.constexpr,
    KEEP: gl.constexpr,
):  # fmt: skip
    """out [P, N]: every row of x [P, K] times a matrix of its expert.  x and the matrices are descriptors.

    GATED: out = f(x G^T, x U^T) of two matrices [N, K], the products themselves into gates and ups if KEEP.
    TURNED: x W with a matrix [K, N], DOUBLE: with two of them, [K/2, N] each, one below the other.
    Else: x W^T with a matrix [N, K].
    experts, firsts, limits: of every tile its expert, first row, and where that expert's rows end; number: of tiles.
    """
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 3)
    rows = gl.allocate_shared_memory(gl.bfloat16, [3 * STAGES, 64, 64], TILE)
    across: gl.constexpr = [64, 128] if TURNED else [128, 64]
    halves = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, across[0], across[1]], TILE)
    staged = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 128], TILE)
    fence_async_shared()
    room = (rows, halves, staged)
    bars = (full, free)
    tiles = (experts, firsts, limits, number)
    outputs = (out, gates, ups)
    gl.warp_specialize(
        [
            (multiply, (outputs, tiles, room, bars, N, K, beta_gate, beta_up, 0, STAGES, GATED, TURNED, SITU, KEEP)),
            (multiply, (outputs, tiles, room, bars, N, K, beta_gate, beta_up, 1, STAGES, GATED, TURNED, SITU, KEEP)),
            (multiply, (outputs, tiles, room, bars, N, K, beta_gate, beta_up, 2, STAGES, GATED, TURNED, SITU, KEEP)),
            (
                copy_tiles,
                (x, first_matrix, second_matrix, tiles, (rows, halves), bars, N, K, STAGES, GATED, TURNED, DOUBLE),
            ),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )
    retire(full, STAGES)
    retire(free, STAGES)


@gluon.jit
def runs(E, M, N, run):
    """(how many in all, of an expert, of one of its panels): runs of `run` tiles below each other."""
    of_panel = gl.cdiv(M // 128, run)
    of_expert = gl.cdiv(N, 256) * of_panel
    return E * of_expert, of_expert, of_panel


@gluon.jit
def copy_rows(left, right, starts, room, bars, E, M, N, run, STAGES: gl.constexpr, PANEL: gl.constexpr):
    """The copying warp of `outer_product_kernel`."""
    lefts, rights = room
    full, free, panel_full, panel_free = bars
    number, of_expert, of_panel = runs(E, M, N, run)
    i = 0
    j = 0
    for task in range(gl.program_id(0), number, gl.num_programs(0)):
        start = gl.load(starts + task // of_expert)
        end = gl.load(starts + task // of_expert + 1)
        column = task % of_expert // of_panel * 256
        top = task % of_panel * run
        again = end - start > 64 * PANEL
        for tile in range(top, gl.minimum(top + run, M // 128)):
            for row in range(start, end, 64):
                if (tile == top) | again:
                    s = j % PANEL
                    mbarrier.wait(panel_free.index(s), (j // PANEL + 1) & 1)
                    mbarrier.expect(panel_full.index(s), 256 * 64 * 2)
                    tma.async_copy_global_to_shared(right, [row, column], panel_full.index(s), rights.index(s))
                    j += 1
                s = i % STAGES
                bar = full.index(s)
                mbarrier.wait(free.index(s), (i // STAGES + 1) & 1)
                mbarrier.expect(bar, 128 * 64 * 2)
                tma.async_copy_global_to_shared(left, [row, 128 * tile], bar, lefts.index(2 * s))
                tma.async_copy_global_to_shared(left, [row, 128 * tile + 64], bar, lefts.index(2 * s + 1))
                i += 1


@gluon.jit
def add_outer(
    first_out, second_out, starts, room, bars, E, M, N, run,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PANEL: gl.constexpr, DOUBLE: gl.constexpr,
):  # fmt: skip
    """A warpgroup of `outer_product_kernel`: 64 rows of every tile."""
    lefts, rights, staged = room
    full, free, panel_full, panel_free = bars
    mine = staged.index(GROUP)
    number, of_expert, of_panel = runs(E, M, N, run)
    i = 0
    j = 0
    for task in range(gl.program_id(0), number, gl.num_programs(0)):
        expert = task // of_expert
        start = gl.load(starts + expert)
        end = gl.load(starts + expert + 1)
        column = task % of_expert // of_panel * 256
        top = task % of_panel * run
        bottom = gl.minimum(top + run, M // 128)
        steps = gl.cdiv(end - start, 64)
        for tile in range(top, bottom):
            done = (tile + 1 == bottom) | (steps > PANEL)  # with the panel
            sums = gl.zeros([64, 256], gl.float32, SUMS)
            for k in range(steps):
                s = (i + k) % STAGES
                left = lefts.index(2 * s + GROUP)
                mbarrier.wait(full.index(s), (i + k) // STAGES & 1)
                rest = end - start - 64 * k
                if rest < 64:  # the rows of the next expert
                    row = gl.arange(0, 64, gl.SliceLayout(1, CORNER))[:, None]
                    whole = left.load(CORNER)
                    gl.thread_barrier()
                    left.store(gl.where(row < rest, whole, 0.0))
                    fence_async_shared()
                    gl.thread_barrier()
                mbarrier.wait(panel_full.index((j + k) % PANEL), (j + k) // PANEL & 1)
                right = rights.index((j + k) % PANEL)
                sums = warpgroup_mma(left.permute((1, 0)), right, sums, is_async=True)
                sums = warpgroup_mma_wait(1, [sums])
                mbarrier.arrive(free.index((i + k + STAGES - 1) % STAGES), pred=k > 0)
                mbarrier.arrive(panel_free.index((j + k + PANEL - 1) % PANEL), pred=done & (k > 0))
            sums = warpgroup_mma_wait(0, [sums])
            mbarrier.arrive(free.index((i + steps + STAGES - 1) % STAGES), pred=steps > 0)
            mbarrier.arrive(panel_free.index((j + steps + PANEL - 1) % PANEL), pred=done & (steps > 0))
            i += steps
            j += gl.where(done, steps, 0)
            tma.store_wait(0)
            gl.thread_barrier()
            mine.store(sums.to(gl.bfloat16))
            fence_async_shared()
            at = 128 * tile + 64 * GROUP
            if DOUBLE:
                half = M // 2
                if at < half:
                    tma.async_copy_shared_to_global(first_out, [expert * half + at, column], mine)
                else:
                    tma.async_copy_shared_to_global(second_out, [expert * half + at - half, column], mine)
            else:
                tma.async_copy_shared_to_global(first_out, [expert * M + at, column], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E", "run"])
def outer_product_kernel(
    left, right, first_out, second_out, starts, E, M, N, run,
    STAGES: gl.constexpr, PANEL: gl.constexpr, DOUBLE: gl.constexpr,
):  # fmt: skip
    """first_out [E, M, N]: the sum of left[i]^T right[i] over every expert's rows; all four are descriptors.

    left: [P, M], right: [P, N]; starts: [E + 1], where each expert's rows begin.
    DOUBLE: the upper halves of the sums go into first_out, the lower ones into second_out, both [E, M/2, N].
    run: a program makes so many tiles below each other, for which it keeps up to 64 * PANEL rows of right.
    """
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 2)
    panel_full = barriers(PANEL, 1)
    panel_free = barriers(PANEL, 2)
    lefts = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, 64], TILE)
    rights = gl.allocate_shared_memory(gl.bfloat16, [PANEL, 64, 256], TILE)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    fence_async_shared()
    room = (lefts, rights, staged)
    bars = (full, free, panel_full, panel_free)
    gl.warp_specialize(
        [
            (add_outer, (first_out, second_out, starts, room, bars, E, M, N, run, 0, STAGES, PANEL, DOUBLE)),
            (add_outer, (first_out, second_out, starts, room, bars, E, M, N, run, 1, STAGES, PANEL, DOUBLE)),
            (copy_rows, (left, right, starts, (lefts, rights), bars, E, M, N, run, STAGES, PANEL)),
        ],
        [4, 1],
        [240, 24],
    )
    retire(full, STAGES)
    retire(free, STAGES)
    retire(panel_full, PANEL)
    retire(panel_free, PANEL)

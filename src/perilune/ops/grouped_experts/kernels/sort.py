"""Rows of tokens sorted by expert, by counting: every block of slots on its own, then blocks, then experts.

An id that is no expert's, as -1, counts as that of one more expert, whose rows come last and are nobody's.
"""

import triton
import triton.language as tl


@triton.jit
def expert_of(ids, slot, P, E):
    expert = tl.load(ids + slot, mask=slot < P, other=-1)  # of 64 bits, perhaps
    return tl.where((expert < 0) | (expert >= E), E, expert).to(tl.int32)


@triton.jit
def count_kernel(ids, rank, counts, P, E, BLOCK: tl.constexpr, PART: tl.constexpr):
    """rank [P]: how many slots before it in its block have its expert; counts [blocks, E + 1], zero at first."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = expert_of(ids, slot, P, E)
    before = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.int32)
    for part in range(0, BLOCK, PART):
        other = block * BLOCK + part + tl.arange(0, PART)
        same = (expert[:, None] == expert_of(ids, other, P, E)[None, :]) & (other[None, :] < P)
        total += tl.sum(same.to(tl.int32), 1)
        before += tl.sum((same & (other[None, :] < slot[:, None])).to(tl.int32), 1)
    tl.store(rank + slot, before, mask=slot < P)
    tl.store(counts + block.to(tl.int64) * (E + 1) + expert, total, mask=(slot < P) & (before == 0))


@triton.jit
def blocks_kernel(counts, totals, blocks, E, PART: tl.constexpr, WIDTH: tl.constexpr):
    """counts: of every expert, how many are in the blocks before; totals [E + 1]: in all."""
    expert = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    sums = tl.zeros([1, WIDTH], tl.int32)
    for part in range(0, blocks, PART):
        block = part + tl.arange(0, PART)[:, None]
        at = counts + block.to(tl.int64) * (E + 1) + expert
        here = (block < blocks) & (expert <= E)
        count = tl.load(at, mask=here, other=0)
        tl.store(at, sums + tl.cumsum(count, 0) - count, mask=here)
        sums += tl.sum(count, 0)[None, :]
    tl.store(totals + expert, sums, mask=expert <= E)


@triton.jit
def tiles_kernel(totals, starts, expert_of_tile, first, limit, number, E, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """starts [E + 1]: where every expert's rows begin; and the tiles of up to HEIGHT rows they are cut into."""
    expert = tl.arange(0, BLOCK)
    count = tl.load(totals + expert, mask=expert < E, other=0)
    end = tl.cumsum(count, 0)
    tl.store(starts + expert, end - count, mask=expert <= E)
    tiles = (count + HEIGHT - 1) // HEIGHT
    last = tl.cumsum(tiles, 0)
    tl.store(number, tl.sum(tiles, 0))
    for i in range(tl.max(tiles, 0)):
        at = last - tiles + i
        tl.store(expert_of_tile + at, expert, mask=i < tiles)
        tl.store(first + at, end - count + i * HEIGHT, mask=i < tiles)
        tl.store(limit + at, end, mask=i < tiles)


@triton.jit
def place_kernel(ids, rank, counts, starts, row, slots, P, E, BLOCK: tl.constexpr):
    """row [P] of every slot; slots [P] of every row."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = expert_of(ids, slot, P, E)
    here = slot < P
    to = tl.load(rank + slot, mask=here, other=0)
    to += tl.load(counts + block.to(tl.int64) * (E + 1) + expert, mask=here, other=0)
    to += tl.load(starts + expert, mask=here, other=0)
    tl.store(row + slot, to, mask=here)
    tl.store(slots + to, slot, mask=here)

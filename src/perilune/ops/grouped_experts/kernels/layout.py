"""Where the rows of tokens lie when sorted by expert, found without a look at the numbers: shapes are static."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from perilune.ops.grouped_experts.kernels.sort import blocks_kernel, count_kernel, place_kernel, tiles_kernel

BLOCK = {"BLOCK": 256, "num_warps": 4}
BLOCKS = {"PART": 256, "WIDTH": 8, "num_warps": 4}


class Layout(NamedTuple):
    """Of M tokens with top_k slots each, P in all; a row for every slot, those of empty slots last.

    A tile is up to `height` rows of one expert.  There are at most P / height + E of them; how many, the device knows.
    """

    slot: Tensor  # [P] int32, slot of each row
    row: Tensor  # [M, top_k] int32, row of each slot
    starts: Tensor  # [E + 1] int32, where each expert's rows begin; the last: where those of empty slots do
    expert: Tensor  # [tiles] int32, expert of each tile
    first: Tensor  # [tiles] int32, its first row
    limit: Tensor  # [tiles] int32, where the rows of its expert end
    number: Tensor  # [1] int32, how many tiles there are

    @property
    def occupied(self) -> Tensor:
        """[1], how many slots are not empty."""
        return self.starts[-1:]


def sort_by_expert(ids: Tensor, num_experts: int, height: int) -> Layout:
    """The layout of `ids: [M, top_k]`; a slot whose id is no expert's is empty.  Slots of an expert stay in order."""
    E, P, ids = num_experts, ids.numel(), ids.contiguous()
    blocks, tiles = triton.cdiv(P, BLOCK["BLOCK"]), min(P, P // height + E)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    rank, counts, totals = new(P), torch.zeros(blocks, E + 1, dtype=torch.int32, device=ids.device), new(E + 1)
    layout = Layout(new(P), new(*ids.shape), new(E + 1), new(tiles), new(tiles), new(tiles), new(1))
    count_kernel[(blocks,)](ids, rank, counts, P, E, PART=32, **BLOCK)
    blocks_kernel[(triton.cdiv(E + 1, BLOCKS["WIDTH"]),)](counts, totals, blocks, E, **BLOCKS)
    tiles_kernel[(1,)](
        totals, *layout[2:], E, HEIGHT=height, BLOCK=triton.next_power_of_2(E + 1), num_warps=8
    )  # fmt: skip
    place_kernel[(blocks,)](ids, rank, counts, layout.starts, layout.row, layout.slot, P, E, **BLOCK)
    return layout

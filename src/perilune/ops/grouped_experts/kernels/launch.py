"""The kernels as functions of tensors: grids, descriptors, and how each is compiled."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from perilune.ops.grouped_experts.activation import GatedActivation
from perilune.ops.grouped_experts.kernels.layout import Layout
from perilune.ops.grouped_experts.kernels.products import ROWS, TILE, outer_product_kernel, row_product_kernel
from perilune.ops.grouped_experts.kernels.rows import gather_kernel, slopes_kernel, spread_kernel

HEIGHT: int = ROWS.value
# As much as shared memory holds
STAGES = 3
OUTER = {"STAGES": 4, "PANEL": 3}


def spread(x: Tensor, layout: Layout) -> Tensor:
    """x: [M, D], a row for every slot: [P, D]."""
    (M, top_k), D = layout.row.shape, x.shape[1]
    rows = x.new_empty(M * top_k, D)
    spread_kernel[(M,)](x, layout.row, layout.occupied, rows, D, TOP_K=top_k, **_across(D))
    return rows


def gather(rows: Tensor, layout: Layout, weights: Tensor | None = None) -> Tensor:
    """rows: [P, D], summed over every token's slots, weighted if weights [M, top_k] are given: [M, D]."""
    (M, top_k), D = layout.row.shape, rows.shape[1]
    out = rows.new_empty(M, D)
    gather_kernel[(M,)](rows, layout.row, weights, layout.occupied, out, D, TOP_K=top_k, **_across(D))
    return out


def activated_product(
    rows: Tensor, w_gate: Tensor, w_up: Tensor, f: GatedActivation, layout: Layout, *, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """f(gate, up) [P, F] of rows [P, D]; and gate and up themselves if `keep`."""
    F, D = w_gate.shape[1:]
    out = rows.new_empty(len(rows), F)
    gates, ups = (torch.empty_like(out), torch.empty_like(out)) if keep else (None, None)
    row_product_kernel[_programs(rows)](
        _blocks(rows, 64, 64), _blocks(w_gate, 128, 64), _blocks(w_up, 128, 64), out, gates, ups, *layout[3:],
        F, D, f.beta_gate, f.beta_up,
        STAGES=STAGES, GATED=True, TURNED=False, DOUBLE=False, SITU=f.name == "situ", KEEP=keep, num_warps=4,
    )  # fmt: skip
    return out, gates, ups


def product(rows: Tensor, matrices: Tensor, layout: Layout) -> Tensor:
    """Every row [P, K] times the transpose of its expert's matrix, of [E, N, K]: [P, N]."""
    N, K = matrices.shape[1:]
    out = rows.new_empty(len(rows), N)
    row_product_kernel[_programs(rows)](
        _blocks(rows, 64, 64), _blocks(matrices, 128, 64), None, out, None, None, *layout[3:], N, K, 1.0, 1.0,
        STAGES=STAGES, GATED=False, TURNED=False, DOUBLE=False, SITU=False, KEEP=False, num_warps=4,
    )  # fmt: skip
    return out


def turned_product(rows: Tensor, matrices: Tensor, layout: Layout, second: Tensor | None = None) -> Tensor:
    """Every row [P, K] times its expert's matrix, of [E, K, N], or of two one below the other: [P, N]."""
    K, N = matrices.shape[1:]
    out = rows.new_empty(len(rows), N)
    row_product_kernel[_programs(rows)](
        _blocks(rows, 64, 64), _blocks(matrices, 64, 128), None if second is None else _blocks(second, 64, 128),
        out, None, None, *layout[3:], N, K if second is None else 2 * K, 1.0, 1.0,
        STAGES=STAGES, GATED=False, TURNED=True, DOUBLE=second is not None, SITU=False, KEEP=False, num_warps=4,
    )  # fmt: skip
    return out


def outer_product(left: Tensor, right: Tensor, layout: Layout, *, halves: bool = False) -> tuple[Tensor, ...]:
    """The sum of left[i]^T right[i] over every expert's rows, [E, M, N]; `halves`: as two of [E, M/2, N]."""
    E, M, N = len(layout.starts) - 1, left.shape[1], right.shape[1]
    out = [left.new_empty(E, M // 2 if halves else M, N) for _ in range(2 if halves else 1)]
    blocks = [_blocks(x, 64, 256) for x in out] + [None]
    (programs,) = _programs(left)
    tiles = E * (M // 128) * triton.cdiv(N, 256)
    run = min(max(tiles // (8 * programs), 1), M // 128)  # as long as that leaves all of them work
    outer_product_kernel[(programs,)](
        _blocks(left, 64, 64), _blocks(right, 64, 256), *blocks[:2], layout.starts, E, M, N, run,
        DOUBLE=halves, **OUTER, num_warps=4,
    )  # fmt: skip
    return tuple(out)


def slopes(
    da: Tensor, gates: Tensor, ups: Tensor, weights: Tensor, f: GatedActivation, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """dinner [P, 2 F], p a [P, F] and dweights [M, top_k] float32; see `slopes_kernel`."""
    P, F = da.shape
    dinner, weighted, dweights = da.new_empty(P, 2 * F), torch.empty_like(da), torch.empty_like(weights)
    slopes_kernel[(P,)](
        da, gates, ups, layout.slot, weights, layout.occupied, dinner, weighted, dweights, F, f.beta_gate, f.beta_up,
        SITU=f.name == "situ", **_across(F),
    )  # fmt: skip
    return dinner, weighted, dweights


def _programs(x: Tensor) -> tuple[int]:
    return (torch.cuda.get_device_properties(x.device).multi_processor_count,)


def _across(width: int) -> dict[str, int]:
    """Of a program that works on a whole row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x, whose leading dimensions count rows, in blocks."""
    x = x.view(-1, x.shape[-1])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], TILE.value)

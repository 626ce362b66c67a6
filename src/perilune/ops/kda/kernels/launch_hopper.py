"""The kernels in Gluon as functions of tensors, for `perilune.ops.kda.kernels.launch`: bounded decay, K = V = 128."""

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from perilune.ops.kda.kernels.chunks import Chunks, processors
from perilune.ops.kda.kernels.grads_hopper import key_grads_hopper_kernel
from perilune.ops.kda.kernels.plan import Plan
from perilune.ops.kda.kernels.prepare_hopper import prepare_hopper_kernel
from perilune.ops.kda.kernels.scan_hopper import TILE, VECTOR, reverse_scan_hopper_kernel, scan_hopper_kernel
from perilune.ops.kda.kernels.solve_hopper import solve_hopper_kernel
from perilune.ops.kda.kernels.workspace import Flow, Records

# Room for what a step begins and ends with and for what it writes, as much as shared memory holds; found on an H200
SCAN = {  # by (OUTPUT, KEEP)
    (True, False): {"EARLY": 3, "LATE": 2, "TURNED": 1, "KEPT": 0},
    (False, True): {"EARLY": 3, "LATE": 2, "TURNED": 2, "KEPT": 1},
    (False, False): {"EARLY": 4, "LATE": 3, "TURNED": 0, "KEPT": 0},
}
REVERSE = {  # by KEEP
    True: {"EARLY": 2, "LATE": 1, "TURNED": 2, "KEPT": 2},
    False: {"EARLY": 3, "LATE": 2, "TURNED": 0, "KEPT": 0},
}
KEY_GRADS = {"num_warps": 8, "maxnreg": 128}  # so that two programs fit a multiprocessor
WIDTH = 64  # channels of such a program, and columns of V of a scan's
WIDE = NVMMASharedLayout(128, 32)  # of float32 in shared memory

Gates = tuple[Tensor | None, Tensor | None]  # A_log [H], dt_bias [H, K]


def prepare(
    q: Tensor, k: Tensor, z: Tensor, beta: Tensor, gates: Gates, matrices: tuple[Tensor, ...], plan: Plan,
    chunks: Chunks, stride: int,
) -> None:  # fmt: skip
    """Writes the records.  stride: heads from token to token, of which q, k, z and beta have some or all."""
    H, K = q.shape[2:]
    prepare_hopper_kernel[(chunks.number * H,)](
        *(heads_laid_out(x, stride, [plan.chunk, K]) for x in (q, k, z)),
        beta, *gates, *matrices, chunks.starts, chunks.lengths, plan.scale, plan.g_min, plan.middle, H, stride,
        K=K, NORM=plan.normalize, BETA_LOGITS=plan.beta_logits, num_warps=K // 16,
    )  # fmt: skip


def solve(pairs: Tensor, solve: Tensor, strength: Tensor) -> None:
    """For unit keys."""
    solve_hopper_kernel[(strength[..., 0].numel(),)](pairs, solve, strength, num_warps=1)


def scan(
    records: Records, v: Tensor, chunks: Chunks, initial: Tensor | None, final: Tensor, stride: int,
    o: Tensor | None = None, flow: Flow | None = None, maps: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes final, and o, the flow's residuals and states, or maps [segments, H, K, K]; initial None: zeros."""
    H, K, V = final.shape[1:]
    programs, groups = _programs(chunks, H, V if maps is None else V + K, v.device)
    scan_hopper_kernel[(programs,)](
        heads_laid_out(v, stride, [64, 64]), *_laid_out_records(records), initial, final, maps, o,
        None if o is None else laid_out(o, H * V, [64, 64]),
        laid_out(flow.residuals, V, [64, 64]) if flow else None,
        laid_out(flow.states, K, [64, K]) if flow else None,
        chunks.starts, chunks.lengths, chunks.segments, H, V, chunks.number * H,
        OUTPUT=o is not None, KEEP=flow is not None, MAPS=maps is not None,
        GROUPS=groups, **SCAN[o is not None, flow is not None], num_warps=4,
    )  # fmt: skip


def reverse_scan(
    records: Records, do: Tensor, chunks: Chunks, dfinal: Tensor | None, dinitial: Tensor, stride: int,
    flow: Flow | None = None,
) -> None:  # fmt: skip
    """Writes dinitial, and the flow's dz and dstates; dfinal None: zeros."""
    H, K, V = dinitial.shape[1:]
    programs, groups = _programs(chunks, H, V, do.device)
    reverse_scan_hopper_kernel[(programs,)](
        heads_laid_out(do, stride, [64, 64]), *_laid_out_records(records), dfinal, dinitial,
        laid_out(flow.dz, V, [64, 64]) if flow else None,
        laid_out(flow.dstates, K, [64, K]) if flow else None,
        chunks.starts, chunks.lengths, chunks.segments, H, V, chunks.number * H,
        KEEP=flow is not None, GROUPS=groups, **REVERSE[flow is not None], num_warps=4,
    )  # fmt: skip


def key_grads(
    q: Tensor, k: Tensor, z: Tensor, do: Tensor, gates: Gates, rows: tuple[Tensor, ...], flow: Flow, dpairs: Tensor,
    outputs: tuple[Tensor, ...], plan: Plan, chunks: Chunks, stride: int,
) -> None:  # fmt: skip
    """rows: q_norm, k_norm, down, along_q, along_k.  Writes outputs: dq, dk, dz, dbias, drate."""
    H, K, V = *q.shape[2:], do.shape[3]
    key_grads_hopper_kernel[(chunks.number * H * (K // WIDTH),)](
        *(heads_laid_out(x, stride, [64, WIDTH]) for x in (q, k.to(q.dtype), z)),
        heads_laid_out(do.to(plan.dtype), stride, [64, V]),
        *(laid_out(x, V, [64, V]) for x in (flow.residuals, flow.dz)),
        *(laid_out(x, K, [V, WIDTH]) for x in (flow.states, flow.dstates)),
        laid_out(dpairs, 64, [128, 64]),
        *gates, *rows, *outputs, chunks.starts, chunks.lengths, plan.scale, plan.g_min, plan.middle, H, stride,
        K=K, NORM=plan.normalize, **KEY_GRADS,
    )  # fmt: skip


class Rows(TensorDescriptor):
    """A descriptor of what is known to be right: to examine it takes longer than all else that is done with it."""

    def __post_init__(self) -> None:
        self.kind = self.base.dtype, *self.block_shape  # what compiled forms depend on: the layout follows from it


def laid_out(x: Tensor, columns: int, block: list[int], count: int = 1, stride: int = 0) -> Rows:
    """x, or `count` tensors like it one behind the other in memory, as rows of `columns` numbers, read in blocks.

    stride: from row to row, if not as many.
    """
    shape = [x.numel() // columns * count, columns]
    layout = VECTOR.value if block[0] == 1 else TILE.value if x.element_size() == 2 else WIDE
    return Rows(x, shape, [stride or columns, 1], block, layout)


def heads_laid_out(x: Tensor, stride: int, block: list[int]) -> Rows:
    """x [B, T, H, D], or H of the `stride` heads of such a tensor, as rows of tokens."""
    H, D = x.shape[2:]
    return laid_out(x, H * D, block, stride=(H if x.is_contiguous() else stride) * D)


def _laid_out_records(records: Records) -> list[Rows]:
    """Keys, squares, retained, scales: `Records.empty` puts those of a kind one behind the other."""
    C, K = records.q_since.shape[2:]
    return [
        laid_out(records.q_since, K, [C, K], 3), laid_out(records.solve, C, [C, C], 2),
        laid_out(records.retained, K, [1, K]), laid_out(records.own, C, [1, C], 2),
    ]  # fmt: skip


def _programs(chunks: Chunks, H: int, columns: int, device: torch.device) -> tuple[int, int]:
    """(programs, groups of 64 columns in each) of a scan: one group where two would leave processors over."""
    n = chunks.segment_count * H * (columns // 64)
    return (n, 1) if n <= processors(device) else (n // 2, 2)

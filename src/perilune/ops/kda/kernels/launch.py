"""The kernels as functions of tensors: grids, descriptors, and how each is compiled."""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.ops.kda.kernels import launch_hopper
from perilune.ops.kda.kernels.border import border_kernel
from perilune.ops.kda.kernels.chunks import Chunks, processors, turns
from perilune.ops.kda.kernels.grads import key_grads_kernel, value_grads_kernel
from perilune.ops.kda.kernels.launch_hopper import Gates
from perilune.ops.kda.kernels.plan import Plan
from perilune.ops.kda.kernels.prepare import prepare_kernel, solve_kernel
from perilune.ops.kda.kernels.scan import reverse_scan_kernel, scan_kernel
from perilune.ops.kda.kernels.workspace import Flow, Records

# Found on an H200 at K = V = 128; see docs/log.md
PREPARE = {"W": 64, "num_warps": 4, "num_stages": 1}
SOLVE = {"num_warps": 4, "num_stages": 1}
SCAN = {"W": 128, "num_warps": 8, "num_stages": 2}
BORDER = {"W": 16, "num_warps": 8, "num_stages": 1}
VALUE_GRADS = {"VW": 64, "num_warps": 4, "num_stages": 1}
KEY_GRADS = {"W": 64, "VW": 64, "num_warps": 4, "num_stages": 1}

ALL = slice(None)

# `heads`: those of the tensors over tokens and of the gate that a call is about; all others it is given, and what it
# makes, are of these heads alone.


def prepare(
    q: Tensor, k: Tensor, z: Tensor, beta: Tensor, gates: Gates, plan: Plan, chunks: Chunks, heads: slice = ALL
) -> Records:
    """q, k, z: [B, T, H, K]; beta: [B, T, H]; all contiguous."""
    stride = q.shape[2]
    q, k, z, beta, gates = *_of_heads(heads, q, k, z, beta), _gates_of(heads, gates)
    H, K, C = *q.shape[2:], plan.chunk
    records = Records.empty(chunks.number, H, C, K, plan.dtype, q.device)
    # A stands for a while where -A X will: with unit keys float16 holds it better than bfloat16
    pairs = records.solve.view(torch.float16) if plan.normalize and not plan.wide else records.solve
    matrices = (*records[:3], pairs, *records[4:])
    if chunks.number and plan.hopper:
        launch_hopper.prepare(q, k, z, beta, gates, matrices, plan, chunks, stride)
    elif chunks.number:
        prepare_kernel[(chunks.number * H,)](
            q, k, z, beta, *gates, *matrices, chunks.starts, chunks.lengths,
            plan.scale, plan.g_min, plan.middle, H, stride, C=C, K=K,
            GATE=plan.gate, NORM=plan.normalize, BETA_LOGITS=plan.beta_logits, FROM=plan.smallest, TERMS=plan.terms,
            HALF=plan.half, PRECISION=plan.precision, **_narrowed(PREPARE, W=K),
        )  # fmt: skip
    if chunks.number and plan.hopper and plan.normalize:
        launch_hopper.solve(pairs, records.solve, records.strength)
    elif chunks.number:
        solve_kernel[(chunks.number * H,)](
            pairs, records.solve, records.strength, C=C, HALF=plan.half, PRECISION=plan.precision, **SOLVE
        )
    return records


def programs(heads: int, V: int) -> int:
    """How many work on a sequence side by side."""
    return heads * (V // min(SCAN["W"], V))


def scan(
    records: Records, v: Tensor | None, initial: Tensor, plan: Plan, chunks: Chunks,
    o: Tensor | None = None, flow: Flow | None = None, heads: slice = ALL,
) -> Tensor:  # fmt: skip
    """The states [segments, H, K, V] at the segments' ends, from those at their starts; v None: without values.

    Writes o [B, T, H, V], then of all heads, or the flow's residuals and states.
    """
    if not chunks.number:
        return initial.clone()
    H, K, V = initial.shape[1:]
    C, final, how = plan.chunk, torch.empty_like(initial), _narrowed(SCAN, W=V)
    stride = H if v is None else v.shape[2]
    (v,) = _of_heads(heads, v)
    if plan.hopper and v is not None:
        launch_hopper.scan(records, v, chunks, initial, final, stride, o, flow)
        return final
    scan_kernel[(chunks.segment_count * H * (V // how["W"]),)](
        None if v is None else _tiles(v.flatten(0, 1).flatten(1), C, how["W"]), *_tiled(records), initial, final, o,
        _tiles(flow.residuals.flatten(0, 2), C, how["W"]) if flow else None,
        _tiles(flow.states.flatten(0, 2), how["W"], K) if flow else None,
        chunks.starts, chunks.lengths, chunks.segments, H, V, C=C, K=K,
        VALUES=v is not None, OUTPUT=o is not None, KEEP=flow is not None, PRECISION=plan.precision, **how,
    )  # fmt: skip
    return final


def reverse_scan(
    records: Records, do: Tensor, dfinal: Tensor | None, plan: Plan, chunks: Chunks, flow: Flow | None = None,
    heads: slice = ALL,
) -> Tensor:  # fmt: skip
    """The gradients of the states at the segments' starts, from those at their ends; dfinal None: from zero.

    Writes the flow's dz and dstates.
    """
    H, K, V, stride = *records.retained.shape[1:], do.shape[3], do.shape[2]
    (do,) = _of_heads(heads, do)
    dinitial = torch.empty(chunks.segment_count, H, K, V, device=do.device)
    if plan.hopper and chunks.number:
        launch_hopper.reverse_scan(records, do, chunks, dfinal, dinitial, stride, flow)
        return dinitial
    if dfinal is None:
        dfinal = torch.zeros_like(dinitial)
    if not chunks.number:
        return dfinal.clone()
    C, how = plan.chunk, _narrowed(SCAN, W=V)
    reverse_scan_kernel[(chunks.segment_count * H * (V // how["W"]),)](
        _tiles(do.flatten(0, 1).flatten(1), C, how["W"]), *_tiled(records), dfinal, dinitial,
        _tiles(flow.dz.flatten(0, 2), C, how["W"]) if flow else None,
        _tiles(flow.dstates.flatten(0, 2), how["W"], K) if flow else None,
        chunks.starts, chunks.lengths, chunks.segments, H, V, C=C, K=K,
        OUTPUT=True, KEEP=flow is not None, PRECISION=plan.precision, **how,
    )  # fmt: skip
    return dinitial


def through_segments(records: Records, v: Tensor, plan: Plan, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """[segments, H, K, V]: what each makes of no state; [segments, H, K, K]: of the identity, without values."""
    n, H, K, V = chunks.segment_count, *records.retained.shape[1:], v.shape[3]
    made, maps = (torch.empty(n, H, K, columns, device=v.device) for columns in (V, K))
    if plan.hopper and chunks.number:
        launch_hopper.scan(records, v, chunks, None, made, H, maps=maps)
        return made, maps
    one = torch.eye(K, device=v.device).expand(n, H, K, K).contiguous()
    return scan(records, v, made.zero_(), plan, chunks), scan(records, None, one, plan, chunks)


def kept(H: int, K: int, V: int, plan: Plan) -> int:
    """Bytes of a chunk's records and flow."""
    C = plan.chunk
    return H * (3 * C * K + 2 * C * C + 2 * C * V + 2 * K * V) * plan.dtype.itemsize


def turns_of(v: Tensor, K: int, plan: Plan, chunks: Chunks) -> list[slice]:
    """The heads of each turn of a backward pass over a stretch of the sequences."""
    H, V = v.shape[2:]
    size = chunks.number * kept(H, K, V, plan)
    narrowest = launch_hopper.WIDTH if plan.hopper else min(SCAN["W"], V)
    return turns(H, size, chunks.segment_count * H * (V // narrowest), processors(v.device))


def at_borders(maps: Tensor, made: Tensor, outer: Tensor, chunks: Chunks, *, reverse: bool = False) -> Tensor:
    """The states [segments, H, K, V] that enter the segments, from those that enter the sequences.

    reverse: the gradients of those that leave the segments, from those that leave the sequences.  See `border_kernel`.
    """
    N, H, K, V = outer.shape
    inner, how = torch.empty_like(made), _narrowed(BORDER, W=V)
    border_kernel[(N * H * (V // how["W"]),)](
        maps, made, outer, inner, chunks.sequences, H, V, K=K, REVERSE=reverse, **how
    )
    return inner


def grads(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, beta: Tensor, gates: Gates, o: Tensor, do: Tensor,
    strength: Tensor, q_norm: Tensor, k_norm: Tensor, flow: Flow, outputs: tuple[Tensor, ...], plan: Plan,
    chunks: Chunks, heads: slice = ALL,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of dt_bias, [chunks, H, K], and of A_log, [chunks, H, *], to be summed; of the given heads.

    Writes outputs: the gradients of q, k, v, z, beta.  Overwrites the flow.
    """
    stride = q.shape[2]
    q, k, v, z, beta, o, do, dq, dk, dv, dz, dbeta = _of_heads(heads, q, k, v, z, beta, o, do, *outputs)
    gates = _gates_of(heads, gates)
    H, K, V, C = *q.shape[2:], v.shape[3], plan.chunk
    how = _narrowed(KEY_GRADS, W=K, VW=V)
    n = chunks.number

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, H, *shape, dtype=dtype, device=q.device)

    down, along_q, along_k = new(C), new(C), new(C)
    parts = K // (launch_hopper.WIDTH if plan.hopper else how["W"])
    dbias, drate, dpairs = new(K), new(parts), new(2, C, C, dtype=plan.dtype)
    if n:
        value_grads_kernel[(n * H,)](
            v, beta, o, do, strength, flow.residuals, flow.dz, dv, dbeta, dpairs, down, along_q, along_k,
            chunks.starts, chunks.lengths, H, stride, C=C, V=V, NORM=plan.normalize, BETA_LOGITS=plan.beta_logits,
            PRECISION=plan.precision, **_narrowed(VALUE_GRADS, VW=V),
        )  # fmt: skip
    if n and plan.hopper:
        rows = q_norm, k_norm, down, along_q, along_k
        written = dq, dk, dz, dbias, drate
        launch_hopper.key_grads(q, k, z, do, gates, rows, flow, dpairs, written, plan, chunks, stride)
    elif n:
        key_grads_kernel[(n * H * parts,)](
            q, k, z, *gates, do, q_norm, k_norm, *flow, dpairs, down, along_q, along_k,
            dq, dk, dz, dbias, drate, chunks.starts, chunks.lengths,
            plan.scale, plan.g_min, plan.middle, H, stride, C=C, K=K, V=V,
            GATE=plan.gate, NORM=plan.normalize, FROM=plan.smallest, TERMS=plan.terms,
            HALF=plan.half_grad, SPLIT=1 if plan.wide else 2, PRECISION=plan.precision, **how,
        )  # fmt: skip
    return dbias, drate


def _of_heads(heads: slice, *tensors: Tensor | None) -> list[Any]:
    """Views of the tensors [B, T, H, ...]; of all heads the tensors themselves, for views take the host time."""
    return [x if x is None or _all(heads, x.shape[2]) else x[:, :, heads] for x in tensors]


def _gates_of(heads: slice, gates: Gates) -> Gates:
    A_log, dt_bias = gates
    if A_log is None or dt_bias is None or _all(heads, len(A_log)):
        return gates
    return A_log[heads], dt_bias[heads]


def _all(heads: slice, H: int) -> bool:
    return heads.indices(H) == (0, H, 1)


def _narrowed(how: dict[str, int], **widths: int) -> dict[str, int]:
    """`how` with its widths no wider than there are channels or values."""
    return how | {name: min(how[name], width) for name, width in widths.items()}


def _tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, columns])


def _tiled(records: Records) -> list[TensorDescriptor | Tensor]:
    """What the scans read: the matrices as descriptors of whole records, the rest as it is."""
    return [_tiles(x.flatten(0, 2), *x.shape[2:]) for x in records[:5]] + list(records[5:8])

"""The public call: check the tensors, pick a backend, run it."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.packing import boundaries
from perilune.ops.short_conv import chunked, fused, reference

BACKENDS = Backends("short_conv")  # best first
BACKENDS.register("triton", fused.short_conv_fused, fused.refuses)
BACKENDS.register("chunked", chunked.short_conv)
BACKENDS.register("reference", reference.short_conv)


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    activation: Literal["silu"] | None = "silu",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """A causal filter of W taps for each channel on its own, then SiLU; a cross-correlation, without bias.

        u[t, d] = sum_j weight[d, j] x[t - (W-1) + j, d]          y = u sigmoid(u)        (Kimi Linear paper)

    The last tap meets the current row.  Rows before a document's first are those of its initial state, or zero.

    x: [B, T, D].  weight: [D, W] or [D, 1, W].  initial_state: [N, W-1, D], the last W-1 rows of x before this call,
    oldest first, not activated.  cu_seqlens: [N+1] boundaries of N documents laid end to end, some perhaps empty; then
    B is 1, else N is B.  activation: "silu" or None.
    Returns y [B, T, D] and the final state [N, W-1, D] (None unless asked for), both in the dtype of x.  A document
    shorter than W-1 keeps the end of its old state.  Accumulates in float32 (float64 for float64), rounds once.
    The backward pass keeps x, weight and initial_state, nothing else.

    backend: "auto", "triton" (on a GPU), "chunked" or "reference".
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ShapeError(f"x: expected a floating tensor [B, T, D], got {x.dtype} {list(x.shape)}; add a batch axis")
    B, T, D = x.shape
    if weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight.squeeze(1)
    if weight.dim() != 2 or weight.shape[0] != D or weight.shape[1] == 0:
        raise ShapeError(
            f"weight: expected [{D}, W] or [{D}, 1, W], got {list(weight.shape)}; give one filter for each channel"
        )
    if activation not in ("silu", None):
        raise ShapeError(f"activation: expected 'silu' or None, got {activation!r}; apply another one to the output")
    cu = boundaries(cu_seqlens, B, T)
    N = B if cu is None else len(cu) - 1
    if initial_state is not None and initial_state.shape != (N, weight.shape[1] - 1, D):
        raise ShapeError(
            f"initial_state: expected {[N, weight.shape[1] - 1, D]} (N, W-1, D), got {list(initial_state.shape)}; "
            "give the last W-1 rows before each document"
        )
    arguments = x, weight, initial_state, cu, activation, output_final_state
    return BACKENDS.pick(backend, *arguments)(*arguments)

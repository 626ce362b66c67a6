"""The public function."""

from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError, nearest
from perilune.ops.autocast import autocast_dtype, without_autocast
from perilune.ops.grouped_experts.activation import Activation
from perilune.ops.grouped_experts.chunked import grouped_experts_chunked
from perilune.ops.grouped_experts.fused import grouped_experts_fused, refuses
from perilune.ops.grouped_experts.reference import grouped_experts_reference

BACKENDS = Backends("grouped_experts")  # best first
BACKENDS.register("gluon", grouped_experts_fused, refuses)
BACKENDS.register("chunked", grouped_experts_chunked)
BACKENDS.register("reference", grouped_experts_reference)


def grouped_experts(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: Activation = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
    backend: str = "auto",
) -> Tensor:
    """Each token through its chosen experts, summed with its routing weights.

    out_i = sum_j weights_ij E_{ids_ij}(x_i),   E_e(z) = w_down_e [ f(w_gate_e z, w_up_e z) ]      (K3 report, 2.3)

    f is `situ`, beta_gate tanh(g/beta_gate) sigmoid(g) * beta_up tanh(u/beta_up), or `swiglu`, g sigmoid(g) * u.

    x: `[M, D]`.  w_gate, w_up: `[E, F, D]`; w_down: `[E, D, F]`, of x's dtype.  ids: `[M, top_k]` int64 in 0..E-1, or
    -1 for an empty slot: nothing is computed for it and its weight gets gradient 0.
    weights: `[M, top_k]`, float32 as a rule; not normalised here.  Returns `[M, D]` in x's dtype.

    Activation and weighted sum are float32 (float64 for float64).  An expert without tokens gets a zero gradient.
    Under autocast x and the three matrices are cast as a linear layer would.  The order of summation does not depend
    on how the experts are loaded by other tokens.  Gradients are first order only.

    backend: "auto", "gluon" (bfloat16 on a Hopper GPU), "chunked" or "reference".  On "gluon" shapes alone decide what
    is launched, and nothing is read back, so a call can be captured in a CUDA graph.  The price: values of `ids` are
    checked on the CPU only; there, an id that is no expert's makes an empty slot.

    Raises ShapeError on shapes, dtypes or ids that do not fit, BackendError on an unknown backend.
    """
    if (dtype := autocast_dtype(x)) is not None:
        with without_autocast(x):
            x, w_gate, w_up, w_down = (t.to(dtype) for t in (x, w_gate, w_up, w_down))
            return grouped_experts(
                x, w_gate, w_up, w_down, ids, weights,
                activation=activation, beta_gate=beta_gate, beta_up=beta_up, backend=backend,
            )  # fmt: skip
    _check(x, w_gate, w_up, w_down, ids, weights, activation)
    run = BACKENDS.pick(backend, x, w_gate, w_up, w_down, ids, weights)
    return run(
        x, w_gate, w_up, w_down, ids, weights, activation=activation, beta_gate=beta_gate, beta_up=beta_up
    )  # fmt: skip


def _check(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, weights: Tensor, activation: str
) -> None:
    if activation not in ("situ", "swiglu"):
        raise ShapeError(
            f"activation: expected 'situ' or 'swiglu', got {activation!r}; {nearest(activation, ('situ', 'swiglu'))}"
        )
    if x.dim() != 2:
        raise ShapeError(f"x: expected [M, D], got {list(x.shape)}; flatten the leading axes")
    if w_gate.dim() != 3:
        raise ShapeError(f"w_gate: expected [E, F, D], got {list(w_gate.shape)}; stack the experts")
    (M, D), (E, F, _) = x.shape, w_gate.shape
    for name, w, shape in (("w_gate", w_gate, [E, F, D]), ("w_up", w_up, [E, F, D]), ("w_down", w_down, [E, D, F])):
        if list(w.shape) != shape:
            raise ShapeError(f"{name}: expected {shape}, got {list(w.shape)}; match x and w_gate")
        if w.dtype != x.dtype:
            raise ShapeError(f"{name}: expected x's dtype {x.dtype}, got {w.dtype}; cast one of them")
    if ids.dim() != 2 or ids.shape[0] != M or ids.dtype.is_floating_point:
        raise ShapeError(f"ids: expected integers [{M}, top_k], got {ids.dtype} {list(ids.shape)}; one row a token")
    on_cpu = ids.device.type == "cpu"  # elsewhere a look at the values would wait for the device
    low, high = (x.item() for x in ids.aminmax()) if on_cpu and ids.numel() else (0, 0)
    if low < -1 or high >= E:
        raise ShapeError(
            f"ids: expected expert numbers from 0 to {E - 1}, or -1, got {low if low < -1 else high}; "
            "route among the experts given"
        )
    if weights.shape != ids.shape:
        raise ShapeError(f"weights: expected {list(ids.shape)}, got {list(weights.shape)}; one for every id")

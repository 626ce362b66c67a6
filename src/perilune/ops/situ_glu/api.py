"""The public calls: check the tensors, pick a backend, run it."""

from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.situ_glu import chunked, fused, reference

SITU = Backends("situ_glu")  # best first
SITU.register("triton", fused.situ_glu, fused.refuses)
SITU.register("chunked", chunked.situ_glu)
SITU.register("reference", reference.situ_glu)

SWIGLU = Backends("swiglu")
SWIGLU.register("triton", fused.swiglu, fused.refuses)
SWIGLU.register("chunked", chunked.swiglu)
SWIGLU.register("reference", reference.swiglu)

SIGMOID = Backends("sigmoid_glu")
SIGMOID.register("triton", fused.sigmoid_glu, fused.refuses)
SIGMOID.register("chunked", chunked.sigmoid_glu)
SIGMOID.register("reference", reference.sigmoid_glu)


def situ_glu(
    gate: Tensor, up: Tensor, beta_gate: float = 4.0, beta_up: float = 25.0, *, backend: str = "auto"
) -> Tensor:
    """The gated unit of every feed-forward network in Kimi K3: SwiGLU with both branches smoothly capped.

        f(g, u) = [b1 tanh(g / b1) sigmoid(g)] [b2 tanh(u / b2)]                    (K3 report, Stable LatentMoE)

    The sigmoid sees the gate before its cap; |f| < b1 b2.  As b1 and b2 grow it becomes SwiGLU.

    gate, up: [...] of one shape and one floating dtype.  beta_gate, beta_up: the caps b1 and b2, positive.
    Returns [...] in that dtype, computed in float32 (float64 for float64) and rounded once, as its gradients are.
    The backward pass keeps `gate` and `up`, nothing else.
    backend: "auto", "triton" (on a GPU), "chunked" or "reference".
    Raises ShapeError where the two tensors do not fit or a cap is not positive.
    """
    _check(gate, up)
    for name, beta in (("beta_gate", beta_gate), ("beta_up", beta_up)):
        if not beta > 0:
            raise ShapeError(f"{name}: expected a positive cap, got {beta}; K3 uses 4 for the gate and 25 for up")
    return SITU.pick(backend, gate, up, beta_gate, beta_up)(gate, up, beta_gate, beta_up)


def swiglu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """The gated unit of Kimi Linear, without caps.

        f(g, u) = g sigmoid(g) u

    Shapes, dtypes, precision and errors are those of `situ_glu`.
    """
    _check(gate, up)
    return SWIGLU.pick(backend, gate, up)(gate, up)


def sigmoid_glu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """The gated unit whose gate is nothing but a sigmoid: what closes an attention layer of Kimi K3.

        f(g, u) = sigmoid(g) u                                                  (Dauphin et al., 2017)

    Shapes, dtypes, precision and errors are those of `situ_glu`.
    """
    _check(gate, up)
    return SIGMOID.pick(backend, gate, up)(gate, up)


def _check(gate: Tensor, up: Tensor) -> None:
    if not gate.is_floating_point():
        raise ShapeError(f"gate: expected a floating dtype, got {gate.dtype}; cast it first")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ShapeError(
            f"up: expected {gate.dtype} {list(gate.shape)} like gate, got {up.dtype} {list(up.shape)}; "
            "give both halves of one projection"
        )

"""The public call: check the tensors, pick a backend, run it."""

from collections.abc import Sequence

from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.projections import chunked, reference

BACKENDS = Backends("projections")
BACKENDS.register("chunked", chunked.projections)
BACKENDS.register("reference", reference.projections)


def projections(x: Tensor, weights: Sequence[Tensor], *, backend: str = "auto") -> tuple[Tensor, ...]:
    """What linear layers without bias give that read the same x.

        y_i = W_i x

    x: [..., D].  weights: N tensors [D_i, D].  Returns N tensors [..., D_i].  Under autocast x and weights are cast as
    linear layers would; without it x and all weights have one dtype.  The gradient of x is one sum to which each layer
    adds, rounded after each as autograd's would be; on a GPU 16-bit products give the gradients of float32 weights
    unrounded.  Gradients are first order only.
    Raises ShapeError where the tensors do not fit.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ShapeError(f"x: expected a floating tensor [..., D], got {x.dtype} {list(x.shape)}; cast or widen it")
    for i, w in enumerate(weights):
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ShapeError(
                f"weights[{i}]: expected [D_{i}, {x.shape[-1]}] for x's last axis, got {list(w.shape)}; "
                "give one row for each number of the result"
            )
    return BACKENDS.pick(backend, x, weights)(x, weights)

"""The public call: checks, the choice of backend."""

from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.autocast import without_autocast
from perilune.ops.wide_linear import parts, reference

BACKENDS = Backends("wide_linear")  # best first
BACKENDS.register("chunked", parts.wide_linear, parts.refuses)
BACKENDS.register("reference", reference.wide_linear)


def wide_linear(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """y = x W^T with every product and sum in float32, whatever x is: for scores that a rounded operand would tie.

    x: `[..., K]`, weight: `[N, K]`, any floating dtypes.  Returns `[..., N]` in float32 (float64 if either is).  What
    autocast asks for has no say.  dx and dW are made alike and rounded once, to the dtypes of x and weight; with
    "chunked" they are first order only.

    backend: "auto"; "chunked" (bfloat16 x on a GPU: tensor cores multiply W in three bfloat16 parts); or "reference".
    Of M rows and a finite W, y's error is at most n |x| |W|^T and dW's, before it is rounded, at most m |dy|^T |x|:

        "reference"    n = 2^-24 K                             m = 2^-24 M             sums are rounded to nearest
        "chunked"      n = 2^-23 (min(K, 1024) + K / 128)      m = 2^-23 1.01 M        and here cut off

    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            f"x: expected [..., K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}; "
            "the last axes are summed over"
        )
    with without_autocast(x):
        return BACKENDS.pick(backend, x, weight)(x, weight)

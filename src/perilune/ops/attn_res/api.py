"""The public call: check the tensors, pick a backend, run it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.attn_res import chunked, fused, reference, stored, stored_fused
from perilune.ops.attn_res.checks import check_sources, check_vector
from perilune.ops.attn_res.stored import Stored
from perilune.ops.autocast import without_autocast

BACKENDS = Backends("attn_res")  # best first
BACKENDS.register("triton", fused.attn_res_fused, fused.refuses)
BACKENDS.register("chunked", chunked.attn_res)
BACKENDS.register("reference", reference.attn_res)

STORED = Backends("attn_res_stored")
STORED.register("triton", stored_fused.float8_fused, stored_fused.refuses)
STORED.register("chunked", stored.by_rows)
STORED.register("reference", stored.plain)


def attn_res(
    query: Tensor,
    sources: Sequence[Tensor | Stored],
    key_weight: Tensor,
    *,
    eps: float = 1e-5,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """A per-token mixture of the sources, weighted by how well each answers one learned query.

        score_i = <query * key_weight, v_i rsqrt(mean v_i^2 + eps)>
        h       = sum_i softmax(score)_i v_i                         (Attention Residuals paper; K3 report, same title)

    The norm is for the scores alone: what is mixed are the raw sources.  There is no 1/sqrt(D).  A query of zeros
    gives the plain mean, a single source gives that source, and its query a gradient of exactly 0.

    query, key_weight: [D], the mixer's pseudo-query and its RMSNorm weight.  sources: one or more tensors [..., D] of
    one shape and floating dtype, whole or as `store_source` and `project_source` keep them.  eps: that of the norm, in
    the units of v^2.
    norm_weight: [D], if what is wanted is the mixture's RMSNorm, h rsqrt(mean h^2 + norm_eps) norm_weight.
    Returns [..., D] in the dtype of the sources, or in `dtype`: what a caller under autocast, who would cast the result
    anyway, asks for.  Scores, softmax and sum are float32 (float64 for float64).
    The backward pass keeps the sources themselves, not copies; for sources with many readers see `share_gradient`.

    backend: "auto", "triton" (on a GPU), "chunked" or "reference".
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    likes = [source.like if isinstance(source, Stored) else source for source in sources]
    check_sources(likes)
    check_vector("query", query, likes[0])
    check_vector("key_weight", key_weight, likes[0])
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, likes[0])
    dtype = likes[0].dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ShapeError(f"dtype: expected a floating dtype, got {dtype}; cast the result yourself")
    backends, given = BACKENDS, sources
    if any(isinstance(source, Stored) for source in sources):
        backends, given = STORED, [x if isinstance(x, Stored) else Stored(x) for x in sources]
    with without_autocast(likes[0]):
        arguments = (query, given, key_weight, eps, norm_weight, norm_eps, dtype)
        return backends.pick(backend, *arguments)(*arguments)

"""Attention residuals in two phases, for decoding: many queries share one reading of a bank that stays the same.

The softmax is split as in online attention.  Over the bank, `attn_res_bank` keeps for every query the largest score m,
the sum l of exp(score - m) and the equally weighted sum o of the sources; `attn_res_merge` adds the one source that
differs from query to query, the block's running sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.core.backends import Backends
from perilune.core.errors import ShapeError
from perilune.ops.attn_res import two_phase_fused
from perilune.ops.attn_res.checks import check_sources, check_vector
from perilune.ops.attn_res.reference import normalized
from perilune.ops.autocast import without_autocast


class Partial(NamedTuple):
    """An unfinished mixture: m and l are [Q, ...], o is [Q, ..., D]; without Q for a single query."""

    m: Tensor
    l: Tensor
    o: Tensor

    def of(self, i: int) -> "Partial":
        """The part of query i."""
        return Partial(self.m[i], self.l[i], self.o[i])


def attn_res_bank(
    queries: Tensor, sources: Sequence[Tensor], key_weights: Tensor, *, eps: float = 1e-5, backend: str = "auto"
) -> Partial:
    """The first phase: what Q mixers make of the sources they share.

    With score_i = <query * key_weight, v_i rsqrt(mean v_i^2 + eps)> per query and m = max_i score_i:
    l = sum_i exp(score_i - m),  o = sum_i exp(score_i - m) v_i                 (K3 report, Block Attention Residuals)

    queries, key_weights: [Q, D].  sources: one or more tensors [..., D].
    Returns Partial(m [Q, ...], l [Q, ...], o [Q, ..., D]) in float32 (float64 for float64 sources), not normalised.
    backend: "auto", "triton" (on a GPU, where no gradient is wanted; reads the bank twice, for any Q) or "reference".
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    check_sources(sources)
    for name, vectors in (("queries", queries), ("key_weights", key_weights)):
        if vectors.dim() != 2 or vectors.shape[1] != sources[0].shape[-1] or vectors.shape != queries.shape:
            raise ShapeError(
                f"{name}: expected [Q, {sources[0].shape[-1]}], got {list(vectors.shape)}; "
                "stack one vector for each query"
            )
    return Partial(*BANK.pick(backend, queries, sources, key_weights, eps=eps)(queries, sources, key_weights, eps=eps))


def attn_res_merge(
    partial: Partial,
    query: Tensor,
    source: Tensor,
    key_weight: Tensor,
    *,
    eps: float = 1e-5,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    backend: str = "auto",
) -> Tensor:
    """The second phase: one query's Partial and one more source make the finished mixture.

    With s the score of the source and M = max(m, s):
    (exp(m - M) o + exp(s - M) source) / (exp(m - M) l + exp(s - M))

    partial: of one query, m and l [...], o [..., D].  query, key_weight: [D].  source: [..., D].
    norm_weight: [D], if what is wanted is the mixture's RMSNorm, as in `attn_res`.
    Returns [..., D] in the dtype of the source, equal to `attn_res` over the bank and the source together.
    backend: "auto", "triton" (on a GPU, where no gradient is wanted) or "reference".
    Raises ShapeError where the tensors do not fit, BackendError for a backend that cannot serve the call.
    """
    return _merge(partial, query, source, None, key_weight, eps, norm_weight, norm_eps, backend)[0]


def attn_res_advance(
    partial: Partial,
    query: Tensor,
    live: Tensor,
    update: Tensor,
    key_weight: Tensor,
    *,
    eps: float = 1e-5,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A sublayer's output joins the block's running sum, and the next sublayer's mixer reads: `attn_res_merge` with
    the source live + update.

    live, update: [..., D] of one dtype; their sum is rounded to it before it is read.  Returns (mixture, sum).
    """
    return _merge(partial, query, live, update, key_weight, eps, norm_weight, norm_eps, backend)


def _merge(
    partial: Partial,
    query: Tensor,
    source: Tensor,
    update: Tensor | None,
    key_weight: Tensor,
    eps: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    check_sources([source] if update is None else [source, update])
    check_vector("query", query, source)
    check_vector("key_weight", key_weight, source)
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, source)
    if partial.o.shape != source.shape:
        raise ShapeError(
            f"partial: expected o {list(source.shape)} like the source, got {list(partial.o.shape)}; "
            "take one query with .of(i)"
        )
    arguments = (*partial, query, source, key_weight)
    options = {"eps": eps, "update": update, "norm_weight": norm_weight, "norm_eps": norm_eps}
    return MERGE.pick(backend, *arguments, **options)(*arguments, **options)


def bank_reference(
    queries: Tensor, sources: Sequence[Tensor], key_weights: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """m, l [Q, ...] and o [Q, ..., D]."""
    compute = torch.promote_types(sources[0].dtype, torch.float32)
    v = torch.stack([source.to(compute) for source in sources])  # [N, ..., D]
    with without_autocast(v):
        score = _scores(v, queries.to(compute) * key_weights.to(compute), eps)  # [N, ..., Q]
        score = score.movedim(-1, 0)  # [Q, N, ...]
        m = score.amax(1)
        e = torch.exp(score - m.unsqueeze(1))
        return m, e.sum(1), torch.einsum("qn...,n...d->q...d", e, v)


def merge_reference(
    m: Tensor,
    l: Tensor,
    o: Tensor,
    query: Tensor,
    source: Tensor,
    key_weight: Tensor,
    *,
    eps: float,
    update: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """The mixture, and the source with its update."""
    if update is not None:
        source = source + update
    compute = torch.promote_types(o.dtype, torch.float32)
    v = source.to(compute)
    with without_autocast(v):
        s = _scores(v, query.to(compute) * key_weight.to(compute), eps)
    top = torch.maximum(m, s)
    old, new = torch.exp(m - top), torch.exp(s - top)
    mixed = old.unsqueeze(-1) * o + new.unsqueeze(-1) * v
    mixed = mixed / (old * l + new).unsqueeze(-1)
    return normalized(mixed, norm_weight, norm_eps).to(source.dtype), source


def _scores(v: Tensor, w: Tensor, eps: float) -> Tensor:
    """[..., D] against w [D] or [Q, D] -> [...] or [..., Q]."""
    scale = torch.rsqrt(v.square().mean(-1) + eps)
    return (v @ w) * scale if w.dim() == 1 else (v @ w.T) * scale.unsqueeze(-1)


BANK = Backends("attn_res_bank")  # best first
BANK.register("triton", two_phase_fused.bank, two_phase_fused.refuses_bank)
BANK.register("reference", bank_reference)
MERGE = Backends("attn_res_merge")
MERGE.register("triton", two_phase_fused.merge, two_phase_fused.refuses_merge)
MERGE.register("reference", merge_reference)

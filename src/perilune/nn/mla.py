"""Gated multi-head latent attention without position encoding."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from perilune.core.errors import ShapeError
from perilune.nn.cache import LatentCache, pad_documents, token_counts, unpad_documents
from perilune.nn.norm import RMSNorm
from perilune.nn.precision import at_least_float32
from perilune.nn.project import project
from perilune.nn.recompute import recomputing
from perilune.ops import sigmoid_glu
from perilune.ops.packing import boundaries
from perilune.ops.shards import Shard, gather_rows, shard_of

LATENT_EPS = 1e-6  # of the two low-rank norms; the released code keeps its class default here, not the config's 1e-5


class GatedMLA(nn.Module):
    """Multi-head latent attention with an output gate and no position encoding (K3 report, section 2.1.2).

        c_q = RMSNorm(W_qa x),  q = W_qb c_q            or q = W_q x with q_lora_rank=None
        c | r = W_kva x,  c = RMSNorm(c),  k_h | v_h = W_kvb c,  keys [k_h | r]: r is shared by all heads
        y = W_o [ sigmoid(W_g x) * softmax_causal(q k^T / sqrt(nope + rope)) v ]

    `x: [B, T, D]` gives `[B, T, D]`.  "rope" is a historical name: nothing is ever rotated.  With `cu_seqlens` tokens
    see their own document only.  A cache keeps `c | r` per token; short calls on it run in the absorbed form, where
    W_kvb moves into the query and the output, long ones expand keys and values.

    With `group`, a process group, x is this rank's shard of rows that are cut over its ranks, and `cu_seqlens` has the
    boundaries in the whole row, all as for `KimiDeltaAttention`.  Latents of all ranks are gathered, small as they are,
    and each rank expands those that its queries see.

    With `track_max_logits` a training forward also records, per head, the largest scaled logit of any (query, key)
    pair in `max_logits` [H], a running maximum until cleared: what QK-clip reads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        nope_head_dim: int = 128,
        rope_head_dim: int = 64,
        v_head_dim: int = 128,
        output_gate: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.nope, self.rope, self.v_dim, self.rank = nope_head_dim, rope_head_dim, v_head_dim, kv_lora_rank
        self.scale = (nope_head_dim + rope_head_dim) ** -0.5
        q_width = num_heads * (nope_head_dim + rope_head_dim)
        self.q_lora_rank = q_lora_rank
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(q_lora_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (nope_head_dim + v_head_dim), bias=False)
        self.g_proj = nn.Linear(hidden_size, num_heads * v_head_dim, bias=False) if output_gate else None
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=False)
        self.track_max_logits = False
        self.max_logits: Tensor | None = None

    @property
    def q_weight(self) -> Tensor:
        """The matrix whose rows are the heads' queries: [H * (nope + rope), D or q_lora_rank]."""
        return (self.q_proj if self.q_lora_rank is None else self.q_b_proj).weight

    def new_cache(self, batch: int) -> LatentCache:
        return LatentCache([0] * batch)

    def forward(
        self,
        x: Tensor,
        *,
        cache: LatentCache | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        group: "dist.ProcessGroup | None" = None,
    ) -> Tensor:
        B, T, _ = x.shape
        if group is not None and cache is not None:
            raise ShapeError("cache: expected none beside group, got both; decode in one process, without a group")
        shard = None if group is None else shard_of(cu_seqlens, B, T, group)
        cu = boundaries(cu_seqlens, B, T) if shard is None else shard.cu
        first = self.q_proj if self.q_lora_rank is None else self.q_a_proj
        gates = () if self.g_proj is None else (self.g_proj,)
        q, latent, *gate = project(x, first, self.kv_a_proj_with_mqa, *gates)
        if self.q_lora_rank is not None:
            (q,) = project(self.q_a_layernorm(q), self.q_b_proj)
        q = q.view(B, T, self.num_heads, self.nope + self.rope)
        c, r = latent.split([self.rank, self.rope], dim=-1)
        latents = torch.cat([self.kv_a_layernorm(c), r], dim=-1)  # [B, T, rank + rope]
        counts = token_counts(B, T, cu)
        if cache is None:
            past = 0
            if shard is not None and shard.linked:
                latents, past = self._seen(gather_rows(latents, group), shard, cu_seqlens, T)
            o = self._self_attention(q, latents, counts, past)
        else:
            o = self._cached_attention(q, latents, cache, counts, packed=cu is not None)
        if gate:  # multiplied in float32, rounded once
            o = sigmoid_glu(gate[0].view_as(o).to(o.dtype), o)
        return project(o.to(x.dtype).flatten(2), self.o_proj)[0]

    def _expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents `[N, L, rank + rope]` to keys `[N, L, H, nope + rope]` and values `[N, L, H, v]`."""
        c, r = latents.split([self.rank, self.rope], dim=-1)
        k, v = project(c, self.kv_b_proj)[0].unflatten(-1, (self.num_heads, -1)).split([self.nope, self.v_dim], dim=-1)
        return torch.cat([k, r.unsqueeze(2).expand(*k.shape[:3], -1)], dim=-1), v

    def _seen(
        self, latents: Tensor, shard: Shard, cu_seqlens: Tensor | Sequence[int] | None, length: int
    ) -> tuple[Tensor, int]:
        """Of whole rows `[B, T, rank + rope]`, what a shard's queries see: from the beginning of its first document to
        its own end.  And how many of those tokens lie on earlier ranks."""
        first = shard.rank * length
        begin = min(first, int(cu_seqlens[shard.ends.start])) if cu_seqlens is not None else 0
        return latents[:, begin : first + length], first - begin

    def _self_attention(self, q: Tensor, latents: Tensor, counts: list[int], past: int = 0) -> Tensor:
        """Every document by itself: `q: [B, T, H, nope + rope]`, documents of `counts` tokens end to end in B*T.

        past: how many tokens the first document, or every row of a batch, has in front of its queries.
        """
        k, v = self._expand(latents)
        keys = [n + past for n in counts] if len(q) > 1 else [n + past * (i == 0) for i, n in enumerate(counts)]
        if self.track_max_logits and self.training and not recomputing():
            self._record_max_logits(q, k, counts, keys)
        if len(set(zip(counts, keys))) == 1:  # equal lengths: one batch
            a, b, c = (t.reshape(len(n), n[0], *t.shape[2:]) for t, n in ((q, counts), (k, keys), (v, keys)))
            return causal_attention(a, b, c, self.scale).reshape(*q.shape[:3], self.v_dim)
        if not counts:  # no token either; every parameter has its gradient of zero
            return q[..., :1] * v
        rows_q, rows_k, rows_v = (t.flatten(0, 1).split(n) for t, n in ((q, counts), (k, keys), (v, keys)))
        outputs = [
            causal_attention(a[None], b[None], c[None], self.scale)[0] for a, b, c in zip(rows_q, rows_k, rows_v)
        ]
        return torch.cat(outputs).view(*q.shape[:3], self.v_dim)

    def _cached_attention(
        self, q: Tensor, latents: Tensor, cache: LatentCache, counts: list[int], packed: bool
    ) -> Tensor:
        """New tokens on top of a cache; its sequences may differ in length and in how many tokens they add."""
        if len(cache.lengths) != len(counts):
            raise ShapeError(
                f"cache: expected one for {len(counts)} sequences, got one for {len(cache.lengths)}; make a new one"
            )
        if packed:
            q, latents = pad_documents(q, counts), pad_documents(latents, counts)
        starts = torch.tensor(cache.lengths, device=q.device)
        past = cache.append(latents, counts)  # [N, L, rank + rope]
        T, L = q.shape[1], past.shape[1]
        position = starts[:, None] + torch.arange(T, device=q.device)  # [N, T] of each query in its sequence
        visible = torch.arange(L, device=q.device) <= position[..., None]  # [N, T, L]
        # Products per key: expanding costs rank (nope + v) once, the absorbed form 2 rank - nope - v more a query.
        absorbed = T * (2 * self.rank - self.nope - self.v_dim) < self.rank * (self.nope + self.v_dim)
        o = (
            self._absorbed(q, past, visible)
            if absorbed
            else masked_attention(q, *self._expand(past), visible, self.scale)
        )
        return unpad_documents(o, counts) if packed else o

    def _absorbed(self, q: Tensor, latents: Tensor, visible: Tensor) -> Tensor:
        """Attention over latents themselves: `q: [N, T, H, nope + rope]`, `latents: [N, L, rank + rope]`."""
        w = self.kv_b_proj.weight.view(self.num_heads, self.nope + self.v_dim, self.rank)
        w_uk, w_uv = w.split([self.nope, self.v_dim], dim=1)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([torch.einsum("nthd,hdr->nthr", q_nope, w_uk), q_rope], dim=-1)
        scores = at_least_float32(torch.einsum("nthr,nlr->nhtl", q, latents)) * self.scale
        p = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1).to(q.dtype)
        return torch.einsum("nhtl,nlr,hvr->nthv", p, latents[..., : self.rank], w_uv)

    @torch.no_grad()
    def _record_max_logits(self, q: Tensor, k: Tensor, counts: list[int], keys: list[int], rows: int = 256) -> None:
        """Folds the largest causal logit of each head into `max_logits`, `rows` queries at a time.

        Each document's queries are the last `counts` tokens of its `keys`."""
        best = q.new_full((self.num_heads,), -torch.inf)
        for a, b in zip(q.flatten(0, 1).split(counts), k.flatten(0, 1).split(keys)):  # [T, H, D]
            past = len(b) - len(a)
            for t in range(0, len(a), rows):
                end = min(t + rows, len(a))
                logits = torch.einsum("thd,lhd->htl", a[t:end], b[: past + end]) * self.scale
                future = torch.ones(end - t, past + end, dtype=torch.bool, device=q.device).triu(past + t + 1)
                best = torch.maximum(best, logits.masked_fill(future, -torch.inf).amax((1, 2)))
        best = at_least_float32(best)
        self.max_logits = best if self.max_logits is None else torch.maximum(self.max_logits, best)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, nope={self.nope}, rope={self.rope}, v={self.v_dim}"


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax_causal(scale q k^T) v for `q: [N, T, H, D]`, `k: [N, L, H, D]`, `v: [N, L, H, V]`; `[N, T, H, V]`.

    Queries are the last T of L tokens.  Values narrower than keys are widened by zeros where no fused kernel, which
    never holds T x L scores, takes them as they are.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    width = v.shape[-1]
    whole = q.shape[-2] == k.shape[-2]
    if width < q.shape[-1] and not (whole and _takes_narrow_values(q, k, v)):
        v = F.pad(v, (0, q.shape[-1] - width))
    if whole:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask: Tensor = causal_lower_right(q.shape[-2], k.shape[-2])
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return o[..., :width].transpose(1, 2)


def _takes_narrow_values(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN computes causal attention of these: a third quicker than with zeros beside v, on an H200."""
    if not q.is_cuda or not torch.backends.cuda.cudnn_sdp_enabled() or torch.compiler.is_compiling():
        return False
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v over the keys that `visible: [N, T, L]` allows; shapes as in `causal_attention`."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible.unsqueeze(1), scale=scale).transpose(1, 2)

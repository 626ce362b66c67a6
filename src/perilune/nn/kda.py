"""The Kimi Delta Attention layer: short convolutions, per-channel decay, the delta rule, a gated head norm."""

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perilune.core.errors import ConfigError, ShapeError
from perilune.nn.cache import RecurrentCache, token_counts
from perilune.nn.norm import GatedHeadNorm
from perilune.nn.precision import Float32Parameters
from perilune.nn.project import project
from perilune.ops import (
    BoundedGate,
    KdaPool,
    KdaWeights,
    SoftplusGate,
    kda,
    kda_context_parallel,
    kda_decode,
    short_conv,
    short_conv_context_parallel,
)
from perilune.ops.kda.reference import working_dtype
from perilune.ops.packing import boundaries
from perilune.ops.shards import place_in


class ShortConv(Float32Parameters):
    """The filter of a depthwise causal convolution: `weight` [D, 1, W], kept in float32."""

    float32 = ("weight",)

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.weight.shape[-1]}"


class KimiDeltaAttention(Float32Parameters):
    """Kimi Delta Attention (K3 report, section 2.1.1; Kimi Linear paper).

    Per head, with state S [K, V] in float32, zero at the start of every document:

        q, k = l2norm(silu(conv(W x))),  v = silu(conv(W x)),  beta = sigmoid(W_b x)
        g    = g_min * sigmoid(exp(A_log) * (W_fb W_fa x + dt_bias))         bounded, g_min = -5
           or  -exp(A_log) * softplus(W_fb W_fa x + dt_bias)                 with g_min=None, Kimi Linear's
        S_t  = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T,   o_t = K^-1/2 S_t^T q
        y    = W_o [ sigmoid(W_g x) * RMSNorm_head(o) ]

    `x: [B, T, D]` gives `[B, T, D]`.  With `cu_seqlens: [N+1]` (then B is 1) every document starts afresh, or, with a
    cache of N sequences, goes on where its sequence stopped.  One token a sequence on a filled cache, without
    gradients, is a fused step (`kda_decode`).

    With `group`, a process group, x is this rank's shard of rows that are cut over its ranks in their order, equally
    and without gaps, and `cu_seqlens` has the boundaries in the whole row: outputs are those of one process, and so are
    the parameters' gradients once they are summed over the group.  Every rank makes the call and runs its backward
    pass, or none does.  There is no cache then.

    Raises ConfigError for sizes below 1 and for `g_min` out of range; ShapeError for x of other dimensions, for a cache
    of another size or beside a group, and for `cu_seqlens` that do not describe x.

    Parameters have the names and shapes of the released checkpoints; `A_log` [H], `dt_bias` [H*K] and the convolution
    filters stay in float32.
    """

    float32: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        g_min: float | None = -5.0,
        conv_size: int = 4,
        full_rank_gate: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim, "conv_size": conv_size}
        if small := [name for name, size in sizes.items() if size < 1]:
            raise ConfigError(f"{small[0]}: expected 1 at least, got {sizes[small[0]]}; give a layer's size")
        if g_min is not None and not -5.5 <= g_min < 0:
            raise ConfigError(f"g_min: expected from -5.5 up to below 0, got {g_min}; give None for the softplus gate")
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.g_min = g_min
        width = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.q_conv1d = ShortConv(width, conv_size)
        self.k_conv1d = ShortConv(width, conv_size)
        self.v_conv1d = ShortConv(width, conv_size)
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.full_rank_gate = full_rank_gate
        if full_rank_gate:
            self.g_proj = nn.Linear(hidden_size, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
            self.g_b_proj = nn.Linear(head_dim, width, bias=False)
        self.o_norm = GatedHeadNorm(head_dim, norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The decay as its sources draw it: steps log-uniform in [0.001, 0.1]; A = 0 bounded, log U(1, 16) softplus."""
        with torch.no_grad():
            self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_().clamp_(min=1e-4)
            self.dt_bias.add_(torch.log(-torch.expm1(-self.dt_bias)))  # inverse softplus
            if self.g_min is None:
                self.A_log.uniform_(1, 16).log_()
            else:
                self.A_log.zero_()

    def new_cache(self, batch: int) -> RecurrentCache:
        return RecurrentCache([0] * batch)

    def forward(
        self,
        x: Tensor,
        *,
        cache: RecurrentCache | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        group: "dist.ProcessGroup | None" = None,
    ) -> Tensor:
        if x.dim() != 3:
            raise ShapeError(f"x: expected [B, T, D], got {list(x.shape)}; a row of tokens alone is x[None]")
        B, T, _ = x.shape
        if group is not None and cache is not None:
            raise ShapeError("cache: expected none beside group, got both; decode in one process, without a group")
        cu = boundaries(cu_seqlens, B, T if group is None else T * place_in(group)[1])
        counts = [] if cache is None else token_counts(B, T, cu)
        if cache is not None and len(cache.lengths) != len(counts):
            raise ShapeError(
                f"cache: expected one for {len(counts)} sequences, got one for {len(cache.lengths)}; make a new one"
            )
        if cache is not None and cache.state is not None and set(counts) == {1} and _steps(x):
            return self._step(x.view(len(counts), 1, -1), cache).view_as(x)
        last = self.g_proj if self.full_rank_gate else self.g_a_proj
        *qkv, decay, beta, gate = project(x, self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, last)
        q, k, v, window = self._convolved(qkv, cache, cu, group)
        heads = (B, T, self.num_heads, self.head_dim)
        attend = kda if group is None else partial(kda_context_parallel, group=group)
        o, state = attend(
            q.view(heads),
            k.view(heads),
            v.view(heads),
            project(decay, self.f_b_proj)[0].view(heads),
            beta,
            gate=self.gate,
            normalize_qk=True,
            beta_logits=True,
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            cu_seqlens=cu,
        )
        if cache is not None:
            assert window is not None
            assert state is not None
            cache.update(window, state, counts)
        if not self.full_rank_gate:
            (gate,) = project(gate, self.g_b_proj)
        return project(self.o_norm(o, gate.view(heads)).flatten(2), self.o_proj)[0]

    def _step(self, x: Tensor, cache: RecurrentCache) -> Tensor:
        """One token for each of N sequences, x: [N, 1, D], on a filled cache and without gradients: [N, 1, D]."""
        assert cache.state is not None
        assert cache.conv is not None
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        z, beta = self.f_b_proj(self.f_a_proj(x)).unflatten(2, (self.num_heads, self.head_dim)), self.b_proj(x)
        # The step writes over them, and somebody may hold them: a snapshot, another cache, a graph.
        state, window = (
            past.to(dtype, copy=True, memory_format=torch.contiguous_format)
            for past, dtype in ((cache.state, working_dtype(qkv, cache.state)), (cache.conv, qkv.dtype))
        )
        pool = KdaPool(state, window, *(x[:, :0] for x in (qkv, z, beta)))  # no room for drafts
        taps = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        weights = KdaWeights(taps, self.gate, self.o_norm.weight, self.o_norm.eps)
        slots = torch.arange(len(x), device=x.device)
        o = kda_decode(qkv, z, beta, self._output_gate(x), pool, slots, weights)
        cache.update(pool.window, pool.state, [1] * len(x))
        return self.o_proj(o.flatten(2))

    def _convolved(
        self, qkv: Sequence[Tensor], cache: RecurrentCache | None, cu: list[int] | None,
        group: "dist.ProcessGroup | None",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """q, k, v after their convolutions, `[B, T, P]` each, and the window `[N, W-1, 3P]` that a cache keeps."""
        past = (None,) * 3 if cache is None or cache.conv is None else cache.conv.chunk(3, dim=-1)
        convolve = short_conv if group is None else partial(short_conv_context_parallel, group=group)
        outputs: list[Tensor] = []
        windows: list[Tensor] = []
        for x, conv, old in zip(qkv, (self.q_conv1d, self.k_conv1d, self.v_conv1d), past):
            y, window = convolve(x, conv.weight, initial_state=old, output_final_state=cache is not None, cu_seqlens=cu)
            outputs.append(y)
            if window is not None:
                windows.append(window)
        q, k, v = outputs
        return q, k, v, torch.cat(windows, dim=-1) if windows else None

    def _output_gate(self, x: Tensor) -> Tensor:
        """Its logits, before the sigmoid: [B, T, H, V]."""
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        return gate.unflatten(2, (self.num_heads, self.head_dim))

    @property
    def gate(self) -> BoundedGate | SoftplusGate:
        """What turns the decay logit into the log-decay."""
        bias = self.dt_bias.view(self.num_heads, self.head_dim)
        return SoftplusGate(self.A_log, bias) if self.g_min is None else BoundedGate(self.A_log, bias, self.g_min)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, head_dim={self.head_dim}, g_min={self.g_min}"


def _steps(x: Tensor) -> bool:
    """Whether `kda_decode` may serve: it has no gradients, and on a CPU looks at values, which torch.compile cannot."""
    return not torch.is_grad_enabled() and (x.is_cuda or not torch.compiler.is_compiling())

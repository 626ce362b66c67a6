"""A K3-class model as somebody would compose it who has flash-linear-attention and PyTorch, and nothing from here.

From the former are KDA, attention residuals with the norm behind each, all other norms, SwiGLU and the head's loss,
from the latter linear layers, attention and the experts' grouped products.  Layers, widths and parameters are those of
`K3Model`, under its names but for the two matrices of the decay, which are in `f_proj`.  With the same weights, and
SwiGLU in both, so are loss and gradients.

What is not alike: SwiGLU stands for SiTU-GLU, which has no fused form elsewhere; experts are scored in the precision of
other products; their bias follows a rule that costs less; QK-clip is left out.  All of it is in the peer's favour.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.bench.peer.parts import Parts
from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Config

LATENT_EPS = 1e-6
"""Of MLA's two low-rank norms, as released."""
FIXED = {
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "num_expert_group": 1,
    "moe_renormalize": True,
    "latent_moe_use_norm": True,
}
"""Fields of a configuration that the peer has one form for."""


class Mixer(nn.Module):
    """A pseudo-query and the norm of its keys.  Also computes the norm of what it gives, in the same kernel."""

    def __init__(self, size: int, eps: float, parts: Parts) -> None:
        super().__init__()
        self.mixture, self.eps = parts.mixture, eps
        self.query = nn.Parameter(torch.zeros(size))
        self.norm = parts.norm(size, eps=eps)

    def forward(self, sources: Sequence[Tensor], behind: nn.Module) -> Tensor:
        """norm(sum_i a_i v_i), a = softmax_i(<query * weight, v_i / rms(v_i)>); `behind` is the outer norm."""
        return self.mixture(self.query, sources, self.norm.weight, behind.weight, rms_eps=self.eps)


class LatentAttention(nn.Module):
    """Gated MLA without position encoding."""

    def __init__(self, config: K3Config, parts: Parts) -> None:
        super().__init__()
        D, H, rank, q_rank = (
            config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank,
        )  # fmt: skip
        self.heads, self.rank = H, rank
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        key = self.nope + self.rope
        if q_rank is None:
            self.q_proj = _linear(D, H * key)
        else:
            self.q_a_proj = _linear(D, q_rank)
            self.q_a_layernorm = parts.norm(q_rank, eps=LATENT_EPS)
            self.q_b_proj = _linear(q_rank, H * key)
        self.low_rank_query = q_rank is not None
        self.kv_a_proj_with_mqa = _linear(D, rank + self.rope)
        self.kv_a_layernorm = parts.norm(rank, eps=LATENT_EPS)
        self.kv_b_proj = _linear(rank, H * (self.nope + self.value))
        self.g_proj = _linear(D, H * self.value) if config.mla_use_output_gate else None
        self.o_proj = _linear(H * self.value, D)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """x: [1, T, D], documents of these lengths end to end."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank_query else self.q_proj(x)
        c, r = self.kv_a_proj_with_mqa(x)[0].split([self.rank, self.rope], dim=-1)
        k, v = self.kv_b_proj(self.kv_a_layernorm(c)).unflatten(-1, (self.heads, -1)).split([self.nope, self.value], -1)
        k = torch.cat([k, r.unsqueeze(1).expand(-1, self.heads, -1)], dim=-1)
        q = q[0].unflatten(-1, (self.heads, -1))
        if k.shape[-1] > self.value:
            v = F.pad(v, (0, k.shape[-1] - self.value))  # the fused kernels want one width
        if len(set(lengths)) == 1:
            documents = [[t.unflatten(0, (-1, lengths[0])) for t in (q, k, v)]]  # one batch
        else:
            documents = [[t[None] for t in one] for one in zip(*(t.split(list(lengths)) for t in (q, k, v)))]
        o = torch.cat([_causal(*one) for one in documents])[None, ..., : self.value].flatten(2)
        if self.g_proj is not None:
            o = o * torch.sigmoid(self.g_proj(x))
        return self.o_proj(o)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[N, L, H, D]` each, to `[N L, H, D]`."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


class Experts(nn.Module):
    """The weights of all experts, stacked: `w1` gate and `w3` up [E, F, L], `w2` down [E, L, F]."""

    def __init__(self, num_experts: int, width: int, inner: int, std: float) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(std * torch.randn(num_experts, inner, width)) for _ in range(2))
        self.w2 = nn.Parameter(std * torch.randn(num_experts, width, inner))


class MixtureOfExperts(nn.Module):
    """Experts at a latent width, chosen by sigmoid scores plus a bias that goes a step towards even loads."""

    bias: Tensor
    loads: Tensor

    def __init__(self, config: K3Config, parts: Parts) -> None:
        super().__init__()
        D, E, latent = config.hidden_size, config.num_experts, config.routed_expert_hidden_size
        assert latent is not None
        self.top_k, self.scaling, self.swiglu = config.num_experts_per_token, config.routed_scaling_factor, parts.swiglu
        self.gate = _linear(D, E)
        self.experts = Experts(E, latent, config.moe_intermediate_size, config.initializer_range)
        self.routed_expert_down_proj = _linear(D, latent)
        self.routed_expert_norm = parts.norm(latent, eps=config.rms_norm_eps)
        self.routed_expert_up_proj = _linear(latent, D)
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = parts.feed_forward(D, intermediate_size=shared) if shared else None
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("loads", torch.zeros(E), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # [M, D]
        scores = torch.sigmoid(self.gate(tokens).to(torch.promote_types(torch.float32, tokens.dtype)))
        ids = (scores + self.bias).topk(self.top_k, sorted=False).indices
        chosen = scores.gather(1, ids)
        weights = self.scaling * chosen / chosen.sum(-1, keepdim=True)
        u = self._routed(self.routed_expert_down_proj(tokens), ids, weights)
        y = self.routed_expert_up_proj(self.routed_expert_norm(u))
        if self.shared_experts is not None:
            y = y + self.shared_experts(tokens)
        return y.view(x.shape)

    def _routed(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """sum_k weights E_ids(z): `[M, L]`, `[M, k]`, `[M, k]` to `[M, L]`.

        Rows are sorted by expert.  One row of zeros more for each keeps all of them occupied: some grouped kernels
        leave the gradient of an expert without rows unwritten.
        """
        (M, L), E = z.shape, self.experts.w1.shape[0]
        every = torch.arange(E, device=z.device)
        of_expert, order = torch.cat([ids.flatten(), every]).sort(stable=True)
        ends = torch.searchsorted(of_expert, every, right=True, out_int32=True)
        rows = F.pad(z, (0, 0, 0, 1)).index_select(0, (order // self.top_k).clamp_(max=M))
        w1, w2, w3 = (w.to(z.dtype).mT for w in (self.experts.w1, self.experts.w2, self.experts.w3))
        inner = self.swiglu(F.grouped_mm(rows, w1, offs=ends), F.grouped_mm(rows, w3, offs=ends))
        out = F.grouped_mm(inner, w2, offs=ends)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=z.device))
        out = out.index_select(0, place[: M * self.top_k]).view(M, self.top_k, L)
        with torch.no_grad():
            self.loads.copy_(ends.diff(prepend=ends.new_zeros(1)) - 1)
        return torch.bmm(weights.unsqueeze(1).to(out.dtype), out).squeeze(1)

    @torch.no_grad()
    def balance(self, rate: float = 1e-3) -> None:
        """Moves the bias by the sign of what each expert lacks: DeepSeek-V3's rule."""
        self.bias.add_(torch.sign(self.loads.mean() - self.loads), alpha=rate)


class Layer(nn.Module):
    """Attention, then feed-forward.  A sublayer and what stands before it have the names of `K3Model`'s."""

    def __init__(self, config: K3Config, i: int, parts: Parts) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.self_attention_res = Mixer(D, eps, parts)
        self.input_layernorm = parts.norm(D, eps=eps)
        self.recurrent = config.attention(i) == "kda"
        self.self_attn = delta_attention(config, parts) if self.recurrent else LatentAttention(config, parts)
        self.mlp_res = Mixer(D, eps, parts)
        self.post_attention_layernorm = parts.norm(D, eps=eps)
        self.mlp = None if config.is_moe(i) else parts.feed_forward(D, intermediate_size=config.intermediate_size)
        self.block_sparse_moe = MixtureOfExperts(config, parts) if config.is_moe(i) else None

    def attend(self, sources: Sequence[Tensor], cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        x = self.self_attention_res(sources, self.input_layernorm)
        return self.self_attn(x, cu_seqlens=cu_seqlens)[0] if self.recurrent else self.self_attn(x, lengths)

    def feed(self, sources: Sequence[Tensor]) -> Tensor:
        x = self.mlp_res(sources, self.post_attention_layernorm)
        return cast("nn.Module", self.block_sparse_moe or self.mlp)(x)


def delta_attention(config: K3Config, parts: Parts) -> nn.Module:
    """KDA as configured; where its output gate has full rank, one matrix for the layer's two."""
    linear = config.linear_attn_config
    layer = parts.attention(
        hidden_size=config.hidden_size,
        head_dim=linear.head_dim,
        num_heads=linear.num_heads,
        conv_size=linear.short_conv_kernel_size,
        norm_eps=config.rms_norm_eps,
        safe_gate=linear.gate_lower_bound is not None,
        lower_bound=linear.gate_lower_bound,
    )
    if linear.use_full_rank_gate:
        layer.g_proj = _linear(config.hidden_size, linear.num_heads * linear.head_dim)
    return layer


class Backbone(nn.Module):
    """Embedding, layers, and the mixture over depth that the head reads."""

    def __init__(self, config: K3Config, parts: Parts, dtype: torch.dtype) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        period = config.residual_period
        assert period is not None
        self.period, self.dtype = period, dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, D)
        self.layers = nn.ModuleList(Layer(config, i, parts) for i in range(config.num_hidden_layers))
        self.output_attn_res = Mixer(D, eps, parts)
        self.norm = parts.norm(D, eps=eps)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        """`[1, T]` to the head's features `[1, T, D]`."""
        live: Tensor | None = self.embed_tokens(input_ids).to(self.dtype)
        bank: list[Tensor] = []
        for read in range(2 * len(self.layers)):
            layer = cast("Layer", self.layers[read // 2])
            sources = [*bank, cast("Tensor", live)]
            if read % self.period == 0:
                bank, live = sources, None
            out = layer.feed(sources) if read % 2 else layer.attend(sources, cu_seqlens, lengths)
            live = out if live is None else live + out
        return self.output_attn_res([*bank, cast("Tensor", live)], self.norm)


class PeerModel(nn.Module):
    """Of the same shape as `K3Model(config)`.

    dtype: of sums over depth.  Under autocast its own, as in flash-linear-attention's models in mixed precision.
    Raises ConfigError for a model that it has no form for.
    """

    def __init__(self, config: K3Config, parts: Parts, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        _check(config)
        self.loss = parts.loss
        self.model = Backbone(config, parts, dtype)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, input_ids: Tensor, targets: Tensor, cu_seqlens: Tensor, lengths: Sequence[int]) -> Tensor:
        """The mean loss over targets other than -100.

        input_ids, targets: [1, T], documents of these `lengths` end to end; targets are shifted already.
        cu_seqlens: [N+1], their boundaries, where the tokens are.
        """
        features = self.model(input_ids, cu_seqlens, lengths)
        return self.loss(features.flatten(0, 1), targets.flatten(), self.lm_head.weight)

    def balance(self) -> None:
        """After the optimizer's step."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.balance()


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _check(config: K3Config) -> None:
    for name, only in FIXED.items():
        if (value := getattr(config, name)) != only:
            raise ConfigError(f"{name}: expected {only}, got {value}; the peer has no other form")
    for name in ("attn_res_block_size", "routed_expert_hidden_size"):
        if getattr(config, name) is None:
            raise ConfigError(f"{name}: expected a number, got none; the peer has no other form")
    if others := {config.attention(i) for i in range(config.num_hidden_layers)} - {"kda", "mla"}:
        raise ConfigError(f"layer_types: expected kda or mla, got {min(others)!r}; the peer has no other form")

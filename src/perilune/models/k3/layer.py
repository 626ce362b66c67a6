"""One decoder layer, and the multi-token prediction layer built from it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perilune.models.k3.attention import kind_of
from perilune.models.k3.config import K3Config
from perilune.nn import GLU, BlockAttnRes, DepthStream, RMSNorm, StableLatentMoE
from perilune.nn.balancer import balancer
from perilune.nn.glu import Activation
from perilune.ops.autocast import dtype_for_products
from perilune.ops.quantile_bias import Groups


def build_moe(config: K3Config) -> StableLatentMoE:
    return StableLatentMoE(
        config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_token,
        expert_size=config.moe_intermediate_size,
        latent_size=config.routed_expert_hidden_size,
        latent_norm=config.latent_moe_use_norm,
        shared_size=config.num_shared_experts * config.moe_intermediate_size,
        **activation(config),
        balancer=balancer(
            config.balance.kind,
            config.num_experts,
            config.num_experts_per_token,
            **{"groups": Groups(config.num_expert_group, config.topk_group), **config.balance.options},
        ),
        renormalize=config.moe_renormalize,
        scaling=config.routed_scaling_factor,
        num_groups=config.num_expert_group,
        topk_group=config.topk_group,
        norm_eps=config.rms_norm_eps,
    )


def activation(config: K3Config) -> dict[str, Any]:
    """The feed-forward activation as keyword arguments of GLU and StableLatentMoE."""
    name: Activation = config.hidden_act
    if name == "silu":
        return {"activation": name}
    return {
        "activation": name,
        "beta_gate": config.activation_situ_beta,
        "beta_up": config.activation_situ_linear_beta,
    }


class DecoderLayer(nn.Module):
    """Attention, then feed-forward, each reading the depth stream through a norm and adding to it.

    With `mixers` every sublayer reads a mixture over depth (attention residuals), without it the running sum.
    """

    def __init__(self, config: K3Config, kind: str, *, moe: bool, mixers: bool) -> None:
        super().__init__()
        self.kind = kind
        d, eps = config.hidden_size, config.rms_norm_eps
        self.self_attention_res = BlockAttnRes(d, eps) if mixers else None
        self.input_layernorm = RMSNorm(d, eps)
        self.self_attn: Any = kind_of(kind).build(config)  # has new_cache(batch), unlike nn.Module
        self.mlp_res = BlockAttnRes(d, eps) if mixers else None
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp: GLU | None = None
        self.block_sparse_moe: StableLatentMoE | None = None
        if moe:
            self.block_sparse_moe = build_moe(config)
        else:
            self.mlp = GLU(d, config.intermediate_size, **activation(config))

    def forward(
        self,
        stream: DepthStream,
        *,
        cache: Any = None,
        cu_seqlens: Sequence[int] | None = None,
        mask: Tensor | None = None,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        """Moves `stream` one layer up.  `mask: [B, T]`, True at tokens that count for the balancer; group: the ranks
        over which rows are cut."""
        self.attend(stream, cache=cache, cu_seqlens=cu_seqlens, group=group)
        self.feed(stream, mask=mask)

    def attend(
        self,
        stream: DepthStream,
        *,
        cache: Any = None,
        cu_seqlens: Sequence[int] | None = None,
        group: "dist.ProcessGroup | None" = None,
    ) -> None:
        """The first sublayer alone."""
        x = stream.read(self.self_attention_res, self.input_layernorm, dtype_for_products(stream.like))
        cut = {} if group is None else {"group": group}  # not every attention can
        stream.add(self.self_attn(x, cache=cache, cu_seqlens=cu_seqlens, **cut))

    def feed(self, stream: DepthStream, *, mask: Tensor | None = None) -> None:
        """The second."""
        x = stream.read(self.mlp_res, self.post_attention_layernorm, dtype_for_products(stream.like))
        if self.block_sparse_moe is not None:
            stream.add(self.block_sparse_moe(x, mask))
        else:
            assert self.mlp is not None
            stream.add(self.mlp(x))


class MTPLayer(nn.Module):
    """Predicts one token further than the stack below it (DeepSeek-V3's form; trained with K3, not released).

        h' = Layer( W [ RMSNorm(h_t) ; RMSNorm(emb(x_{t+1})) ] ),   logits for x_{t+2} = head( RMSNorm(h') )

    The layer inside is gated MLA with the model's feed-forward and a plain residual.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.hnorm = RMSNorm(d, eps)
        self.enorm = RMSNorm(d, eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        self.layer = DecoderLayer(config, "mla", moe=config.num_experts > 0, mixers=False)
        self.norm = RMSNorm(d, eps)

    def forward(
        self,
        h: Tensor,
        embedding: Tensor,
        cu_seqlens: Sequence[int] | None,
        mask: Tensor | None,
        group: "dist.ProcessGroup | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """`h`, `embedding` (of each next token): [B, T, D].  Returns h' and its norm, which goes to the head."""
        dtype = dtype_for_products(h)
        x = self.eh_proj(torch.cat([self.hnorm(h, dtype), self.enorm(embedding, dtype)], dim=-1))
        stream = DepthStream(x, period=None)
        self.layer(stream, cu_seqlens=cu_seqlens, mask=mask, group=group)
        return stream.live, self.norm(stream.live, dtype)

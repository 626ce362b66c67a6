"""Stable LatentMoE: many small routed experts at a latent width, shared experts at full width."""

from typing import Any

import torch
from torch import Tensor, nn

from perilune.core.errors import ConfigError
from perilune.nn.balancer import Balancer, QuantileBalancer
from perilune.nn.glu import GLU, Activation
from perilune.nn.norm import RMSNorm
from perilune.nn.project import project
from perilune.nn.recompute import recomputing
from perilune.nn.routing import route
from perilune.ops import grouped_experts, wide_linear
from perilune.ops.grouped_experts.expert_parallel import grouped_experts_parallel
from perilune.ops.quantile_bias import Groups


class Router(nn.Module):
    """The scores of all experts: s = sigmoid(W x), both operands raised to float32.  `[M, D]` to `[M, E]`."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(wide_linear(x, self.weight))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"


class Experts(nn.Module):
    """The weights of all experts, stacked: `w1` gate and `w3` up [E, F, L], `w2` down [E, L, F].

    As DTensors, cut along E over one dimension of a mesh, they are spread over its ranks, and tokens travel to them
    (`grouped_experts_parallel`).
    """

    def __init__(self, num_experts: int, width: int, inner_size: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, inner_size, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, inner_size))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner_size, width))
        self.balanced = False
        """Whether ranks over which they are spread copy crowded ones, so that each computes equally much."""
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        for w in (self.w1, self.w2, self.w3):
            nn.init.normal_(w, std=std)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, **activation: Any) -> Tensor:
        """See `grouped_experts`."""
        own: list[Any] = [self.w1, self.w3, self.w2]
        if not hasattr(own[0], "device_mesh"):  # no DTensor, asked without importing those
            return grouped_experts(x, own[0], own[1], own[2], ids, weights, **activation)
        group = own[0].device_mesh.get_group()
        own = [w.to_local() for w in own]
        return grouped_experts_parallel(
            x, own[0], own[1], own[2], ids, weights, group=group, balanced=self.balanced, **activation
        )

    def extra_repr(self) -> str:
        E, F, L = self.w1.shape
        return f"{E} experts, {L} -> {F} -> {L}"


class StableLatentMoE(nn.Module):
    """A mixture-of-experts feed-forward block (K3 report, section 2.3).

        s = sigmoid(W_r x),  T = top_k(s + b),  p_j = scaling * s_j / sum_T s
        z = W_down x,  u = sum_T p_j E_j(z),  y = W_up RMSNorm(u) + Shared(x)

    With `latent_size=None` experts work at full width, without W_down, W_up and the norm (Kimi Linear).  `x: [..., D]`
    gives `[..., D]`; `mask: [...]`, True at real tokens, keeps padding out of the balancer's statistics.

    The selection bias b lives in `balancer`, which moves it once a step: call `balancer.update()` after the optimizer.
    `auxiliary_loss` holds the balancer's loss of the last training forward, or None where it has none.

    >>> moe = StableLatentMoE(64, num_experts=16, top_k=4, expert_size=32, latent_size=32, shared_size=64)
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        expert_size: int,
        latent_size: int | None = None,
        latent_norm: bool = True,
        shared_size: int = 0,
        activation: Activation = "situ",
        beta_gate: float = 4.0,
        beta_up: float = 25.0,
        balancer: Balancer | None = None,
        renormalize: bool = True,
        scaling: float = 1.0,
        num_groups: int = 1,
        topk_group: int = 1,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(
                f"top_k: expected from 1 to num_experts ({num_experts}), got {top_k}; choose one in range"
            )
        self.top_k = top_k
        self.activation = activation
        self.beta_gate, self.beta_up = beta_gate, beta_up
        self.routing: dict[str, Any] = {
            "renormalize": renormalize,
            "scaling": scaling,
            "num_groups": num_groups,
            "topk_group": topk_group,
        }
        width = hidden_size if latent_size is None else latent_size
        self.gate = Router(hidden_size, num_experts)
        if balancer is None:
            balancer = QuantileBalancer(num_experts, top_k, groups=Groups(num_groups, topk_group))
        self.balancer = balancer
        self.experts = Experts(num_experts, width, expert_size)
        if latent_size is None:
            self.routed_expert_down_proj = self.routed_expert_up_proj = self.routed_expert_norm = None
        else:
            self.routed_expert_down_proj = nn.Linear(hidden_size, width, bias=False)
            self.routed_expert_up_proj = nn.Linear(width, hidden_size, bias=False)
            self.routed_expert_norm = RMSNorm(width, norm_eps) if latent_norm else None
        self.shared_experts = (
            GLU(hidden_size, shared_size, activation=activation, beta_gate=beta_gate, beta_up=beta_up)
            if shared_size
            else None
        )
        self.auxiliary_loss: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # [M, D]
        scores = self.gate(tokens)  # [M, E]
        ids, weights = route(scores, self.balancer.bias, self.top_k, **self.routing)
        loss = self.balancer.observe(scores, ids, None if mask is None else mask.reshape(-1))
        if not recomputing():
            self.auxiliary_loss = loss
        routed = self._routed(tokens, ids, weights)
        if self.shared_experts is not None:
            routed = routed + self.shared_experts(tokens)
        return routed.view(x.shape)

    def _routed(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        down = self.routed_expert_down_proj
        z = tokens if down is None else project(tokens, down)[0]
        u = self.experts(
            z,
            ids,
            weights,
            activation="swiglu" if self.activation == "silu" else self.activation,
            beta_gate=self.beta_gate,
            beta_up=self.beta_up,
        )
        if self.routed_expert_norm is not None:
            u = self.routed_expert_norm(u)
        return u if self.routed_expert_up_proj is None else project(u, self.routed_expert_up_proj)[0]

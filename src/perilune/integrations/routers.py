"""Routers of `transformers`, taught to choose by score + bias: which are served, and what each calls score and weight.

A router is asked for its logits and keeps its parameters, name and place; only its class becomes a subclass of itself.
Routers of one kind differ by the model that they were copied into, so they are known by name.
"""

import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from perilune.core.errors import ConfigError
from perilune.integrations.padding import real_tokens
from perilune.nn.balancer import AuxLossBalancer, Balancer
from perilune.nn.precision import Float32Parameters, at_least_float32
from perilune.nn.routing import route
from perilune.ops.quantile_bias import Groups

BIAS = "e_score_correction_bias"
"""What the bias is called in every router, as in released checkpoints."""

LOG_RANGE = 20.0
"""Probabilities from e^-20 to 1 are told apart; log p / 20 + 1 is in [0, 1]."""

# Softmax over all experts, then the top k.  Whether the chosen weights are divided by their sum: always, never, or as
# the router's `norm_topk_prob` says (None).  A softmax over the chosen logits alone is the same as always.
SOFTMAX: dict[str, bool | None] = {
    "MixtralTopKRouter": True,
    "MiniMaxTopKRouter": True,
    "Qwen2MoeTopKRouter": None,
    "Qwen3MoeTopKRouter": None,
    "Qwen3NextTopKRouter": None,
    "Qwen3OmniMoeThinkerTextTopKRouter": None,
    "Qwen3VLMoeTextTopKRouter": True,
    "Qwen3_5MoeTopKRouter": True,
    "OlmoeTopKRouter": None,
    "FlexOlmoTopKRouter": None,
    "GraniteMoeTopKRouter": True,
    "GraniteMoeSharedTopKRouter": True,
    "GraniteMoeHybridTopKRouter": True,
    "GptOssTopKRouter": True,
    "DeepseekV2TopkRouter": False,
}

# Sigmoid scores and a bias of their own, with groups of experts: DeepSeek-V3's router, in other models word for word.
BIASED_SIGMOID = (
    "DeepseekV3TopkRouter",
    "DeepseekV32TopkRouter",
    "KimiLinearTopkRouter",
    "Glm4MoeTopkRouter",
    "Glm4MoeLiteTopkRouter",
    "Glm4vMoeTextTopkRouter",
    "GlmMoeDsaTopkRouter",
    "Dots1TopkRouter",
    "ExaoneMoeTopkRouter",
    "NemotronHTopkRouter",
    "SolarOpenTopkRouter",
    "MiMoV2FlashTopkRouter",
)


def total(losses: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of scalars that may lie on different devices; None of none."""
    some = [loss for loss in losses if loss is not None]
    return torch.stack([loss.to(some[0].device) for loss in some]).sum() if some else None


class Watch:
    """What a decoder's forward pass tells its routers: whether to count, and which tokens are padding.

    Hooks at both ends of the decoder open and close it.  Recomputation for gradient checkpointing happens in the
    backward pass, outside, and finds it closed.
    """

    def __init__(self) -> None:
        self.open = False
        self.counting = False
        self.mask: Any = None
        self.pending: list[tuple[Balancer, Tensor, Tensor]] = []
        """What losses are to be made of: they are made outside the layers, which may be run again."""
        self.loss: Tensor | None = None
        """The balancers' losses of the last forward pass, summed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()  # a copy watches another model; what the last pass left has a graph, and cannot be copied

    def begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook.  Passes without gradients, such as generation while training, are not counted."""
        self.open, self.counting = True, torch.is_grad_enabled()
        self.mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self.loss = None
        self.pending.clear()

    def end(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook, called after a failure too, then without an output."""
        pending = [] if output is None else list(self.pending)
        try:
            losses = [balancer.observe(scores, ids, self.real(scores)) for balancer, scores, ids in pending]
            self.loss = total(losses)
        finally:
            self.open, self.mask = False, None
            self.pending.clear()
        if self.loss is not None and self.counting and not self.loss.requires_grad:
            raise ConfigError(
                "gradient_checkpointing: expected use_reentrant=False with an auxiliary loss, got layers that run "
                "without gradients; pass gradient_checkpointing_kwargs={'use_reentrant': False}"
            )

    def counts(self) -> bool:
        """Whether a router that runs now is to be observed."""
        return self.counting if self.open else torch.is_grad_enabled()

    def real(self, scores: Tensor) -> Tensor | None:
        """Which rows of scores [M, E] belong to text: [M] bool, or None for all."""
        mask = real_tokens(self.mask, len(scores)) if self.open else None
        return None if mask is None else mask.to(scores.device)


class BalancedRouter(Float32Parameters):
    """A router with a balancer; mixed in before the router's own class, whose `forward` it calls.

    e_score_correction_bias: `[E]` buffer, the only copy of the bias: the balancer works on the same tensor.  Float32
    whatever the model is cast to.
    """

    float32 = (BIAS,)

    balancer: Balancer
    watch: Watch
    e_score_correction_bias: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, type(self).__bases__, self.__dict__

    def tied(self) -> Balancer:
        """The balancer, its bias the router's buffer: moving or loading a model can replace the buffer."""
        if self.balancer.bias is not self.e_score_correction_bias:
            # Past nn.Module's own assignment, which would have it saved a second time.
            self.balancer._buffers["bias"] = self.e_score_correction_bias
        return self.balancer

    def observe(self, scores: Tensor, ids: Tensor) -> None:
        """scores: [M, E] by which the choice was made.  ids: [M, top_k]."""
        if not (self.training and self.watch.counts()):
            return
        if getattr(self, "_is_replica", False):
            raise ConfigError(
                "model: expected a process for each device, got a replica of nn.DataParallel, whose counts are lost; "
                "start with torchrun or accelerate, which use DistributedDataParallel"
            )
        if not isinstance(self.balancer, AuxLossBalancer):
            self.balancer.observe(scores.detach(), ids, self.watch.real(scores))
        elif self.watch.open and not self.balancer.frozen:
            self.watch.pending.append((self.balancer, scores, ids))


class BalancedSigmoidRouter(BalancedRouter):
    """DeepSeek-V3's router, which has a bias already: it chooses and weighs by itself, and is observed."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.tied()
        logits, weights, ids = super().forward(hidden_states)
        self.observe(logits.sigmoid(), ids)
        return logits, weights, ids


class BalancedSoftmaxRouter(BalancedRouter):
    """A softmax router whose choice is by log p + LOG_RANGE b, and whose weights are those of p.

    The choice is made by s + b with s = 1 + log(p) / LOG_RANGE: by p itself while b = 0.  Why not p + b is said at
    `balance`.
    """

    renormalize: bool
    groups: Groups | None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        balancer = self.tied()
        logits, own_weights, own_ids = super().forward(hidden_states)
        p = at_least_float32(logits).softmax(-1)  # [M, E]
        scores = 1 + p.detach().log().div(LOG_RANGE).clamp(min=-1)
        k = own_ids.shape[-1]
        number, kept, best = self.groups or Groups(1, 1)
        ids, _ = route(
            scores, balancer.bias, k, renormalize=False, num_groups=number, topk_group=kept, best_of_group=best
        )
        weights = p.gather(-1, ids)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = (weights * getattr(self, "routed_scaling_factor", 1.0)).to(own_weights.dtype)
        moved = self.e_score_correction_bias.any()  # a bias of zero is no bias: the model's own choice among equals too
        ids, weights = torch.where(moved, ids, own_ids), torch.where(moved, weights, own_weights)
        self.observe(p if isinstance(balancer, AuxLossBalancer) else scores, ids)
        return logits, weights, ids


def family(module: nn.Module) -> str | None:
    """The name under which a router is served, or None.  Subclasses are served as what they come from."""
    names = (cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("transformers."))
    return next((name for name in names if name in SOFTMAX or name in BIASED_SIGMOID), None)


def attach(router: nn.Module, balancer: Balancer, watch: Watch) -> BalancedRouter:
    """Makes `router`, of a served family, choose by the balancer's bias; returns the same object."""
    name = family(router)
    assert name is not None, type(router)
    plain: Any = type(router)
    groups = groups_of(router)
    router.__class__ = _with_balancer(BalancedSoftmaxRouter if name in SOFTMAX else BalancedSigmoidRouter, plain)
    balanced = cast(BalancedRouter, router)
    if isinstance(balanced, BalancedSoftmaxRouter):
        normal = SOFTMAX[name]
        balanced.renormalize = bool(balanced.norm_topk_prob) if normal is None else normal
        balanced.groups = groups
        balanced.register_buffer(BIAS, balancer.bias)
    # A model that was cast before has its own bias in 16 bits, which would swallow what a step adds.
    balanced.e_score_correction_bias = at_least_float32(balanced.e_score_correction_bias)
    balanced.watch = watch
    balanced.balancer = balancer
    balancer._non_persistent_buffers_set.add("bias")  # saved as the router's
    balanced.tied()
    return balanced


def groups_of(router: nn.Module) -> Groups | None:
    """The groups of experts to which a router limits a token, or None."""
    if family(router) in BIASED_SIGMOID:
        groups = Groups(int(router.num_group), int(router.topk_group), best=2)  # type: ignore[arg-type]
    elif getattr(router, "topk_method", None) == "group_limited_greedy":
        groups = Groups(int(router.num_group), int(router.topk_group), best=1)  # type: ignore[arg-type]
    else:
        return None
    return groups if groups.kept < groups.number else None


def _blank(mixin: Any, cls: Any) -> Any:
    """A balanced router without contents, for copies and pickles: they cannot find its class by name."""
    balanced = _with_balancer(mixin, cls)
    return balanced.__new__(balanced)


@functools.cache
def _with_balancer(mixin: Any, cls: Any) -> Any:
    return type(f"Balanced{cls.__name__}", (mixin, cls), {"__module__": __name__})

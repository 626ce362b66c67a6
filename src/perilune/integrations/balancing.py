"""Quantile balancing, or another rule of ours, in the routers of a `transformers` model."""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, TrainerCallback

from perilune.core.errors import CheckpointError, ConfigError
from perilune.integrations.retyping import check_forward
from perilune.integrations.routers import (
    BIAS,
    BIASED_SIGMOID,
    SOFTMAX,
    BalancedRouter,
    Watch,
    attach,
    family,
    groups_of,
    total,
)
from perilune.nn.balancer import Balancer, balancer, update_balancers
from perilune.nn.load import LayerLoad, LoadWindow, bias_drift, layer_load, sampling_floor, worst
from perilune.nn.pooling import StatisticsPool

log = logging.getLogger("perilune.balance")

REMEMBERED = 64
"""Steps whose loads are kept for `health`."""


def balance(model: nn.Module, kind: str = "quantile", **options: Any) -> "Balancers":
    """Gives every router of `model` a balancer, in place of the model's auxiliary loss; returns the handle.

        balancers = balance(model)          # before the optimizer is made, before DDP or FSDP wraps the model
        ...
        optimizer.step()
        balancers.update()                  # once a step, however many micro-batches it had

    Experts are chosen by score + bias and weighed by the raw score, as the model weighs them otherwise.  While the
    bias is zero the model computes what it did before.  Two kinds of router:

    - sigmoid with a bias of its own (DeepSeek-V3, Kimi Linear, GLM-4 MoE): the balancer moves that bias,
      `e_score_correction_bias`, so that a saved model loads and runs anywhere.
    - softmax p over all experts (Mixtral, Qwen-MoE, OLMoE, GPT-OSS, DeepSeek-V2): the choice is by log p + 20 b, with b
      a buffer of the same name that the router gets.  On the probabilities themselves, p + b, two things go wrong.
      They have no scale of their own, near 1/E where the router is unsure and near 1 where it is sure: one bias decides
      everything for the first and nothing for the second.  And what a bias must overcome crowds near 0, inside a few of
      the histogram's bins.  A bias on the logits is a shift for all tokens alike, and each token's normaliser drops out
      of its margins: log p and the logits choose the same.  The scale 1/20 puts s = 1 + log(p) / 20 in [0, 1], where
      balancers' defaults hold.

    Args:
        model: a model of `transformers`, or a module around one.
        kind, options: as for `perilune.nn.balancer.balancer`: "quantile" (bins, decay, ema), "sign" (step), "band",
            "aux" (coefficient; our auxiliary loss, added to the model's), or "none", which only counts and leaves the
            model's own auxiliary loss alone.  Quantile's `decay` is None here, the report's plain rule: it follows a
            router that moves; 0.85 pools steps where one has few tokens for each expert and the router moves little.

    Not counted: padding (as `attention_mask` says), evaluation mode, passes without gradients, recomputation.

    Raises ConfigError for a model without a router that is served, one that has balancers already, one on the meta
    device, or one whose routers `accelerate` has hooks in.
    """
    found = {name: module for name, module in model.named_modules() if family(module)}
    _check_routers(model, found)
    watches: dict[str | None, Watch] = {}
    routers: dict[str, BalancedRouter] = {}
    for name, router in found.items():
        weight = router.weight
        assert isinstance(weight, Tensor)
        defaults = {"groups": groups_of(router)} | ({"decay": None} if kind == "quantile" else {})
        own = balancer(kind, len(weight), int(router.top_k), **(defaults | options))
        decoder = _decoder_of(model, name)
        if decoder not in watches:
            watches[decoder] = watch = Watch()
            if decoder is not None:
                model.get_submodule(decoder).register_forward_pre_hook(watch.begin, with_kwargs=True)
                model.get_submodule(decoder).register_forward_hook(watch.end, always_call=True)
        routers[name] = attach(router, own.to(weight.device).train(router.training), watches[decoder])
    _keep_from_ddp(model, routers)
    names = sorted({name for router in found.values() if (name := family(router))})
    replaced = "the model's auxiliary loss stays" if kind == "none" else _without_auxiliary_loss(model)
    log.info("balance: %s in %d layers (%s); %s", kind, len(routers), ", ".join(names), replaced)
    handle = Balancers(routers, list(watches.values()))
    if kind == "aux":
        model.register_forward_hook(handle.add_loss, with_kwargs=True)
    return handle


@dataclass(frozen=True)
class Health:
    """How evenly experts were loaded over some steps, layer by layer; `print` shows a table.

    Layers that counted nothing, such as those in evaluation mode, are left out.
    """

    layers: dict[str, LayerLoad]
    """Gini, MaxVio and the share of experts without a token, by the name of the layer's router."""
    drifts: dict[str, float]
    """How far the last update moved a layer's bias (`perilune.nn.load.bias_drift`)."""
    steps: int
    """How many steps' loads were added up."""
    chance: float
    """The Gini that an ideal router would show by chance, with as many tokens."""

    @property
    def worst_layer(self) -> str | None:
        """The layer of the highest Gini; a mean over layers would hide one that collapsed.  None of no layers."""
        return worst(self.layers)[0]

    @property
    def worst(self) -> LayerLoad:
        """Of each figure the highest of any layer."""
        return worst(self.layers)[1]

    @property
    def bias_drift(self) -> float:
        """The highest of any layer."""
        return max(self.drifts.values(), default=0.0)

    def __str__(self) -> str:
        if not self.layers:
            return "no step was counted"
        width = max(map(len, self.layers))
        lines = [f"{'layer':{width}}   Gini  MaxVio   dead   drift"]
        lines += [
            f"{name:{width}}  {x.gini:5.3f}  {x.max_violation:6.2f}  {x.dead:4.0%}  {self.drifts[name]:.4f}"
            for name, x in self.layers.items()
        ]
        over = f"over {self.steps} step{'s' * (self.steps != 1)}; {self.chance:.3f} would be chance"
        return "\n".join([*lines, f"worst: {self.worst_layer}, Gini {self.worst.gini:.3f} {over}"])


class Balancers:
    """The balancers of all layers of a model, by the names of their routers."""

    def __init__(self, routers: dict[str, BalancedRouter], watches: list[Watch]) -> None:
        self._routers = routers
        self._watches = watches
        self._pool: StatisticsPool | None = None
        self._loads = {name: LoadWindow(REMEMBERED) for name in routers}
        self._moves: dict[str, tuple[Tensor, Tensor]] = {}
        """Each layer's bias before and after the last update."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._routers)

    def __len__(self) -> int:
        return len(self._routers)

    def __getitem__(self, name: str) -> Balancer:
        return self._routers[name].tied()

    @property
    def loss(self) -> Tensor | None:
        """The balancers' losses of the last forward pass, summed ("aux" alone has one); already in `output.loss`."""
        return total(watch.loss for watch in self._watches)

    def pool_over(self, ranks: DeviceMesh | dist.ProcessGroup, over: Sequence[str] | None = None) -> None:
        """Says over which ranks `update` sums; those that hold different tokens, see `StatisticsPool`.  Collective.

        Needed where some ranks hold the same tokens, as in tensor parallelism: else all ranks are summed over.
        """
        self._pool = StatisticsPool([self[name] for name in self], ranks, over)

    @torch.no_grad()
    def update(self) -> None:
        """Ends a step: moves every layer's bias, for the next step to use.  Nothing waits for the device.

        With several processes, counts are summed over them first, in one all-reduce: every rank must call.
        """
        if self._pool is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            assert dist.group.WORLD is not None
            self.pool_over(dist.group.WORLD)
        if self._pool is not None:
            self._pool.sum_()
        before = {name: self[name].bias.clone() for name in self}
        for name in self:
            if not self[name].frozen:
                self._loads[name].add(self[name].counts)
        update_balancers(self[name] for name in self)
        self._moves.update({name: (before[name], self[name].bias.clone()) for name in self})

    def discard(self) -> None:
        """Forgets what was counted since the last update; for a step whose gradients were not finite."""
        for name in self:
            self[name].discard()

    def freeze(self) -> None:
        """Holds all biases as they are and stops counting."""
        for name in self:
            self[name].freeze()

    def unfreeze(self) -> None:
        """Goes on balancing."""
        for name in self:
            self[name].unfreeze()

    def health(self, steps: int = 8) -> Health:
        """Loads added up over the last `steps` steps that had tokens, of at most 64; waits for the device."""
        if steps < 1:
            raise ConfigError(f"steps: expected 1 or more, got {steps}; 8 is usual")
        layers, drifts, done, chance = {}, {}, 0, 0.0
        for name, window in self._loads.items():
            loads = window.stack().cpu() if len(window) else torch.zeros(0, 1)
            loads = loads[loads.any(-1)][-steps:]
            if len(loads):
                layers[name], drifts[name] = layer_load(loads.sum(0)), bias_drift(*self._moves[name])
                floor = sampling_floor(loads.sum(0).double().mean().item(), loads.shape[1])
                done, chance = max(done, len(loads)), max(chance, floor.gini)
        return Health(layers, drifts, done, chance)

    def training_state(self) -> dict[str, Tensor]:
        """What going on with training needs beside the biases, by layer and name; between steps, all of it."""
        return {f"{name}/{key}": value for name in self for key, value in self[name].training_state().items()}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Takes up what `training_state` gave.  Raises CheckpointError if it is another model's or rule's."""
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in self}
        for key, value in state.items():
            name, _, what = key.rpartition("/")
            if name not in parts:
                raise CheckpointError(f"training_state: expected layers {list(self)}, got {key!r}; use its own model")
            parts[name][what] = value
        for name, part in parts.items():
            self[name].load_training_state(part)

    def load(self, folder: str | Path) -> None:
        """Reads the biases that `save_pretrained(folder)` wrote.

        For softmax routers, whose bias `from_pretrained` does not know and reports as unexpected, and for a `Trainer`
        that goes on from a checkpoint, which finds no tensor whose name on disk is another.  On disk a router can
        have another name (Mixtral's is `block_sparse_moe.gate`); layers are told by their numbers.
        Raises CheckpointError if a layer's bias is missing or of another size.
        """
        found: dict[tuple[int, ...], Tensor] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= {_numbers(key): file.get_tensor(key) for key in file.keys() if key.endswith(BIAS)}  # noqa: SIM118
        for name, router in self._routers.items():
            bias = found.get(_numbers(name))
            if bias is None or bias.shape != router.e_score_correction_bias.shape:
                wanted = f"{name}.{BIAS} {list(router.e_score_correction_bias.shape)}"
                got = "none" if bias is None else f"{list(bias.shape)}"
                raise CheckpointError(
                    f"folder: expected {wanted} in {folder}, got {got}; save the balanced model there"
                )
        with torch.no_grad():
            for name, router in self._routers.items():
                router.e_score_correction_bias.copy_(found[_numbers(name)])

    def callback(self) -> "BalanceCallback":
        """For `Trainer(..., callbacks=[balancers.callback()])`: updates once a step, adds health to the logs."""
        return BalanceCallback(self)

    def add_loss(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """A forward hook of the model: the balancers' losses join its own, if it was given labels."""
        if self.loss is None:
            return output
        if isinstance(output, tuple):
            return output if kwargs.get("labels") is None else (output[0] + self.loss.to(output[0].device), *output[1:])
        if getattr(output, "loss", None) is not None:
            output["loss"] = output.loss + self.loss.to(output.loss.device)
        return output


class BalanceCallback(TrainerCallback):
    """Keeps a `Trainer`'s experts balanced: one update for each of its steps, whatever the gradient accumulation."""

    def __init__(self, balancers: Balancers) -> None:
        self.balancers = balancers

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if getattr(optimizer, "step_was_skipped", False):  # gradients of float16 overflowed
            self.balancers.discard()
        else:
            self.balancers.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs and (health := self.balancers.health()).layers:
            figures = {**health.worst._asdict(), "bias_drift": health.bias_drift}
            logs |= {f"expert_{name}": round(value, 4) for name, value in figures.items()}


def _check_routers(model: nn.Module, found: dict[str, nn.Module]) -> None:
    balanced = [name for name, router in found.items() if isinstance(router, BalancedRouter)]
    if balanced:
        raise ConfigError(
            f"model: expected routers without balancers, got one in {balanced[0]}; "
            "balance a model once, and keep the handle"
        )
    if any(parameter.is_meta for router in found.values() for parameter in router.parameters()):
        raise ConfigError("model: expected weights, got a model on the meta device; balance it once it has them")
    others = sorted({type(m).__name__ for m in model.modules() if _looks_like_router(m) and not family(m)})
    if not found:
        raise ConfigError(
            f"model: expected a router of {', '.join([*SOFTMAX, *BIASED_SIGMOID])}, got {type(model).__name__} with "
            f"{' and '.join(others) or 'no router'}; put a QuantileBalancer into its router by hand as "
            "docs/quantile-balancing-in-your-model.md shows"
        )
    check_forward(found.values(), "balancers")
    if others:
        log.warning("balance: left alone are routers of %s, which are not served", ", ".join(others))


def _looks_like_router(module: nn.Module) -> bool:
    return re.search(r"Router$|TopKGate$|MoEGate$|MoEV\d+Gate$", type(module).__name__) is not None


def _decoder_of(model: nn.Module, router: str) -> str | None:
    """The innermost `PreTrainedModel` around a router: it is what gets the attention mask."""
    path = router.split(".")
    prefixes = (".".join(path[:n]) for n in range(len(path), -1, -1))
    return next((name for name in prefixes if isinstance(model.get_submodule(name), PreTrainedModel)), None)


def _keep_from_ddp(model: nn.Module, routers: dict[str, BalancedRouter]) -> None:
    """DDP copies rank 0's buffers to all ranks before every forward pass: over what the others have counted."""
    ours = [f"{name}.balancer.{key}" for name, router in routers.items() for key, _ in router.balancer.named_buffers()]
    ours = [name.lstrip(".") for name in ours]
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", None) or [])
    model._ddp_params_and_buffers_to_ignore = [*ignored, *ours]  # type: ignore[assignment]


def _without_auxiliary_loss(model: nn.Module) -> str:
    """Turns the model's own auxiliary loss off, and says what that was."""
    changes: dict[str, None] = {}
    for module in model.modules():
        holders = [
            module,
            getattr(module, "config", None),
            getattr(getattr(module, "config", None), "text_config", None),
        ]
        for holder in holders:
            for name, off in (("router_aux_loss_coef", 0.0), ("output_router_logits", False)):
                was = None if holder is None else getattr(holder, name, None)
                if was:
                    setattr(holder, name, off)
                    changes[f"{name} {was} -> {off}"] = None
    return f"auxiliary loss off: {', '.join(changes)}" if changes else "the model had no auxiliary loss"


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", name))

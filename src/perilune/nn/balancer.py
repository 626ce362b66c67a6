"""Keeping experts equally loaded: one interface, several rules.

In a step every forward calls `observe`; after the optimizer's step `update` moves the bias once, from all that was
observed (`update_balancers` those of many layers); a step that is thrown away calls `discard`.  With several ranks a
`StatisticsPool` sums what they observed, just before `update`: all are integers, so every rank then computes the same
bias.

None of it reads a tensor back and no shape depends on a value, so that on a GPU the host never waits: masked tokens are
counted with weight 0, and what a step without tokens must leave alone is chosen by `torch.where`.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError, ShapeError, nearest
from perilune.nn.precision import Float32Parameters
from perilune.nn.recompute import recomputing
from perilune.ops.quantile_bias import Groups, bias_from_histogram, limiting, quantile_bias, rebin, score_histogram

NUMBERS = 2**22
"""Of the largest buffer of all layers that are moved together: some ten tensors of so many numbers are held."""


class Balancer(Float32Parameters):
    """Owns the selection bias and counts loads; on its own it never moves the bias.  Subclasses say how.

    Works inside anybody's mixture of experts:

        self.balancer = QuantileBalancer(num_experts=64, top_k=4)
        ...
        scores = torch.sigmoid(self.router(x.float()))              # [M, E]
        ids, weights = route(scores, self.balancer.bias, top_k=4)
        self.balancer.observe(scores, ids, mask=real_tokens)
        ...
        optimizer.step()
        self.balancer.update()                                      # once a step

    bias: `[E]` buffer, saved with the model; not a parameter, so no optimizer, decay or clipping sees it.  It stays
    float32 (or float64) under `.to(bfloat16)`, `.half()` and loading, so that biases which differ go on to differ.
    loads: `[E]` int64, tokens for each expert in the last finished step.

    `observe` does nothing in eval mode, while frozen, or when activation checkpointing runs a forward again.
    """

    float32: ClassVar[tuple[str, ...]] = ("bias",)
    state_names: ClassVar[tuple[str, ...]] = ()
    counts_first: ClassVar[bool] = False
    """Whether the loss of a part of a step depends on the loads of the whole step; see `begin_parts`."""

    bias: Tensor
    loads: Tensor
    counts: Tensor

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(f"top_k: expected 1 to {num_experts} experts, got {top_k}; choose fewer")
        self.num_experts, self.top_k = num_experts, top_k
        self.frozen = False
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("loads", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        """Zero bias and nothing observed, as at the start; what a balancer built on the meta device needs."""
        with torch.no_grad():
            self.bias.zero_()
            self.loads.zero_()
        self.discard()
        self.load_training_state({})

    def observe(self, scores: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Takes note of one forward; returns a scalar to add to the loss, or None where the rule has none.

        scores: `[..., E]` as given to `route`.  ids: `[..., top_k]` that it chose.  mask: `[...]` bool, True for real
        tokens: padding is never counted, whatever its scores are.  Raises ShapeError.
        """
        if not self.training or self.frozen:
            return None
        scores, ids = scores.reshape(-1, self.num_experts), ids.reshape(-1, self.top_k)
        if mask is not None:
            mask = mask.reshape(-1)
            if mask.dtype != torch.bool or len(mask) != len(scores):
                raise ShapeError(
                    f"mask: expected bool [{len(scores)}], got {mask.dtype} {list(mask.shape)}; True marks real tokens"
                )
        if not recomputing():
            with torch.no_grad():
                self._tally(ids, mask, self.counts)
                self._collect(scores.detach(), mask)
        return self._loss(scores, ids, mask)

    @torch.no_grad()
    def update(self) -> None:
        """Ends the step: moves the bias by what was observed, for the next step to use.

        With many layers `update_balancers` does the same in fewer launches.
        """
        if not self.frozen:
            self._advance()
        self.discard()

    def begin_parts(self) -> None:
        """What was observed so far is a whole step, which is observed again from here on, part by part.

        The losses of the parts then add up to that of the whole step, whose loads they know.
        """
        self.discard()

    def discard(self) -> None:
        """Forgets what was observed since the last update; for a step whose gradients were not finite.

        With several ranks, all of them discard a step or none.
        """
        for statistic in self._buffers_to_sum():
            statistic.zero_()
        self._forget()

    def freeze(self) -> Self:
        """Holds the bias as it is and stops observing; short fine-tuning and sampling want this."""
        self.discard()
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Goes on balancing."""
        self.frozen = False
        return self

    def statistics(self) -> list[Tensor]:
        """The step's int64 tensors, to be summed over ranks in place; the same number and shapes on every rank."""
        return self._buffers_to_sum()

    def training_state(self) -> dict[str, Tensor]:
        """What resuming training needs beside the bias: between steps, all of it."""
        return {}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Takes up what `training_state` gave.  Raises CheckpointError if it is another rule's."""
        if unknown := state.keys() - set(self.state_names):
            raise CheckpointError(
                f"training_state: expected {list(self.state_names)} of {type(self).__name__}, got {sorted(unknown)}; "
                "load it into the kind of balancer that wrote it"
            )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._options().items())

    def _advance(self) -> None:
        """Bias, loads and the rule's own state after the step."""
        seen = self.counts.any(-1, keepdim=True)
        self.bias.copy_(torch.where(seen, self._next_bias(seen), self.bias))
        self.loads.copy_(torch.where(seen, self.counts, self.loads))

    # What a rule defines.

    def _collect(self, scores: Tensor, mask: Tensor | None) -> None:
        """Adds the scores `[M, E]` of a forward's real tokens, `mask: [M]`, to the step's statistics."""

    def _loss(self, scores: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """A scalar for the loss; computed on recomputation too, which must build the same graph."""
        return None

    def _next_bias(self, seen: Tensor) -> Tensor:
        """The bias after this step, from `bias`, `counts` and what was collected.

        seen: `[1]` bool, whether the step had a token on any rank; where not, what is returned does not matter, and the
        rule's own state must stay.

        Rules among `KINDS` have all of it with leading axes, too: then buffers are those of several layers.
        """
        return self.bias

    def _options(self) -> dict[str, Any]:
        """What was chosen; rules of one kind with the same options, and buffers of the same shapes, do the same."""
        return {"num_experts": self.num_experts, "top_k": self.top_k}

    def _forget(self) -> None:
        """Drops what was observed beside the statistics."""

    def _buffers_to_sum(self) -> list[Tensor]:
        return [self.counts]

    def _tally(self, ids: Tensor, mask: Tensor | None, counts: Tensor) -> Tensor:
        """Adds to counts `[E]` int64 how many real tokens chose each expert: of `[M, top_k]`."""
        weight = counts.new_ones(()) if mask is None else mask.unsqueeze(-1).to(torch.int64)
        return counts.index_add_(0, ids.flatten(), weight.expand_as(ids).reshape(-1))


class QuantileBalancer(Balancer):
    """Quantile Balancing (K3 report, 2.3.3): the bias under which what was observed would have been balanced.

    No step size: b is overwritten, not nudged (see `quantile_bias`).  `bins` sets the histogram; None keeps all scores
    of a step for the exact estimate, which no other rank can add to.

    A step of few tokens from few documents says little about the next.  Two remedies; None turns one off, and with both
    off this is the report's plain rule.

    decay: pools steps.  Histograms add up as h = t decay h + (this step's), and their quantile is the estimate b':
        about 1 / (1 - decay) steps speak, as one batch would.  The trust t = max(0, 1 - std(b' - b) / std(b')) forgets
        what was counted with a bias now given up, so that a collapsed router is mended at once.  Needs bins.
    ema: the report's option.  Smooths the estimates, b~ = ema b~ + (1 - ema) b'.  A mean of quantiles is not the
        quantile of the pool: where steps differ, it settles off balance.

    Gini of the loads on a synthetic drifting router, 2,048 tokens of 4 documents a step, E=256 top-8 (E=64 top-4):

        rule               one step        8 steps       50 steps
        plain              0.47 (0.38)   0.17 (0.09)   0.13 (0.05)
        ema=0.8            0.38 (0.31)   0.15 (0.10)   0.10 (0.05)
        decay=0.85         0.36 (0.31)   0.11 (0.08)   0.03 (0.02)
        SignBalancer 1e-2  0.37 (0.29)   0.13 (0.10)   0.06 (0.04)

    groups: if `route` limits a token to its best groups of experts.  Told of them, the estimate knows what keeps an
        expert out; untold, loads stay off balance by what the groups do.
    """

    float32 = ("bias", "smoothed", "pooled")
    state_names = ("smoothed", "pooled")

    histogram: Tensor | None
    smoothed: Tensor | None
    pooled: Tensor | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        bins: int | None = 1000,
        decay: float | None = 0.85,
        ema: float | None = None,
        groups: Groups | None = None,
    ) -> None:
        super().__init__(num_experts, top_k)
        if bins is not None and bins < 1:
            raise ConfigError(f"bins: expected 1 or more, or None, got {bins}; 1000 serves well")
        for name, value in (("decay", decay), ("ema", ema)):
            if value is not None and not 0 <= value < 1:
                raise ConfigError(
                    f"{name}: expected at least 0 and below 1, got {value}; 0.85 speaks for about seven steps"
                )
        self.bins, self.decay, self.ema = bins, decay, ema
        self.groups = limiting(groups, num_experts, top_k)
        empty = None if bins is None else torch.zeros(num_experts, bins, dtype=torch.int64)
        self.register_buffer("histogram", empty, persistent=False)
        self.register_buffer("smoothed", None, persistent=False)
        self.register_buffer("pooled", None, persistent=False)
        self._scores: list[tuple[Tensor, Tensor | None]] = []

    def statistics(self) -> list[Tensor]:
        if self.histogram is None:
            raise ConfigError("bins: expected a number to pool over ranks, got None (exact); use bins=1000")
        return super().statistics()

    def training_state(self) -> dict[str, Tensor]:
        state = {"smoothed": self.smoothed, "pooled": self.pooled}
        return {name: value.clone() for name, value in state.items() if value is not None}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        super().load_training_state(state)
        for name in self.state_names:
            value = state.get(name)
            setattr(self, name, None if value is None else value.to(self.bias.device, copy=True))

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "bins": self.bins, "decay": self.decay, "ema": self.ema}

    def _forget(self) -> None:
        self._scores.clear()

    def _collect(self, scores: Tensor, mask: Tensor | None) -> None:
        if self.top_k == self.num_experts:  # every token takes every expert
            return
        if self.histogram is None or self.bins is None:
            self._scores.append((scores, mask))
        else:
            score_histogram(scores, self.bias, self.top_k, self.bins, mask, groups=self.groups, out=self.histogram)

    def _next_bias(self, seen: Tensor) -> Tensor:
        if self.top_k == self.num_experts:
            return self.bias
        if self.histogram is None:
            return self._smoothed(self._exact(), seen)
        if not self.decay:
            return self._smoothed(bias_from_histogram(self.histogram, self.bias, self.top_k), seen)
        before = torch.zeros_like(self.histogram, dtype=self.bias.dtype) if self.pooled is None else self.pooled
        pooled = self.decay * before + self.histogram.to(self.bias.dtype)
        estimate = self._smoothed(bias_from_histogram(pooled, self.bias, self.top_k), seen)
        trust = (1 - _spread(estimate - self.bias) / _spread(estimate)).nan_to_num(0).clamp(min=0)
        pooled = rebin(pooled * trust.unsqueeze(-1), self.bias, estimate).to(self.bias.dtype)
        self.pooled = torch.where(seen.unsqueeze(-1), pooled, before)
        return estimate

    def _exact(self) -> Tensor:
        if not self._scores:
            return self.bias
        scores = torch.cat([scores for scores, _ in self._scores])
        masks = [mask for _, mask in self._scores]
        if all(mask is None for mask in masks):
            return quantile_bias(scores, self.bias, self.top_k, groups=self.groups)
        every = [scores.new_ones(len(scores), dtype=torch.bool) if m is None else m for (scores, m) in self._scores]
        return quantile_bias(scores, self.bias, self.top_k, mask=torch.cat(every), groups=self.groups)

    def _smoothed(self, estimate: Tensor, seen: Tensor) -> Tensor:
        """The mean of this step's estimate and those before, if `ema` asks for one."""
        if not self.ema:
            return estimate
        before = torch.full_like(estimate, torch.nan) if self.smoothed is None else self.smoothed  # NaN: none so far
        smoothed = torch.lerp(estimate, torch.where(before.isnan(), estimate, before), self.ema)
        self.smoothed = torch.where(seen, smoothed, before)
        return _centred(smoothed).to(self.bias.dtype)

    def _buffers_to_sum(self) -> list[Tensor]:
        return [self.counts] if self.histogram is None else [self.counts, self.histogram]


class SignBalancer(Balancer):
    """Auxiliary-loss-free balancing: b_j += step * sign(mean load - load_j), then b -= mean(b).

    From the paper "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" and DeepSeek-V3.
    """

    def __init__(self, num_experts: int, top_k: int, step: float = 1e-3) -> None:
        super().__init__(num_experts, top_k)
        if step <= 0:
            raise ConfigError(f"step: expected above 0, got {step}; 1e-3 is common, 1e-2 quick")
        self.step = step

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "step": self.step}

    def _next_bias(self, seen: Tensor) -> Tensor:
        # E load_j against the total: integers, so that an expert exactly at the mean is seen to be there.
        short = torch.sign(self.counts.sum(-1, keepdim=True) - self.num_experts * self.counts)
        return _centred(self.bias + self.step * short)


class BandBalancer(Balancer):
    """Pushes only the experts outside a band of recent loads; a popular account of K3's balancing, not the report's.

    Over the last `window` steps, x_j is expert j's mean load, hi and lo the `high` and `low` quantiles of all loads:

        b_j -= step if x_j > hi;   b_j += step if x_j < lo;   b -= mean(b)

    The band is relative, so with a fixed step the outer experts go on swinging by `step`.  `adaptive` scales the
    step by min(1, (hi - lo) / (2 mean load)), which settles.
    """

    state_names = ("window",)

    window: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        window: int = 4,
        step: float = 2e-2,
        low: float = 0.1,
        high: float = 0.9,
        adaptive: bool = True,
    ) -> None:
        super().__init__(num_experts, top_k)
        if window < 1:
            raise ConfigError(f"window: expected 1 step or more, got {window}; 4 serves well")
        if step <= 0:
            raise ConfigError(f"step: expected above 0, got {step}; 0.02 serves well")
        if not 0 <= low < high <= 1:
            raise ConfigError(f"low, high: expected 0 <= low < high <= 1, got {low}, {high}; 0.1 and 0.9 are usual")
        self.step, self.low, self.high, self.adaptive = step, low, high, adaptive
        empty = torch.full((window, num_experts), -1, dtype=torch.int64)  # [steps, E], newest last; -1: no step yet
        self.register_buffer("window", empty, persistent=False)

    def training_state(self) -> dict[str, Tensor]:
        loads = self.window[self.window[:, 0] >= 0]
        return {"window": loads} if len(loads) else {}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        super().load_training_state(state)
        self.window.fill_(-1)
        if "window" in state:
            loads = state["window"][-len(self.window) :]
            self.window[len(self.window) - len(loads) :] = loads.to(self.window)

    def _options(self) -> dict[str, Any]:
        own = {"step": self.step, "low": self.low, "high": self.high, "adaptive": self.adaptive}
        return {**super()._options(), **own}

    def _next_bias(self, seen: Tensor) -> Tensor:
        window = torch.cat([self.window[..., 1:, :], self.counts.unsqueeze(-2)], -2)
        self.window.copy_(torch.where(seen.unsqueeze(-1), window, self.window))
        there = (window[..., 0] >= 0).sum(-1, keepdim=True)  # steps
        loads = window.double().masked_fill(window < 0, torch.nan)
        total = window.clamp(min=0).sum(-2)  # [E]
        mean = total / there.double()
        low, high = _quantiles(loads.flatten(-2), there * self.num_experts, (self.low, self.high))
        typical = total.sum(-1, keepdim=True) / (there * self.num_experts).double()
        step = self.step * ((high - low) / (2 * typical)).clamp(max=1) if self.adaptive else self.step
        push = (mean < low).to(loads.dtype) - (mean > high).to(loads.dtype)
        return _centred(self.bias + step * push)


class AuxLossBalancer(Balancer):
    """The classic auxiliary loss: coefficient * E * sum_j f_j P_j; the bias stays 0.

    f_j is the fraction of routed slots that went to expert j, P_j the mean over tokens of its score divided by the
    token's sum of scores: coefficient at perfect balance, more otherwise, gradient through P only.  The loss is that of
    one forward's tokens, or the forward's share of a step's (`begin_parts`); add it where the language-model loss is
    made.
    """

    counts_first = True

    def __init__(self, num_experts: int, top_k: int, coefficient: float = 1e-3) -> None:
        super().__init__(num_experts, top_k)
        if coefficient < 0:
            raise ConfigError(f"coefficient: expected 0 or more, got {coefficient}; 1e-3 to 1e-2 is usual")
        self.coefficient = coefficient
        self._step: Tensor | None = None  # [E] int64, the loads of a step that is observed in parts

    def begin_parts(self) -> None:
        step = self.counts.clone()
        super().begin_parts()
        self._step = step

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "coefficient": self.coefficient}

    def _forget(self) -> None:
        self._step = None

    def _loss(self, scores: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        tokens: Tensor | int = max(len(scores), 1)  # so that the loss is 0, not NaN, when every token is padding
        if mask is not None:
            tokens = mask.sum().clamp(min=1)
            scores = scores.masked_fill(~mask.unsqueeze(-1), 0)
        counts = self._tally(ids, mask, torch.zeros_like(self.counts))
        if self._step is not None:
            counts, tokens = self._step, (self._step.sum() // self.top_k).clamp(min=1)
        fraction = counts.to(scores.dtype) / (tokens * self.top_k)
        share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return self.coefficient * self.num_experts * (fraction * (share.sum(0) / tokens)).sum()


KINDS: dict[str, Callable[..., Balancer]] = {
    "quantile": QuantileBalancer,
    "sign": SignBalancer,
    "band": BandBalancer,
    "aux": AuxLossBalancer,
    "none": Balancer,
}


def balancer(kind: str, num_experts: int, top_k: int, *, groups: Groups | None = None, **options: Any) -> Balancer:
    """The balancer called `kind` ("quantile", "sign", "band", "aux" or "none") with these options.

    groups: how routing is limited; for the rules that have to know.
    Raises ConfigError on an unknown kind or option, naming the nearest.
    """
    if kind not in KINDS:
        raise ConfigError(f"balancer: expected one of {', '.join(KINDS)}, got {kind!r}; {nearest(kind, KINDS)}")
    known = list(inspect.signature(KINDS[kind]).parameters)[2:]
    if "groups" in known:
        options["groups"] = groups
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{option}: expected an option of the {kind!r} balancer, got {option!r}; "
                + (nearest(option, known) if known else "it takes none")
            )
    return KINDS[kind](num_experts, top_k, **options)


@torch.no_grad()
def update_balancers(balancers: Iterable[Balancer]) -> None:
    """`update()` of every one, in as few launches for a hundred layers as for one.

    Those of one kind, with the same options, number of experts, dtype and device, are stacked, NUMBERS at a time; all
    others go one by one.  The results are the same, bit for bit on a CPU; on a GPU up to the order of sums.
    """
    alike: dict[Any, list[Balancer]] = {}
    for balancer in dict.fromkeys(balancers):
        if balancer.frozen:
            balancer.discard()
        elif type(balancer) not in KINDS.values() or getattr(balancer, "bins", 1) is None:  # unknown; keeps scores
            balancer.update()
        else:
            tensors = tuple((name, x.shape, x.dtype, x.device) for name, x in balancer.named_buffers())
            alike.setdefault((type(balancer), *balancer._options().items(), *tensors), []).append(balancer)
    for members in alike.values():
        size = max(1, NUMBERS // max(x.numel() for x in members[0].buffers()))
        for start in range(0, len(members), size):
            _update_stacked(members[start : start + size])


def _update_stacked(balancers: list[Balancer]) -> None:
    """Of one kind: by the first one's rule, on buffers [layers, ...]."""
    if len(balancers) == 1:
        return balancers[0].update()
    first = balancers[0]
    many = copy.copy(first)
    many._buffers = dict.fromkeys(first._buffers)
    for name, _ in first.named_buffers():
        many._buffers[name] = torch.stack([getattr(balancer, name) for balancer in balancers])
    many._advance()
    for name in ("bias", "loads", *first.state_names):
        after: Tensor | None = getattr(many, name)
        if after is None:
            continue
        if getattr(first, name) is None:  # there is such state from now on
            for balancer, own in zip(balancers, after.unbind()):
                setattr(balancer, name, own.clone())
        else:
            torch._foreach_copy_([getattr(balancer, name) for balancer in balancers], list(after.unbind()))
    torch._foreach_zero_([x for balancer in balancers for x in balancer._buffers_to_sum()])
    for balancer in balancers:
        balancer._forget()
    return None


def _spread(bias: Tensor) -> Tensor:
    """The standard deviation over experts, `[..., E]` to `[..., 1]`; in float64, where it is the same for one layer as
    for many."""
    return bias.double().std(-1, keepdim=True).to(bias.dtype)


def _centred(bias: Tensor) -> Tensor:
    wide = bias.double()
    return wide - wide.mean(-1, keepdim=True)


def _quantiles(values: Tensor, number: Tensor, shares: tuple[float, ...]) -> list[Tensor]:
    """As `torch.quantile` over the last axis, of the first `number: [..., 1]` of all values in rising order: those that
    are not NaN.

    `torch.quantile` looks at its shares, and its shapes would depend on the number.
    """
    rising = values.sort(-1).values  # NaN last
    found = []
    for share in shares:
        place = share * (number - 1).double()
        below, above = (rising.gather(-1, x.long()) for x in (place.floor(), place.ceil()))
        found.append(torch.lerp(below, above, place - place.floor()))
    return found

"""How evenly experts are loaded.  `loads: [E]` tokens for each expert; every function returns a Python number.

Report per layer and the worst layer, over a window whose mean load is some hundreds: a mean over layers hides one that
collapsed, and few tokens look uneven by chance alone (`sampling_floor`).
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


def gini(loads: Tensor) -> float:
    """Gini coefficient: G = 2 sum_i i x_i / (n sum_i x_i) - (n + 1) / n over loads in rising order, i from 1.

    Half the mean absolute difference of two experts over the mean load.  0 for equal loads (and for none at all),
    (n - 1) / n when one expert has everything.
    """
    x = loads.double().sort().values
    total, n = x.sum().item(), x.numel()
    if total == 0:
        return 0.0
    rank = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
    return 2 * (rank @ x).item() / (n * total) - (n + 1) / n


def max_violation(loads: Tensor) -> float:
    """MaxVio = max_j x_j / mean(x) - 1; 0 for equal loads (and for none at all)."""
    x = loads.double()
    mean = x.mean().item()
    return x.max().item() / mean - 1 if mean else 0.0


def dead_experts(loads: Tensor) -> int:
    """How many experts got no token."""
    return int((loads == 0).sum())


def entropy_ratio(loads: Tensor) -> float:
    """-sum_j p_j ln p_j / ln n with p = x / sum(x); 1 for equal loads.

    Forgiving: half of the experts dead still gives 1 - ln 2 / ln n (0.90 for 896).  Never report it alone.
    """
    p = loads.double() / max(loads.sum().item(), 1)
    n = p.numel()
    return -torch.special.xlogy(p, p).sum().item() / math.log(n) if n > 1 else 1.0


def bias_drift(before: Tensor, after: Tensor) -> float:
    """How far an update moved a selection bias `[E]`: sqrt(mean_j (b'_j - b_j)^2), in units of a score.

    Near 0 once a router is balanced; it stays up where loads follow the batch, or where the scores run away.
    """
    move = after.double() - before.double()
    return move.square().mean().sqrt().item()


class LayerLoad(NamedTuple):
    """A layer's figures; for all of them larger is worse."""

    gini: float
    max_violation: float
    dead: float
    """Share of its experts without a token."""


def layer_load(loads: Tensor) -> LayerLoad:
    """What to report of a layer, always together: evenness alone does not show a few that died, nor the other way."""
    return LayerLoad(gini(loads), max_violation(loads), dead_experts(loads) / max(loads.numel(), 1))


def worst(layers: Mapping[str, LayerLoad]) -> tuple[str | None, LayerLoad]:
    """The name of the layer with the highest Gini, the first of equals, and of each figure the highest of any layer."""
    if not layers:
        return None, LayerLoad(0.0, 0.0, 0.0)
    name = max(layers, key=lambda layer: layers[layer].gini)
    return name, LayerLoad(*map(max, zip(*layers.values())))


class SamplingFloor(NamedTuple):
    gini: float
    max_violation: float


def sampling_floor(mean_load: float, num_experts: int) -> SamplingFloor:
    """What an ideal router shows by chance: Gini 1 / sqrt(pi l), MaxVio sqrt(2 ln n / l) at a mean load of l tokens.

    From loads that are independent and Poisson of mean l; infinite for l = 0.
    """
    if mean_load <= 0:
        return SamplingFloor(math.inf, math.inf)
    return SamplingFloor(1 / math.sqrt(math.pi * mean_load), math.sqrt(2 * math.log(num_experts) / mean_load))


class LoadWindow:
    """The loads of the last `steps` steps.

    >>> window = LoadWindow(2)
    >>> for loads in ([4, 0], [2, 2], [0, 4]):
    ...     window.add(torch.tensor(loads))
    >>> window.total().tolist()
    [2, 6]
    """

    def __init__(self, steps: int) -> None:
        assert steps > 0, steps
        self._loads: deque[Tensor] = deque(maxlen=steps)

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, loads: Tensor) -> None:
        """Takes one step's loads `[E]`, and drops the oldest step's beyond the window."""
        self._loads.append(loads.detach().clone())

    def clear(self) -> None:
        """Forgets all steps."""
        self._loads.clear()

    def total(self) -> Tensor:
        """Loads summed over the window, `[E]`; at least one step must have been added."""
        return self.stack().sum(0)

    def stack(self) -> Tensor:
        """The steps' loads, oldest first: `[steps so far, E]`."""
        return torch.stack(list(self._loads))

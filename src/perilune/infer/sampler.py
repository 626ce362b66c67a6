"""From logits to the next token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """0 takes the likeliest."""
    top_k: int = 0
    """Only among the k likeliest; 0 is all."""
    top_p: float = 1.0
    """Only among the likeliest that together reach this probability; at least one remains."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # NaN neither
            raise ConfigError(f"temperature: expected at least 0, got {self.temperature}; 0 takes the likeliest token")
        if self.top_k < 0:
            raise ConfigError(f"top_k: expected at least 0, got {self.top_k}; 0 allows every token")
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"top_p: expected from 0 to 1, got {self.top_p}; 1 allows every token")


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One token for each row, drawn independently: `logits: [B, V]` to `[B]`."""
    logits = logits.double()  # a temperature of 1e-6 must not overflow
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    values, order = logits.sort(stable=True, dim=-1, descending=True)
    p = values.softmax(-1)
    allowed = (p.cumsum(-1) - p) < sampling.top_p  # what stands before a token has not reached top_p yet
    allowed[..., 0] = True
    if sampling.top_k:
        allowed[..., sampling.top_k :] = False
    choice = torch.multinomial(p * allowed, 1, generator=generator)
    return order.gather(-1, choice)[..., 0]

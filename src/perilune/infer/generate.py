"""Autoregressive generation: a prompt goes in once, then one token at a time on the cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.infer.sampler import Sampling, sample
from perilune.models.k3 import K3Model
from perilune.nn.cache import HybridCache


@torch.inference_mode()
def stream(
    model: K3Model,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Yields the next tokens `[B]` of the prompts `[B, T]`, one step after another.

    The model is left as it was after every step, so that streams may take turns.
    """
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ShapeError(
            f"prompt: expected [B, T] with at least one token, got {list(prompt.shape)}; start with <|endoftext|>"
        )
    generator = seeded(seed, prompt.device)
    cache = model.new_cache(prompt.shape[0])
    tokens = prompt
    for _ in range(max_new_tokens):
        following = step(model, tokens, cache, sampling, generator)
        yield following
        tokens = following[:, None]


@torch.inference_mode()
def step(
    model: K3Model,
    tokens: Tensor,
    cache: HybridCache,
    sampling: Sampling,
    generator: torch.Generator | None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Reads `tokens: [B, T]` on top of `cache`, moves that forward, and draws the next ones `[B]`.

    `allowed`: bool `[V]`, the ids that may be drawn, the last of the model's left out where it is shorter; else all.
    """
    with evaluating(model):
        logits = model(tokens, cache=cache).logits[:, -1]
    if allowed is not None:
        logits = logits[:, : len(allowed)].masked_fill(~allowed, -torch.inf)
    return sample(logits, sampling, generator)


def seeded(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A generator of its own for a seed; without one, None, which is the global generator."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)


@contextmanager
def evaluating(model: K3Model) -> Iterator[None]:
    """The model in eval mode, and back in training mode if that is where it was."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def generate(
    model: K3Model,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
) -> Tensor:
    """The new tokens alone, `[B, max_new_tokens]`."""
    steps = list(stream(model, prompt, max_new_tokens, sampling=sampling, seed=seed))
    return torch.stack(steps, 1) if steps else prompt[:, :0]

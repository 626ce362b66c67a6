"""Autoregressive generation: a prompt goes in once, then one token at a time on the cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from perilune.core.errors import ShapeError
from perilune.infer.sampler import Sampling, sample
from perilune.models.k3 import K3Model


@torch.inference_mode()
def stream(
    model: K3Model,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
    vocab_size: int | None = None,
    first: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yields the next tokens `[B]` of the prompts `[B, T]`, one step after another.

    Only ids below `vocab_size` are drawn: a model may have more rows than its tokenizer has tokens.  `first`, bool over
    the vocabulary, is what the first step may take.  The model is left as it was after every step, so that streams may
    take turns.
    """
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ShapeError(
            f"prompt: expected [B, T] with at least one token, got {list(prompt.shape)}; start with <|endoftext|>"
        )
    generator = None if seed is None else torch.Generator(prompt.device).manual_seed(seed)
    cache = model.new_cache(prompt.shape[0])
    tokens = prompt
    for _ in range(max_new_tokens):
        with evaluating(model):
            logits = model(tokens, cache=cache).logits[:, -1, :vocab_size]
        if first is not None:
            logits, first = logits.masked_fill(~first, -torch.inf), None
        following = sample(logits, sampling, generator)
        yield following
        tokens = following[:, None]


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

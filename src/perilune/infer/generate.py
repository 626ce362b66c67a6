"""Autoregressive generation: a prompt goes in once, then one token at a time on the cache."""

from collections.abc import Iterator

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
) -> Iterator[Tensor]:
    """Yields the next tokens `[B]` of the prompts `[B, T]`, one step after another.  The model is left as it was."""
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ShapeError(
            f"prompt: expected [B, T] with at least one token, got {list(prompt.shape)}; start with <|endoftext|>"
        )
    generator = None if seed is None else torch.Generator(prompt.device).manual_seed(seed)
    training = model.training
    model.eval()
    try:
        cache = model.new_cache(prompt.shape[0])
        tokens = prompt
        for _ in range(max_new_tokens):
            logits = model(tokens, cache=cache).logits[:, -1]
            following = sample(logits, sampling, generator)
            yield following
            tokens = following[:, None]
    finally:
        model.train(training)


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

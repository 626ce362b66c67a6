"""Text in, text out, piece by piece, never half a character."""

import codecs
from collections.abc import Iterator

import torch

from perilune.data.tokenizer import ByteBPE
from perilune.infer.generate import stream
from perilune.infer.sampler import Sampling
from perilune.models.k3 import K3Model


def stream_text(
    model: K3Model,
    tokenizer: ByteBPE,
    prompt: str,
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
) -> Iterator[str]:
    """The continuation of `prompt` as it is made, up to the end of the document or `max_new_tokens`.

    A document begins after the end of another, so the prompt follows an end-of-text token.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([[tokenizer.eos_id, *tokenizer.encode(prompt)]], device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back bytes until a character is whole
    known = tokenizer.vocab_size
    for token in stream(model, ids, max_new_tokens, sampling=sampling, seed=seed, vocab_size=known):
        if int(token) == tokenizer.eos_id:
            break
        if piece := decoder.decode(tokenizer.decode_bytes([int(token)])):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest

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

    A document begins after the end of another, so the prompt follows an end-of-text token.  A word's token begins with
    the space before it, so a space that ends the prompt is left to the first new token, which then has to begin with
    it.
    """
    device = next(model.parameters()).device
    ids, known = tokenizer.encode(prompt), tokenizer.vocab_size
    owed = b" " if tokenizer.decode_bytes(ids[-1:]) == b" " else b""
    first = None
    if owed:
        first = torch.tensor([tokenizer.decode_bytes([i]).startswith(owed) for i in range(known)], device=device)
    start = torch.tensor([[tokenizer.eos_id, *(ids[:-1] if owed else ids)]], device=device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back bytes until a character is whole
    for token in stream(model, start, max_new_tokens, sampling=sampling, seed=seed, vocab_size=known, first=first):
        if int(token) == tokenizer.eos_id:
            break
        new, owed = tokenizer.decode_bytes([int(token)])[len(owed) :], b""
        if piece := decoder.decode(new):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest

"""Held-out bits per byte: comparable between tokenizers, and with a file compressor."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from perilune.core.errors import DataError
from perilune.data.packing import IGNORE, evaluation_batches
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """No gradients, the model in eval mode; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes:
            module.training = training


def bits_per_byte(
    model: K3Model, tokenizer: ByteBPE, texts: Sequence[str], *, context: int, tokens: int = 8192
) -> float:
    """Bits the model needs for each byte of `texts`, every token scored once.

    -log2 p of all tokens, each document's end included, over the length in UTF-8.  Documents longer than `context` are
    scored in pieces that each start afresh, so this is an upper bound on what one pass over whole documents would need.
    `tokens` is how many go through the model at once; the result does not depend on it.  Raises DataError without text.
    """
    size = sum(len(text.encode()) for text in texts)
    if not size:
        raise DataError("texts: expected at least one byte to score, got none; give some text")
    documents = tokenizer.encode_documents(texts)
    device = model.lm_head.weight.device
    nats = 0.0
    with judging(model):
        for batch in evaluation_batches(documents, context, max(tokens, context)):
            ids, targets = batch.input_ids.to(device), batch.labels.to(device)
            output = model(ids, cu_seqlens=batch.cu_seqlens, targets=targets)
            nats += float(output.losses["next_token"]) * int((batch.labels != IGNORE).sum())
    return nats / math.log(2) / size


def in_fixed_order(texts: Sequence[str]) -> list[str]:
    """By their hashes, which have nothing to do with names or lengths: any first few are fair, and always the same."""
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def sample_texts(texts: Sequence[str], limit_bytes: int) -> list[str]:
    """The first of `texts` in a fixed order, `limit_bytes` of UTF-8 in all, the last one cut to fit."""
    sample: list[str] = []
    for text in in_fixed_order(texts):
        if limit_bytes <= 0:
            break
        data = text.encode()
        sample.append(data[:limit_bytes].decode(errors="ignore"))  # half a character is left out
        limit_bytes -= len(data)
    return sample

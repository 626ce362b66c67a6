"""Held-out bits per byte: comparable between tokenizers, and with a file compressor."""

import math
from collections.abc import Sequence

import torch

from perilune.core.errors import DataError
from perilune.data.packing import IGNORE, evaluation_batches
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model


@torch.inference_mode()
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
    training = model.training
    model.eval()
    nats = 0.0
    try:
        for batch in evaluation_batches(documents, context, max(tokens, context)):
            output = model(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels)
            nats += float(output.losses["next_token"]) * int((batch.labels != IGNORE).sum())
    finally:
        model.train(training)
    return nats / math.log(2) / size

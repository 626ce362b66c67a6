"""Held-out bits per byte: comparable between tokenizers, and with a file compressor."""

import math
from collections.abc import Sequence

import torch

from perilune.data.packing import evaluation_batches
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model


@torch.inference_mode()
def bits_per_byte(
    model: K3Model, tokenizer: ByteBPE, texts: Sequence[str], *, context: int, tokens: int = 8192
) -> float:
    """Bits the model needs for each byte of `texts`, every token scored once.

    -log2 p of all tokens over the length in UTF-8.  Documents longer than `context` are scored in pieces that each
    start afresh, so this is an upper bound on what one pass over whole documents would need.
    """
    documents = tokenizer.encode_documents(texts)
    training = model.training
    model.eval()
    nats = 0.0
    try:
        for batch in evaluation_batches(documents, context, tokens):
            output = model(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels)
            assert output.loss is not None
            nats += float(output.losses["next_token"]) * int((batch.labels >= 0).sum())
    finally:
        model.train(training)
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)

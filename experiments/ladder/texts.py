"""Part of the running Python's own library, and a tokenizer, that all runs of a scale share."""

from functools import cache
from pathlib import Path

import numpy as np

from experiments.ladder.recipes import Scale
from perilune.data.corpus import Corpus, standard_library
from perilune.data.tokenizer import ByteBPE
from perilune.train.evaluate import sample_texts

TOKENIZER_BYTES = 4_000_000


def prepare(scale: Scale, home: Path) -> None:
    """Writes `tokenizer.json` below `home`, unless it is there."""
    if not (home / "tokenizer.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        ByteBPE.train(corpus_of(scale.text_bytes).texts(TOKENIZER_BYTES), scale.vocab_size).save(home)


@cache
def corpus_of(text_bytes: int) -> Corpus:
    """Files from all over the library, `text_bytes` of them in all; all that are held out."""
    library = standard_library(held_out=0.05)
    kept, size = [], 0
    for document in library._mixed():
        if size < text_bytes:
            kept.append(document)
            size += document.byte_count
    return Corpus(tuple(kept), library.held_out, name=library.name)


def held_out(scale: Scale, tokenizer: ByteBPE) -> list[np.ndarray]:
    """Held-out files as ids, in a fixed order; the last may be cut."""
    texts = [document.text for document in corpus_of(scale.text_bytes).held_out]
    return tokenizer.encode_documents(sample_texts(texts, scale.judged_bytes))


def rows(documents: list[np.ndarray], context: int, number: int) -> list[np.ndarray]:
    """Documents end to end, read on without a reset, in rows of `context` and one token more: as many as there are."""
    ids = np.concatenate(documents)
    return [ids[i * context : (i + 1) * context + 1] for i in range(min(number, (len(ids) - 1) // context))]

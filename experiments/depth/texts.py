"""The running Python's own library as one string of tokens, cut into rows that all runs share."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.depth.recipes import Scale
from perilune.data.corpus import standard_library
from perilune.data.tokenizer import ByteBPE
from perilune.train.evaluate import sample_texts
from perilune.train.folder import write_json

TOKENIZER_BYTES = 4_000_000
BYTES_A_TOKEN = 6  # held-out text taken for one judged token; what is too much is dropped


def prepare(scale: Scale, home: Path) -> None:
    """Writes `texts/train.npy`, `texts/held_out.npy` and what is known of them below `home`, unless they are there."""
    folder = home / "texts"
    if (folder / "done.json").exists():
        return
    corpus = standard_library(held_out=0.05)
    training = list(corpus.texts(scale.text_bytes))
    held_out = sample_texts([document.text for document in corpus.held_out], BYTES_A_TOKEN * scale.judged_tokens)
    tokenizer = ByteBPE.train(corpus.texts(min(TOKENIZER_BYTES, scale.text_bytes)), scale.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    known = {}
    for name, texts in {"train": training, "held_out": held_out}.items():
        ids = np.concatenate(tokenizer.encode_documents(texts)).astype(np.uint16)
        np.save(folder / f"{name}.npy", ids)
        known[name] = {"tokens": len(ids), "bytes": sum(len(text.encode()) for text in texts)}
    write_json(folder / "done.json", known)


@dataclass(frozen=True)
class Rows:
    """Token ids: in each row the first T are read, and the last T are to be predicted.  `[N, T + 1]`.

    Rows are cut from documents laid end to end, so that one may begin in another's middle: all have one shape.
    """

    train: Tensor
    held_out: Tensor
    tokens_a_byte: float
    """Of the held-out text."""

    def order(self, seed: int, step: int, rows: int) -> Tensor:
        """Which training rows a step reads: every seed has an order of its own, through all of them, then again."""
        N = len(self.train)
        places = np.arange(step * rows, (step + 1) * rows)
        orders = {int(turn): np.random.default_rng((seed, int(turn))).permutation(N) for turn in set(places // N)}
        return torch.tensor([orders[int(place // N)][place % N] for place in places])


def load(home: Path, context: int, judged_tokens: int, device: torch.device) -> Rows:
    folder = home / "texts"
    known = json.loads((folder / "done.json").read_text())["held_out"]
    train, held_out = (
        torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int64)).unfold(0, context + 1, context)
        for name in ("train", "held_out")
    )
    held_out = held_out[: max(1, judged_tokens // context)]
    return Rows(train.to(device), held_out.to(device), known["tokens"] / known["bytes"])

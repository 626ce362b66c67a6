"""What a model makes of a long context: tasks by length and by depth, and its loss by position."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perilune.data.tasks import JUDGED, TASKS, Sample, Task
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.ops import linear_cross_entropy
from perilune.train.evaluate import in_fixed_order, judging, sample_texts

LENGTHS = (128, 512, 2048, 8192, 16384)
TOKENS = 16_384
"""Spent on one task at one length."""
TOKENS_OF = {"needle": 32_768}
"""Tasks that get more: those whose answers are told apart by depth."""
MOST_SAMPLES = 64
ROW_TOKENS = 16_384
"""Samples go through the model together up to this length."""
FILLER_BYTES = 1_000_000
DEPTHS = 8
"""Bins that the context before the questions is cut into."""
POSITION_TOKENS = 49_152
"""Spent on the loss by position, for each context."""


def long_context(
    model: K3Model,
    tokenizer: ByteBPE,
    texts: Sequence[str],
    *,
    trained: int,
    lengths: Sequence[int] = LENGTHS,
    tasks: Sequence[str] = JUDGED,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """What `result.json` keeps as `long_context`.

    `texts`: held out, they are what the tasks' statements hide in and what the loss is measured on.  `trained`: the
    longest context trained on; the loss is measured up to it and up to twice as far.  A length too short for a task is
    left out, and so is a context that no text is long enough for.  `progress` is told what begins.
    """
    filler = tokenizer.encode_documents(sample_texts(texts, FILLER_BYTES))
    by_task: dict[str, list[dict[str, Any]]] = {}
    for name in tasks:
        task = TASKS[name](tokenizer, filler)
        by_task[name] = []
        for length in sorted(lengths):
            if length >= task.least:
                progress(f"{name} at {length:,} tokens")
                samples = sample_count(length, TOKENS_OF.get(name, TOKENS))
                by_task[name].append(probe(model, task, length, samples=samples, seed=seed))
    progress("loss by position")
    documents = tokenizer.encode_documents(in_fixed_order(texts))
    curves = [loss_by_position(model, documents, context) for context in (trained, 2 * trained)]
    return {"trained": trained, "tasks": by_task, "loss_by_position": [curve for curve in curves if curve["buckets"]]}


def sample_count(length: int, tokens: int) -> int:
    """How many samples of `length` go into `tokens`: at least one, at most `MOST_SAMPLES`."""
    return min(max(1, tokens // length), MOST_SAMPLES)


def probe(model: K3Model, task: Task, length: int, *, samples: int, seed: int = 0) -> dict[str, Any]:
    """How often the model answers the task right in texts of `length` tokens, guessing aside by `chance`.

    The model reads each sample with its answers; right is an answer each of whose tokens is the likeliest of the
    tokenizer's where it stands.  `positions` tells the answers apart by the depth of what has to be read for them, in
    `DEPTHS` bins of which only those asked about are there; it is empty for a task that needs several things read.
    The standard error of `accuracy` is sqrt(accuracy (1 - accuracy) / asked), for questions of one text a little more.
    """
    asked: Counter[int] = Counter()
    right: Counter[int] = Counter()
    one_place = True
    for row in batched((task.probe(length, seed, i) for i in range(samples)), max(1, ROW_TOKENS // length)):
        questions = [(sample, question) for sample in row for question in sample.questions]
        one_place &= all(len(question.evidence) == 1 for _, question in questions)
        for (sample, question), answered in zip(questions, answers(model, row, task.tokenizer.vocab_size)):
            depth = min(int(sample.depth(question) * DEPTHS), DEPTHS - 1)
            asked[depth] += 1
            right[depth] += answered
    return {
        "length": length,
        "chance": task.chance,
        "asked": asked.total(),
        "accuracy": right.total() / asked.total(),
        "positions": [
            {"from": i / DEPTHS, "to": (i + 1) / DEPTHS, "asked": asked[i], "accuracy": right[i] / asked[i]}
            for i in sorted(asked)
        ]
        if one_place
        else [],
    }


def answers(model: K3Model, samples: Sequence[Sample], vocab_size: int) -> list[bool]:
    """Whether each question of `samples`, in order, is answered right; all of them in one row."""
    ids = torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int64))
    starts = [0, *itertools.accumulate(len(sample.ids) for sample in samples)]
    spans = [(at + q.start, at + q.stop) for at, sample in zip(starts, samples) for q in sample.questions]
    places = torch.cat([torch.arange(start, stop) for start, stop in spans])
    device = model.lm_head.weight.device
    with judging(model):
        features = features_of(model, ids.to(device), starts)[places.to(device) - 1]  # what is there predicts the next
        likeliest = model.lm_head(features)[:, :vocab_size].argmax(-1).cpu()
    hits = likeliest == ids[places]
    return [bool(part.all()) for part in hits.split([stop - start for start, stop in spans])]


def loss_by_position(
    model: K3Model, documents: Sequence[np.ndarray], context: int, tokens: int = POSITION_TOKENS
) -> dict[str, Any]:
    """The loss in nats a token, by how much of its document the model has read: `{"context", "buckets"}`.

    Over the first `context` tokens of the first documents that have so many, as many as go into `tokens` but at least
    one.  So all buckets are of the same documents; there are none if no document is long enough.  Buckets are [0, 32),
    [32, 128), then each as wide as all before it.
    """
    whole = [document[: context + 1] for document in documents if len(document) > context]
    chosen = whole[: max(1, tokens // context)]
    edges = bucket_edges(context)
    nats = torch.zeros(len(edges) - 1, dtype=torch.float64)
    weight = model.lm_head.weight
    for document in chosen:
        ids = torch.from_numpy(document.astype(np.int64)).to(weight.device)
        with judging(model):
            features = features_of(model, ids[:-1], [0, context])
            for i, (start, stop) in enumerate(itertools.pairwise(edges)):
                nats[i] += float(linear_cross_entropy(features[start:stop], weight, ids[start + 1 : stop + 1]))
    counts = [(stop - start) * len(chosen) for start, stop in itertools.pairwise(edges)]
    buckets = [
        {"from": start, "to": stop, "nats": float(total) / count, "tokens": count}
        for (start, stop), total, count in zip(itertools.pairwise(edges), nats, counts)
        if count
    ]
    return {"context": context, "buckets": buckets}


def bucket_edges(context: int) -> list[int]:
    """0, 32, 128, 256, 512 and so on, the last one `context`."""
    edges = [0, 32, 128]
    while edges[-1] < context:
        edges.append(2 * edges[-1])
    return [edge for edge in edges if edge < context] + [context]


def features_of(model: K3Model, ids: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """What the head reads: documents end to end, `[T]`, to `[T, D]`."""
    return model.model.norm(model.model(ids[None], None, cu_seqlens))[0]


def batched(samples: Iterator[Sample], size: int) -> Iterator[list[Sample]]:
    while row := list(itertools.islice(samples, size)):
        yield row

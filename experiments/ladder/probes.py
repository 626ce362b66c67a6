"""What a model is asked after every stage: both tasks in both forms by length, depth and hops; its loss by position."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from experiments.ladder import texts
from experiments.ladder.recipes import FORMS, PROBE_SEED, TASKS, Scale
from perilune.data.packing import Batch, evaluation_batches
from perilune.data.tasks import TASKS as MADE
from perilune.data.tasks import Task
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.ops import linear_cross_entropy
from perilune.train.evaluate import judging
from perilune.train.probes import ROW_TOKENS, answers, batched, bucket_edges, features_of

DEPTHS = 4
"""Parts that the text before the questions is cut into."""


class Exam:
    """Everything that is asked, made once; held-out text is what statements hide in, and what losses are of."""

    def __init__(self, scale: Scale, tokenizer: ByteBPE) -> None:
        self.scale = scale
        documents = texts.held_out(scale, tokenizer)
        self.tasks: dict[tuple[str, str], Task] = {
            (name, form): MADE[name](tokenizer, documents, words=scale.words, held_out=form != FORMS[0])
            for name in TASKS
            for form in FORMS
        }
        self.rows = texts.rows(documents, scale.position_context, scale.position_rows)
        self.look_batch: Batch = evaluation_batches(documents, scale.look_context, scale.look_tokens)[0]

    def after_stage(self, model: K3Model, trained: int) -> dict[str, Any]:
        """`cells`, one for each task, form and length, and `positions`, the loss by position.  trained: the context."""
        cells = [
            {"task": name, "form": form, **asked(model, task, length, self.scale.samples(length))}
            for (name, form), task in self.tasks.items()
            for length in self.scale.lengths
            if length >= task.least
        ]
        return {"cells": cells, "positions": by_position(model, self.rows, trained)}

    def look(self, model: K3Model) -> float:
        """Mean nats a token of some held-out text in short pieces, always the same."""
        device = model.lm_head.weight.device
        batch = self.look_batch
        with judging(model):
            output = model(batch.input_ids.to(device), cu_seqlens=batch.cu_seqlens, targets=batch.labels.to(device))
            return float(output.losses["next_token"])


def by_position(model: K3Model, rows: Sequence[np.ndarray], trained: int) -> list[dict[str, Any]]:
    """The loss in nats a token by position: `nats` of rows read in one go, `fresh` of the same tokens read in pieces of
    the `trained` length, each from an empty state.  So beyond it the two differ by what reading on does."""
    context = len(rows[0]) - 1
    edges = bucket_edges(context)
    pieces = [*range(0, context, trained), context]
    weight = model.lm_head.weight
    sums = torch.zeros(2, len(edges) - 1, dtype=torch.float64)
    for row in rows:
        ids = torch.from_numpy(row.astype(np.int64)).to(weight.device)
        with judging(model):
            for i, cu_seqlens in enumerate(([0, context], pieces)):
                features = features_of(model, ids[:-1], cu_seqlens)
                for j, (start, stop) in enumerate(pairwise(edges)):
                    sums[i, j] += float(linear_cross_entropy(features[start:stop], weight, ids[start + 1 : stop + 1]))
    counts = [(stop - start) * len(rows) for start, stop in pairwise(edges)]
    return [
        {"from": start, "to": stop, "nats": float(one_go) / count, "fresh": float(fresh) / count}
        for (start, stop), one_go, fresh, count in zip(pairwise(edges), *sums, counts)
    ]


def asked(model: K3Model, task: Task, length: int, samples: int) -> dict[str, Any]:
    """`[asked, right]` in all, in each of `DEPTHS` parts of the text by the first line that has to be read, and by the
    number of lines.  Right is an answer each of whose tokens is the likeliest where it stands."""
    total, depths, hops = Counter[bool](), Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()
    made = (task.probe(length, PROBE_SEED, i) for i in range(samples))
    for row in batched(made, max(1, ROW_TOKENS // length)):
        questions = [(sample, question) for sample in row for question in sample.questions]
        for (sample, question), right in zip(questions, answers(model, row, task.tokenizer.vocab_size)):
            total[right] += 1
            depths[min(int(sample.depth(question) * DEPTHS), DEPTHS - 1), right] += 1
            hops[len(question.evidence), right] += 1
    most = max(number for number, _ in hops)
    return {
        "length": length, "chance": task.chance, "asked": total.total(), "right": total[True],
        "depths": [[depths[i, True] + depths[i, False], depths[i, True]] for i in range(DEPTHS)],
        "hops": [[hops[i, True] + hops[i, False], hops[i, True]] for i in range(1, most + 1)],
    }  # fmt: skip


def half_lives(model: K3Model, rows: Sequence[np.ndarray], tokens: int) -> list[float]:
    """Tokens after which half is forgotten, the 10th, 50th and 90th percentile over all heads of all KDA layers."""
    from perilune.train.inspection import observe

    ids = torch.from_numpy(rows[0][:tokens].astype(np.int64))[None]
    batch = Batch(ids, ids, torch.tensor([0, ids.shape[1]]))
    heads = [head for layer in observe(model, batch).half_life.values() for head in layer]
    return [sum(values) / len(values) for values in zip(*heads)]

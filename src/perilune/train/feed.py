"""What a run reads: its sources opened, its tokenizer, and batches in the stages' mixtures."""

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from perilune.core.config import require
from perilune.core.errors import ConfigError, DataError, nearest
from perilune.data.corpus import Corpus, Document
from perilune.data.mixture import Mixture, check_mix
from perilune.data.packing import Batch
from perilune.data.source import open_source
from perilune.data.stream import Stream
from perilune.data.streamed import StreamedCorpus
from perilune.data.tasks import TASKS, TaskStream
from perilune.data.tokenizer import ByteBPE
from perilune.train.config import Run, Stage

SMALLEST_TEXT = 1000  # bytes; less than this is a mistake
TOKENIZER_BYTES = 100_000_000  # of each source, at most, to train a tokenizer on
FILLER_TOKENS = 2_000_000  # of text for tasks to hide their statements in


class Feed:
    """Batches for a run's stages, and what else its data decides.

    `begin` a stage, then `next` gives its batches; `state_dict` is the place in all streams.  `tokenizer` is given when
    a run goes on or starts from another's; otherwise the one that the configuration names is loaded, or a new one
    trained.

    Raises DataError where a source has too little to learn from or nothing to be judged on, or no document long enough
    for a stage, or a stage's context is too short for a task; ConfigError for a stage that mixes what is not there, a
    source that is called like a task, a tokenizer with more tokens than the model has.
    """

    def __init__(
        self,
        run: Run,
        tokenizer: ByteBPE | None = None,
        corpora: Mapping[str, Corpus | StreamedCorpus] | None = None,
    ) -> None:
        self._seed, self._options = run.seed, run.data.tasks
        used = list(dict.fromkeys(chain.from_iterable(stage.mix for stage in run.stages)))
        sources = run.data.sources
        if ambiguous := sources.keys() & TASKS.keys():
            raise ConfigError(
                f"data.sources: expected names apart from those of tasks, got {min(ambiguous)!r}; choose another"
            )
        check_mix(used, {*sources, *TASKS})  # before anything is read
        for name, options in run.data.tasks.items():
            _check_options(name, options)
        self.corpora = dict(corpora or {name: open_source(source) for name, source in sources.items()})
        for name, corpus in self.corpora.items():
            _check(name, corpus)
        self.tokenizer = tokenizer or self._find_tokenizer(run)
        if self.tokenizer.vocab_size > run.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size: expected at least the tokenizer's {self.tokenizer.vocab_size}, got "
                f"{run.model.vocab_size}; raise it, or use another tokenizer"
            )
        self.batches = Mixture({name: self._stream(name) for name in used})
        for stage in run.stages:  # what does not fit the last one shows now
            self.begin(stage)

    def _find_tokenizer(self, run: Run) -> ByteBPE:
        if run.data.tokenizer is not None:
            return ByteBPE.load(run.data.tokenizer)
        texts = chain.from_iterable(corpus.texts(TOKENIZER_BYTES) for corpus in self.corpora.values())
        return ByteBPE.train(texts, run.data.vocab_size)

    def _stream(self, name: str) -> Stream:
        if name in self.corpora:
            return self.corpora[name].stream(self.tokenizer, self._seed)
        return TaskStream(TASKS[name](self.tokenizer, self.filler, **self._options.get(name, {})), self._seed)

    @cached_property
    def filler(self) -> list[np.ndarray]:
        """Encoded training documents of the first source, for tasks to hide their statements in."""
        return next(iter(self.corpora.values())).filler(self.tokenizer, FILLER_TOKENS)

    @property
    def held_out(self) -> list[Document]:
        """What the model is judged on, of all sources."""
        return [document for corpus in self.corpora.values() for document in corpus.held_out]

    def begin(self, stage: Stage) -> None:
        """The next batch is the stage's first."""
        self.batches.begin(
            stage.mix,
            tokens=stage.batch_tokens,
            context=stage.context,
            min_document=stage.min_document,
            long_times=stage.long_times,
        )

    def next(self) -> Batch:
        """The next batch of the stage that was begun."""
        return self.batches.next()

    def state_dict(self) -> dict[str, Any]:
        """The place in every stream, in JSON's types."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there in the stage begun; DataError if the data are others by now."""
        self.batches.load_state_dict(state)


def _check_options(task: str, options: Mapping[str, Any]) -> None:
    if task not in TASKS:
        raise ConfigError(f"data.tasks: there is no task called {task!r}; {nearest(task, TASKS)}")
    known = TASKS[task].options()
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"data.tasks.{task}: there is no option called {name!r}; {nearest(name, known)}")
        kind = known[name]
        fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
        require(fits, f"data.tasks.{task}.{name}", kind.__name__, repr(value), "give a value of that type")


def _check(name: str, corpus: Corpus | StreamedCorpus) -> None:
    enough = corpus.train_bytes is None or corpus.train_bytes >= SMALLEST_TEXT
    if not enough or not corpus.held_out:
        raise DataError(
            f"{name}: expected at least {SMALLEST_TEXT} bytes to learn from and some to hold out, got "
            f"{corpus.train_bytes} and {sum(document.byte_count for document in corpus.held_out)}; add text"
        )

"""Reading: tokens a second from each kind of text to batches, and how long it takes to go on within a shard."""

import gzip
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from perilune.bench.case import Sheet
from perilune.bench.contest import table_of
from perilune.bench.progress import Steps, Tell, quiet
from perilune.core.errors import DataError
from perilune.data.corpus import standard_library
from perilune.data.mixture import Mixture
from perilune.data.shards import needed
from perilune.data.source import TextSource, open_source
from perilune.data.stream import Stream
from perilune.data.tasks import TASKS, TaskStream
from perilune.data.tokenizer import ByteBPE

TEXT, TASK = "text", "needle"


@dataclass(frozen=True)
class Kind:
    """Text that lies somewhere in some form, and what is mixed from it."""

    label: str
    pattern: str
    streamed: bool = False
    mix: Mapping[str, float] = field(default_factory=lambda: {TEXT: 1.0})


KINDS = (
    Kind("JSONL, in memory", "*.jsonl"),
    Kind("JSONL, streamed", "*.jsonl", streamed=True),
    Kind("JSONL, gzip, streamed", "*.jsonl.gz", streamed=True),
    Kind("Parquet, streamed", "*.parquet", streamed=True),
    Kind("Parquet, with needles", "*.parquet", streamed=True, mix={TEXT: 0.9, TASK: 0.1}),
)


@dataclass(frozen=True)
class Reading(Sheet):
    name: str = "data"
    title: str = "reading the standard library"
    kinds: Sequence[Kind] = KINDS
    text_bytes: int = 4_000_000
    vocab_size: int = 8192
    tokenizer_bytes: int = 1_000_000
    context: int = 8192
    batch_tokens: int = 131_072

    def run(self, tell: Tell = quiet) -> dict[str, Any]:
        """Every kind: an epoch is read from a batch to the next, and must have the tokens of the text."""
        result: dict[str, Any] = {"name": self.name, "title": self.title, "check": "passed", "passed": True}
        result["times"] = []
        steps = Steps(tell, len(self.kinds) + 1)
        with tempfile.TemporaryDirectory() as folder:
            steps.next("writing shards")
            corpus = standard_library(held_out=0.0)
            texts = list(corpus.texts(self.text_bytes))
            tokenizer = ByteBPE.train(corpus.texts(self.tokenizer_bytes), self.vocab_size)
            counts = np.bincount(np.concatenate(tokenizer.encode_documents(texts)), minlength=tokenizer.vocab_size)
            write_shards(texts, Path(folder))
            for kind in self.kinds:
                steps.next(kind.label)
                try:
                    row = self._measured(kind, Path(folder), tokenizer, counts)
                except DataError as error:  # a package that is not installed
                    row = {"skipped": str(error)}
                result["times"].append({"label": kind.label, **row})
                if wrong := row.get("wrong"):
                    return result | {"check": f"failed: {kind.label}: {wrong}", "passed": False}
        return result

    def _measured(self, kind: Kind, folder: Path, tokenizer: ByteBPE, counts: np.ndarray) -> dict[str, Any]:
        begin = time.perf_counter()
        mixture = self._open(kind, folder, tokenizer)
        opened = time.perf_counter() - begin
        seen, tokens, last = np.zeros_like(counts), 0, int(counts.sum())
        state: dict[str, Any] | None = None
        begin, busy = time.perf_counter(), time.process_time()
        while tokens < last:
            ids = mixture.next().input_ids[0].numpy()
            if kind.mix.keys() == {TEXT}:
                seen += np.bincount(ids[: last - tokens], minlength=len(seen))
            tokens += len(ids)
            if state is None and tokens > last / 2:
                state = json.loads(json.dumps(mixture.state_dict()))
        seconds, cpu = time.perf_counter() - begin, time.process_time() - busy
        if kind.mix.keys() == {TEXT} and not np.array_equal(seen, counts):
            return {"wrong": "expected the tokens of the text, got others"}
        assert state is not None
        begin = time.perf_counter()
        again = self._open(kind, folder, tokenizer)
        again.load_state_dict(state)
        again.next()
        return {
            "tokens_per_s": tokens / seconds,
            "tokens_per_cpu_s": tokens / cpu,
            "tokens": tokens,
            "opened_s": opened,
            "resumed_s": time.perf_counter() - begin,
        }

    def _open(self, kind: Kind, folder: Path, tokenizer: ByteBPE) -> Mixture:
        source = TextSource(path=str(folder), pattern=kind.pattern, streamed=kind.streamed, held_out=0.0)
        corpus = open_source(source)
        streams: dict[str, Stream] = {TEXT: corpus.stream(tokenizer, seed=0)}
        if TASK in kind.mix:
            streams[TASK] = TaskStream(TASKS[TASK](tokenizer, corpus.filler(tokenizer, 10 * self.context)))
        mixture = Mixture(streams)
        mixture.begin(kind.mix, tokens=self.batch_tokens, context=self.context)
        return mixture

    def parts(self, result: dict[str, Any]) -> Iterator[Table | str]:
        if not result["passed"]:
            yield f"{self.name}: check {result['check']}\nnot timed"
            return
        heads = ("tokens/s", "a CPU's", "million", "open s", "resume s")
        table = table_of(f"{self.title}: batches of {self.batch_tokens:,} tokens, one process", "", *heads)
        for row in result["times"]:
            if "skipped" in row:
                yield f"{row['label']}: skipped: {row['skipped']}"
                continue
            speeds = f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_cpu_s']:,.0f}"
            million = f"{row['tokens'] / 1e6:.1f}"
            table.add_row(row["label"], *speeds, million, f"{row['opened_s']:.2f}", f"{row['resumed_s']:.2f}")
        yield table


def write_shards(texts: Sequence[str], folder: Path) -> None:
    """Half of the texts in each of two shards of every kind that can be written here."""
    middle = len(texts) // 2
    for number, half in enumerate((texts[:middle], texts[middle:])):
        lines = "".join(json.dumps({TEXT: text}) + "\n" for text in half).encode()
        (folder / f"{number}.jsonl").write_bytes(lines)
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines, compresslevel=6))
        try:
            arrow, parquet = needed("pyarrow", str(folder)), needed("pyarrow.parquet", str(folder))
        except DataError:  # said when it is read
            (folder / f"{number}.parquet").touch()
            continue
        parquet.write_table(arrow.table({TEXT: list(half)}), folder / f"{number}.parquet", row_group_size=512)

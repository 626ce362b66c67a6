"""What it costs, and what it saves, to keep finished blocks in less memory: `python -m experiments.depth bank`.

The preset nano is trained with a block a layer under each bank, from the same start on the same rows.  The net whose
bank is whole is then read through the others too: what each does to a mixture, and to the loss of weights that never
saw it.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from experiments.depth import texts
from experiments.depth.recipes import SCALES, Variant
from experiments.depth.train import Net, Place, Training, bits_per_byte
from perilune.models.k3 import K3Model
from perilune.nn import BlockAttnRes, LowRankBank
from perilune.nn.attn_res import Bank
from perilune.ops import Stored, attn_res
from perilune.ops.attn_res.stored import store_source
from perilune.train.evaluate import judging
from perilune.train.folder import write_json

BANKS = ("whole", "bfloat16", "float8", "half the rank", "an eighth")
STACK = SCALES["small"].stack("preset")
RATE = 1e-2
TIMED = (2048, 256, 9)  # rows, width and sources of the mixture that is timed
ROUNDS = 8
HELD_OUT = 4096  # tokens
LOOKED_AT = 8  # rows whose mixtures are compared


def measure(home: Path, seeds: int, console: Console) -> None:
    """Trains what `home` has not yet, writes `bank.json` there and prints a table."""
    scale = replace(SCALES["small"], judged_tokens=HELD_OUT)
    with console.status("reading the library, training the tokenizer"):
        texts.prepare(scale, home)
    rows = texts.load(home, STACK.context, HELD_OUT, torch.device("cpu"))
    runs = []
    for seed in range(seeds):
        console.print(f"seed {seed}: {len(BANKS)} nets of {STACK.steps} steps")
        runs.append({bank: once(home, bank, seed, rows) for bank in BANKS})
    times = mixture_times()
    figures = [{"bank": bank, **merged([run[bank] for run in runs]), "ms": times[bank]} for bank in BANKS]
    result = {"steps": STACK.steps, "seeds": seeds, "threads": torch.get_num_threads(), "torch": torch.__version__}
    write_json(home / "bank.json", {**result, "figures": figures})
    console.print(table_of(figures))


def once(home: Path, bank: str, seed: int, rows: texts.Rows) -> dict[str, Any]:
    """What `trained` gives, or has given before."""
    file = home / f"{bank.replace(' ', '-')}-seed{seed}.json"
    if not file.exists():
        write_json(file, trained(bank, seed, rows))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def bank_of(bank: str, D: int, learned: bool) -> Bank | None:
    ranks = {"half the rank": D // 2, "an eighth": D // 8}
    if bank in ranks:
        return LowRankBank(D, ranks[bank], learned=learned)
    return {"bfloat16": "bfloat16", "float8": "float8"}.get(bank)  # type: ignore[return-value]


def trained(bank: str, seed: int, rows: texts.Rows) -> dict[str, Any]:
    """A net trained with that bank; of the whole one also what the others would make of it."""
    net = Net(STACK, Variant("block", 1), seed, Place(torch.device("cpu")))
    torch.manual_seed(seed)
    net.model.model.bank = bank_of(bank, net.model.config.hidden_size, learned=True)
    training = Training(net, STACK, rows, RATE, seed, STACK.steps)
    while training.done < STACK.steps:
        training.step()
    figures: dict[str, Any] = {"bits": bits_per_byte(net, rows, STACK.rows)}
    figures["bytes"] = bytes_of(bank, net.model.config.hidden_size)
    if bank == "whole":
        figures["read so"] = {other: read_through(net, other, rows) for other in BANKS}
    return figures


def bytes_of(bank: str, D: int) -> int:
    """A token and finished block, in a float32 stream."""
    form, x = bank_of(bank, D, learned=False), torch.zeros(1, D)
    stored = form(x) if isinstance(form, LowRankBank) else store_source(x, form) if form else Stored(x)
    return stored.nbytes


def read_through(net: Net, bank: str, rows: texts.Rows) -> dict[str, float]:
    """Of a net trained with whole sources: relative error of its mixtures, and bits a byte with that bank.

    A low rank is given its best basis, that of finished blocks on training rows.
    """
    form = bank_of(bank, net.model.config.hidden_size, learned=False)
    if isinstance(form, LowRankBank):
        finished = [v for *done, _ in reads(net, rows.train[: 4 * LOOKED_AT]) for v in done]
        form.fit(torch.cat([v.flatten(0, 1) for v in finished]))
    errors = []
    with torch.no_grad():
        for mixer, sources in zip(mixers_of(net.model), reads(net, rows.held_out[:LOOKED_AT]), strict=True):
            *done, live = sources
            if done and form is not None:
                kept = [form(v) if isinstance(form, LowRankBank) else store_source(v, form) for v in done]
                h, other = (attn_res(mixer.query, [*bank, live], mixer.norm.weight) for bank in (done, kept))
                errors.append(float((other - h).norm() / h.norm()))
    net.model.model.bank = form
    bits = bits_per_byte(net, rows, STACK.rows)
    net.model.model.bank = None
    return {"error": statistics.mean(errors) if errors else 0.0, "bits": bits}


def mixers_of(model: K3Model) -> list[BlockAttnRes]:
    """In the order in which they read."""
    return [module for module in model.modules() if isinstance(module, BlockAttnRes)]


def reads(net: Net, rows: Tensor) -> list[list[Tensor]]:
    """What every mixer reads on these rows."""
    seen: list[list[Tensor]] = []
    with watched(mixers_of(net.model), seen), judging(net), torch.no_grad():
        net.loss(rows[:, :-1], rows[:, 1:])
    return seen


@contextmanager
def watched(mixers: Sequence[nn.Module], seen: list[list[Tensor]]) -> Iterator[None]:
    hooks = [mixer.register_forward_pre_hook(lambda _, args: seen.append(list(args[0]))) for mixer in mixers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def mixture_times() -> dict[str, float]:
    """The fastest of ROUNDS forward and backward passes of one mixture, in milliseconds, banks taking turns."""
    torch.manual_seed(0)
    R, D, N = TIMED
    sources = [torch.randn(R, D).requires_grad_() for _ in range(N)]
    query, weight, dout = torch.randn(D).requires_grad_(), torch.ones(D), torch.randn(R, D)
    banks = {}
    for bank in BANKS:
        form = bank_of(bank, D, learned=True)
        banks[bank] = [
            form(v) if isinstance(form, LowRankBank) else store_source(v, form) if form else v for v in sources[:-1]
        ]
    times: dict[str, list[float]] = {bank: [] for bank in BANKS}
    for _ in range(ROUNDS):
        for bank, kept in banks.items():
            start = time.perf_counter()
            h = attn_res(query, [*kept, sources[-1]], weight)
            torch.autograd.grad(h, [query, *sources], dout, retain_graph=True)
            times[bank].append(time.perf_counter() - start)
    return {bank: 1e3 * min(seconds) for bank, seconds in times.items()}


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; the spread is that of single seeds, standard deviation."""
    bits = [run["bits"] for run in runs]
    row = {"bytes": runs[0]["bytes"], "bits": statistics.mean(bits)}
    row["spread"] = statistics.stdev(bits) if len(bits) > 1 else math.nan
    if "read so" in runs[0]:
        row["read so"] = {
            bank: {key: statistics.mean(run["read so"][bank][key] for run in runs) for key in ("error", "bits")}
            for bank in BANKS
        }
    return row


def table_of(figures: Sequence[dict[str, Any]]) -> Table:
    heads = ("bank", "bytes", "error of h", "bits a byte, read so", "trained so", "spread", "ms a mixture")
    table = Table(*heads, title=f"finished blocks in less memory: nano, {STACK.steps} steps")
    read = next(row["read so"] for row in figures if row["bank"] == "whole")
    for row in figures:
        table.add_row(
            row["bank"], str(row["bytes"]), f"{100 * read[row['bank']]['error']:.2f} %",
            f"{read[row['bank']]['bits']:.4f}", f"{row['bits']:.4f}", f"{row['spread']:.4f}", f"{row['ms']:.0f}",
        )  # fmt: skip
    return table

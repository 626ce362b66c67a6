"""Train a recipe, judge it on held-out text beside compressors, and show what it writes.

perilune train nano
perilune train nano seed=1 stages.0.tokens=200000 --out runs/short
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli.numbers import human

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.train.loop import Trainer

PROMPTS = ("def ", "class ", "import ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from perilune.recipes import RECIPES

    parser.add_argument("recipe", help=", ".join(RECIPES))
    parser.add_argument(
        "changes", nargs="*", default=[], metavar="key=value", help="changes to the recipe, dotted where nested"
    )
    parser.add_argument("--out", type=Path, default=None, help="the run's folder (runs/RECIPE)")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is there")
    parser.add_argument("--print", action="store_true", dest="show", help="print the resolved recipe and stop")


def run(args: argparse.Namespace) -> int:
    from perilune import recipes

    recipe = recipes.get(args.recipe).override(args.changes)
    if args.show:
        import json

        print(json.dumps(recipe.to_dict(), indent=2))
        return 0

    from rich.console import Console

    from perilune.cli.progress import watching
    from perilune.train.folder import check_folder, start_folder, write_json
    from perilune.train.loop import Trainer
    from perilune.train.metrics import Metrics

    folder = args.out or Path("runs") / args.recipe
    check_folder(folder, args.overwrite)
    console = Console()
    with console.status("reading the corpus, training the tokenizer"):
        trainer = Trainer(recipe)
    start_folder(folder, recipe, args.overwrite)
    show_start(trainer, console)
    with Metrics(folder / "metrics.jsonl") as metrics, watching(console, trainer) as watch:
        trainer.train(metrics, watch)
    trainer.save(folder / "model")
    result = judge(trainer, console)
    write_json(folder / "result.json", result)
    show_result(result, console)
    show_samples(trainer, console)
    show_next(folder, [args.recipe, *args.changes], console)
    return 0


def show_next(folder: Path, recipe: list[str], console: "Console") -> None:
    """What to try now, as it can be typed here.  `recipe` is its name and what was changed in it."""
    import os
    import shlex
    import shutil
    import sys

    command = "perilune" if shutil.which("perilune") else os.path.relpath(sys.argv[0])
    console.print(
        f"\nSaved in {folder}. Next:\n"
        f'  {command} generate {folder} --prompt "def "\n'
        f"  {command} eval {folder}\n"
        f"  {command} train {shlex.join(recipe)} seed=1 --out {folder}-seed1\n"
        f"  {command} plan k3",
        markup=False,
        soft_wrap=True,
    )


def show_start(trainer: "Trainer", console: "Console") -> None:
    """What is learned from, and how large the model is."""
    corpus = trainer.corpus
    parameters = sum(p.numel() for p in trainer.model.parameters())
    console.print(
        f"{human(corpus.train_bytes)} bytes to learn from in {len(corpus.train):,} files, "
        f"{human(corpus.held_out_bytes)} held out in {len(corpus.held_out):,}; "
        f"{trainer.tokenizer.vocab_size:,} tokens in the vocabulary; {human(parameters)} parameters",
        soft_wrap=True,
    )
    if corpus.skipped:
        console.print(
            f"{len(corpus.skipped):,} files skipped, such as {corpus.skipped[0]}", markup=False, soft_wrap=True
        )


def judge(trainer: "Trainer", console: "Console") -> dict[str, Any]:
    """Held-out bits per byte of the model and of what needs no model, and the experts' load."""
    from perilune.data.corpus import total_text
    from perilune.train.baselines import compressors
    from perilune.train.evaluate import bits_per_byte

    corpus = trainer.corpus
    context = trainer.run.stages[-1].context
    with console.status("scoring the held-out text"):
        texts = [document.text for document in corpus.held_out]
        bits = {"perilune": bits_per_byte(trainer.model, trainer.tokenizer, texts, context=context)}
    with console.status("the same text through gzip, xz and a Kneser-Ney model"):
        bits |= compressors(total_text(corpus.train), total_text(corpus.held_out))
    return {
        "bits_per_byte": bits,
        "expert_load": trainer.expert_load(),
        "tokens": trainer.tokens_done,
        "seed": trainer.run.seed,
    }


def show_result(result: dict[str, Any], console: "Console") -> None:
    """The table of bits per byte, best first, and a line on the experts."""
    from rich.table import Table

    table = Table(title="held-out text")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    for name, value in sorted(result["bits_per_byte"].items(), key=lambda item: item[1]):
        table.add_row(name, f"{value:.3f}", style="bold" if name == "perilune" else None)
    console.print(table)
    load = result["expert_load"]
    console.print(
        f"experts, worst layer over the last steps: Gini {load['gini']:.3f}, "
        f"fullest {1 + load['max_violation']:.2f}x the mean, {load['dead_experts']} dead",
        soft_wrap=True,
    )


def show_samples(trainer: "Trainer", console: "Console") -> None:
    """How the model continues a few prompts."""
    from rich.panel import Panel
    from rich.text import Text

    from perilune.infer.sampler import Sampling
    from perilune.infer.text import stream_text

    sampling = Sampling(temperature=0.7, top_p=0.95)
    for seed, prompt in enumerate(PROMPTS):
        pieces = stream_text(trainer.model, trainer.tokenizer, prompt, 120, sampling=sampling, seed=seed)
        console.print(Panel(Text(prompt + "".join(pieces)), title=f"continues {prompt!r}", title_align="left"))

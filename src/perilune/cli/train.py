"""Train a recipe, judge it on held-out text beside compressors, and show what it writes.

perilune train nano
perilune train nano seed=1 stages.0.tokens=200000 --out runs/short
"""

import argparse
from pathlib import Path

PROMPTS = ("def ", "class ", "import ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from perilune.recipes import RECIPES

    parser.add_argument("recipe", help=", ".join(RECIPES))
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to the recipe, dotted where nested")
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
    folder = args.out or Path("runs") / args.recipe

    from rich.console import Console

    from perilune.cli.progress import watching
    from perilune.train.loop import Trainer, start_folder, write_json
    from perilune.train.metrics import Metrics

    console = Console()
    start_folder(folder, recipe, args.overwrite)
    with console.status("reading the corpus, training the tokenizer"):
        trainer = Trainer(recipe)
    corpus = trainer.corpus
    console.print(
        f"{corpus.train_bytes / 1e6:.1f} MB to learn from in {len(corpus.train):,} files, "
        f"{corpus.held_out_bytes / 1e6:.2f} MB held out in {len(corpus.held_out)}; "
        f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f}M parameters"
    )
    with Metrics(folder / "metrics.jsonl") as metrics, watching(console, trainer) as watch:
        trainer.train(metrics, watch)
    trainer.save(folder / "model")
    result = judge(trainer, console)
    write_json(folder / "result.json", result)
    show_result(result, console)
    show_samples(trainer, console)
    console.print(
        f"\nSaved in {folder}. Next:\n"
        f'  perilune generate {folder} --prompt "def "\n'
        f"  perilune eval {folder}\n"
        f"  perilune train {args.recipe} seed=1 --out {folder}-seed1\n"
        f"  perilune plan k3"
    )
    return 0


def judge(trainer, console) -> dict:  # type: ignore[no-untyped-def]
    """Held-out bits per byte of the model and of what needs no model, and the experts' load."""
    from perilune.train.baselines import compressors
    from perilune.train.evaluate import bits_per_byte

    held_out = [d.text for d in trainer.corpus.held_out]
    context = trainer.run.stages[-1].context
    with console.status("scoring the held-out text"):
        bits = {"perilune": bits_per_byte(trainer.model, trainer.tokenizer, held_out, context=context)}
    with console.status("the same text through gzip, xz and a Kneser-Ney model"):
        train_text, test_text = (
            "".join(d.text for d in part).encode() for part in (trainer.corpus.train, trainer.corpus.held_out)
        )
        bits |= compressors(train_text, test_text)
    return {
        "bits_per_byte": bits,
        "expert_load": trainer.expert_load(),
        "tokens": trainer.tokens_done,
        "seed": trainer.run.seed,
    }


def show_result(result: dict, console) -> None:  # type: ignore[no-untyped-def, type-arg]
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
        f"fullest {1 + load['max_violation']:.2f}x the mean, {load['dead_experts']} dead"
    )


def show_samples(trainer, console) -> None:  # type: ignore[no-untyped-def]
    from rich.panel import Panel
    from rich.text import Text

    from perilune.infer.sampler import Sampling
    from perilune.infer.text import stream_text

    sampling = Sampling(temperature=0.7, top_p=0.95)
    for seed, prompt in enumerate(PROMPTS):
        text = prompt + "".join(
            stream_text(trainer.model, trainer.tokenizer, prompt, 120, sampling=sampling, seed=seed)
        )
        console.print(Panel(Text(text), title=f"continues {prompt!r}", title_align="left"))

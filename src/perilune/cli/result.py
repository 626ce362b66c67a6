"""How a trained model is judged, and how the verdict is shown."""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.models.k3 import K3Model
    from perilune.train.loop import Trainer

PROMPTS = ("def ", "class ", "import ")
BASELINE_BYTES = 20_000_000  # of the training text, at most, that the n-gram model learns from
PROBED_BEYOND = 4  # times the longest context trained on


def judge(trainer: "Trainer", model: "K3Model", folder: Path, console: "Console") -> dict[str, Any]:
    """What `result.json` keeps of the run, whose model, in one piece, is `model`."""
    return {
        "bits_per_byte": bits_per_byte(trainer, model, console),
        "expert_load": trainer.expert_load(),
        "tokens": trainer.tokens_done,
        "skipped_steps": trainer.guard.skipped,
        "seed": trainer.run.seed,
        "seconds": seconds_trained(folder),
        "parameters": trainer.parameters,
        "machine": machine(trainer),
        "long_context": long_context(trainer, model, console),
        "samples": samples(trainer, model, console),
    }


def bits_per_byte(trainer: "Trainer", model: "K3Model", console: "Console") -> dict[str, float]:
    """Of the held-out text: by the model, and by what needs no model."""
    from perilune.data.corpus import total_text
    from perilune.train.baselines import compressors
    from perilune.train.evaluate import bits_per_byte

    feed = trainer.feed
    with console.status("scoring the held-out text"):
        texts = [document.text for document in feed.held_out]
        bits = bits_per_byte(model, feed.tokenizer, texts, context=trainer.run.stages[-1].context)
    with console.status("the same text through gzip, xz and a Kneser-Ney model"):
        training = chain.from_iterable(corpus.texts(BASELINE_BYTES) for corpus in feed.corpora.values())
        return {"perilune": bits} | compressors("".join(training).encode(), total_text(feed.held_out))


def long_context(trainer: "Trainer", model: "K3Model", console: "Console") -> dict[str, Any]:
    """What the model finds in long texts, up to and past the longest that it was trained on."""
    from perilune.train import probes

    trained = max(stage.context for stage in trainer.run.stages)
    with console.status("asking for what stands far back in long texts") as status:
        return probes.long_context(
            model,
            trainer.feed.tokenizer,
            [document.text for document in trainer.feed.held_out],
            trained=trained,
            lengths=[length for length in probes.LENGTHS if length <= PROBED_BEYOND * trained],
            progress=status.update,
        )


def samples(trainer: "Trainer", model: "K3Model", console: "Console") -> list[dict[str, str]]:
    """How the model continues a few prompts."""
    from perilune.infer.sampler import Sampling
    from perilune.infer.text import stream_text

    sampling = Sampling(temperature=0.7, top_p=0.95)
    texts = []
    with console.status("writing samples"):
        for seed, prompt in enumerate(PROMPTS):
            pieces = stream_text(model, trainer.feed.tokenizer, prompt, 120, sampling=sampling, seed=seed)
            texts.append({"prompt": prompt, "text": "".join(pieces)})
    return texts


def seconds_trained(folder: Path) -> float:
    """The sum of all steps' times, in however many sittings."""
    with (folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        return sum(json.loads(line)["seconds"] for line in lines)


def machine(trainer: "Trainer") -> dict[str, Any]:
    """Where the run ended."""
    import torch

    device = trainer.device
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
    }


def show_result(result: dict[str, Any], console: "Console") -> None:
    """The table of bits per byte, best first, a line on the experts and one on needles, and the samples."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

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
    found = result["long_context"]["tasks"].get("needle", [])
    if found:
        shares = ", ".join(f"{row['accuracy']:.0%} at {row['length']:,}" for row in found)
        chance, trained = found[0]["chance"], result["long_context"]["trained"]
        console.print(
            f"needles found, by tokens of text: {shares} (trained up to {trained:,}; guessing {chance:.1%})",
            soft_wrap=True,
        )
    for sample in result["samples"]:
        text = Text(sample["prompt"] + sample["text"])
        console.print(Panel(text, title=f"continues {sample['prompt']!r}", title_align="left"))

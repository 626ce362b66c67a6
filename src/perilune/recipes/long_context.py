"""8K, 64K, 256K, 1M: the four stages of the K3 report (section 3) for a model of any size, on public data.

The report keeps its numbers of tokens, rates and mixtures to itself.  Shares of tokens and falling peaks are ours, and
so are the datasets: open ones of the Hugging Face Hub, read as a stream.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from perilune.data.source import TextSource
from perilune.models.k3 import presets
from perilune.recipes.joined import joined
from perilune.train.config import DataConfig, GuardConfig, OptimizerConfig, Run, Stage

AT_ONCE = 65_536
"""Tokens of a micro-batch where contexts are no longer: all activations of `1b` for so many take 73 GiB.  Longer ones
go through the model one at a time, each sublayer recomputed."""
HUB = "hf://datasets/"
SOURCES = {
    "web": TextSource(path=HUB + "HuggingFaceFW/fineweb-edu", subset="sample-100BT"),
    "code": TextSource(path=HUB + "codeparrot/codeparrot-clean", text_key="content"),
    "math": TextSource(path=HUB + "HuggingFaceTB/finemath", subset="finemath-4plus"),
    "papers": TextSource(path=HUB + "HuggingFaceFW/finepdfs", subset="eng_Latn", clean=True),
}


def stage_8k(preset: str, tokens: float, batch_tokens: int, lr: float) -> Run:
    """85 % of `tokens`: language and knowledge."""
    mix = {"web": 0.6, "code": 0.25, "math": 0.15}
    return _run(preset, 0.85 * tokens, batch_tokens, lr, name="8k", context=8192, mix=mix)


def stage_64k(preset: str, tokens: float, batch_tokens: int, lr: float) -> Run:
    """10 % at half the rate: longer documents and several together, facts to be added up across them."""
    mix = {"web": 0.4, "code": 0.2, "papers": 0.3, "aggregation": 0.05, "scattered": 0.05}
    return _run(preset, 0.10 * tokens, batch_tokens, lr / 2, name="64k", context=65_536, mix=mix)


def stage_256k(preset: str, tokens: float, batch_tokens: int, lr: float) -> Run:
    """4 % at a fifth of the rate: chains of reasoning over documents of 8K and more."""
    mix = {"web": 0.1, "code": 0.3, "papers": 0.4, "math": 0.1, "variables": 0.05, "files": 0.05}
    return _run(preset, 0.04 * tokens, batch_tokens, lr / 5, name="256k", context=262_144, mix=mix, min_document=8192)


def stage_1m(preset: str, tokens: float, batch_tokens: int, lr: float) -> Run:
    """1 % at a tenth of the rate: long text alone, and all tasks over the whole window."""
    mix = {"papers": 0.6, "code": 0.2, "needle": 0.05, "variables": 0.05, "files": 0.05, "scattered": 0.05}
    return _run(
        preset, 0.01 * tokens, batch_tokens, lr / 10, name="1m", context=1_048_576, mix=mix, min_document=32_768
    )


STAGES = {"8k": stage_8k, "64k": stage_64k, "256k": stage_256k, "1m": stage_1m}


def long_context(preset: str, tokens: float, batch_tokens: int, lr: float) -> Run:
    """All four, one after the other.

    tokens: of the whole run.  batch_tokens: of a step, at every length; one context at least.  lr: the first peak.
    """
    return joined(*(stage(preset, tokens, batch_tokens, lr) for stage in STAGES.values()))


def recipes(preset: str, tokens: float, batch_tokens: int, lr: float) -> dict[str, Callable[[], Run]]:
    """The ladder under the preset's name, and its stages as `PRESET_8k` to `PRESET_1m`."""
    stages = {f"{preset}_{name}": stage for name, stage in STAGES.items()}
    return {
        name: partial(build, preset, tokens, batch_tokens, lr)
        for name, build in {preset: long_context, **stages}.items()
    }


def _run(preset: str, tokens: float, batch_tokens: int, lr: float, *, context: int, **stage: Any) -> Run:
    model = presets.get(preset)
    step = max(batch_tokens, context)
    return Run(
        model=model,
        stages=(
            Stage(
                context=context, batch_tokens=step, micro_tokens=max(AT_ONCE, context),
                recompute="none" if context <= AT_ONCE else "sublayers",
                tokens=max(step, round(tokens)), lr=lr, lr_end=lr / 10, **stage,
            ),
        ),
        data=DataConfig(sources=SOURCES, vocab_size=model.vocab_size),
        optimizer=OptimizerConfig(qk_clip_every=10),
        guard=GuardConfig(width=10),
        precision="bfloat16",
    )  # fmt: skip

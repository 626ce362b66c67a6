"""8K, 64K, 256K, 1,048,576 tokens on one GPU with a model of 0.12B, and the same ladder in miniature for two cores.

What the stages are for is the K3 report's (section 3): most tokens short; then longer documents and several together;
long ones read more often; and tasks whose answers lie far before their questions.  Every stage warms up again from
where the one before it ended, to a lower peak each time.  Numbers of tokens, rates and mixtures are ours.

Documents are packed end to end with resets between them; tasks fill their context with text and say where a sample
begins and ends, so that at every stage something spans the whole window even where no document does.
"""

from typing import Any

from perilune.models.k3 import presets
from perilune.recipes.joined import joined
from perilune.recipes.long_context import SOURCES
from perilune.train.config import DataConfig, GuardConfig, OptimizerConfig, Run, Stage

MEMORY: dict[str, dict[str, Any]] = {
    "8k": {"micro_tokens": 65_536},
    "64k": {},
    "256k": {},
    "1m": {"recompute": "sublayers"},
}
"""By stage, what `perilune plan ladder_1m --gpus 1` and its like ask for, so that a step fits one GPU of 141 GB."""
REWARM = 0.1
"""Share of a later stage spent warming up again: these have tens of steps, of which one percent is none."""


def ladder() -> Run:
    """1.0B tokens: the four stages one after the other."""
    return joined(stage_8k(), stage_64k(), stage_256k(), stage_1m())


def stage_8k() -> Run:
    """Language and knowledge, and to look up what was said."""
    return _full(
        name="8k", context=8192, batch_tokens=131_072, tokens=800_000_000, lr=2e-3, lr_end=2e-4,
        mix={"web": 0.5, "code": 0.25, "math": 0.15, "retrieval": 0.07, "chains": 0.03},
    )  # fmt: skip


def stage_64k() -> Run:
    """Longer documents and several together; a document that fills the window comes three times an epoch."""
    return _full(
        name="64k", context=65_536, batch_tokens=131_072, tokens=120_000_000, lr=1e-3, lr_end=1e-4, warmup=REWARM,
        mix={"web": 0.3, "code": 0.2, "papers": 0.35, "retrieval": 0.08, "chains": 0.07}, long_times=3,
    )  # fmt: skip


def stage_256k() -> Run:
    """Chains over documents of 8K and more, those that fill the window four times."""
    return _full(
        name="256k", context=262_144, batch_tokens=262_144, tokens=50_000_000, lr=4e-4, lr_end=4e-5, warmup=REWARM,
        mix={"code": 0.25, "papers": 0.55, "retrieval": 0.1, "chains": 0.1}, min_document=8192, long_times=4,
    )  # fmt: skip


def stage_1m() -> Run:
    """Long text alone, and both tasks over the whole window."""
    return _full(
        name="1m", context=1_048_576, batch_tokens=1_048_576, tokens=30_000_000, lr=2e-4, lr_end=2e-5, warmup=REWARM,
        mix={"code": 0.15, "papers": 0.55, "retrieval": 0.15, "chains": 0.15}, min_document=32_768, long_times=4,
    )  # fmt: skip


def stepladder() -> Run:
    """0.9M tokens: 128, 512, 2,048 and 8,192 tokens for 8K, 64K, 256K and 1M."""
    return joined(step_128(), step_512(), step_2k(), step_8k())


def step_128() -> Run:
    """See `stage_8k`; half of it tasks, or so small a model would not find out what they want."""
    return _mini(
        name="128", context=128, batch_tokens=2048, tokens=500_000, lr=8e-3, lr_end=8e-4,
        mix={"text": 0.5, "retrieval": 0.35, "chains": 0.15},
    )  # fmt: skip


def step_512() -> Run:
    """See `stage_64k`."""
    return _mini(
        name="512", context=512, batch_tokens=2048, tokens=200_000, lr=4e-3, lr_end=4e-4, warmup=REWARM,
        mix={"text": 0.55, "retrieval": 0.3, "chains": 0.15}, long_times=3,
    )  # fmt: skip


def step_2k() -> Run:
    """See `stage_256k`."""
    return _mini(
        name="2k", context=2048, batch_tokens=2048, tokens=120_000, lr=1.6e-3, lr_end=1.6e-4, warmup=REWARM,
        mix={"text": 0.6, "retrieval": 0.2, "chains": 0.2}, min_document=256, long_times=4,
    )  # fmt: skip


def step_8k() -> Run:
    """See `stage_1m`."""
    return _mini(
        name="8k", context=8192, batch_tokens=8192, tokens=80_000, lr=8e-4, lr_end=8e-5, warmup=REWARM,
        mix={"text": 0.6, "retrieval": 0.2, "chains": 0.2}, min_document=1024, long_times=4,
    )  # fmt: skip


def _full(*, name: str, **stage: Any) -> Run:
    model = presets.small()
    return Run(
        model=model,
        stages=(Stage(name=name, **stage, **MEMORY[name]),),
        data=DataConfig(sources=SOURCES, vocab_size=model.vocab_size),
        optimizer=OptimizerConfig(qk_clip_every=10),
        guard=GuardConfig(width=10),
        precision="bfloat16",
    )


def _mini(**stage: Any) -> Run:
    return Run(
        model=presets.nano(),
        stages=(Stage(**stage),),
        data=DataConfig(vocab_size=2048),
        optimizer=OptimizerConfig(momentum=0.85, adamw_lr=1.5 * stage["lr"]),
    )


RECIPES = {
    "ladder": ladder,
    "ladder_8k": stage_8k,
    "ladder_64k": stage_64k,
    "ladder_256k": stage_256k,
    "ladder_1m": stage_1m,
    "stepladder": stepladder,
    "stepladder_128": step_128,
    "stepladder_512": step_512,
    "stepladder_2k": step_2k,
    "stepladder_8k": step_8k,
}
"""By the names that `perilune train` knows them under."""

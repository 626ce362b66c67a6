"""The nano model on Python's own library: minutes on two cores, every mechanism of the model on.

Contexts of 128, 512, 2,048 and 8,192 tokens stand for 8K, 64K, 256K and 1M.  Each stage is a run of its own, to be
begun where another one ended (`init=runs/nano_128`); `nano` is all four.
"""

from perilune.models.k3 import presets
from perilune.recipes.joined import joined
from perilune.train.config import DataConfig, OptimizerConfig, Run, Stage


def nano() -> Run:
    """2.0M tokens: the four stages one after the other."""
    return joined(nano_128(), nano_512(), nano_2k(), nano_8k())


def nano_128() -> Run:
    """Language, and to look up what was just said."""
    return _run(
        Stage(
            name="128", context=128, batch_tokens=2048, tokens=700_000, lr=8e-3, lr_end=4e-3,
            mix={"text": 0.6, "needle": 0.4},
        )
    )  # fmt: skip


def nano_512() -> Run:
    """Longer documents, and several together: records to be added up, statements between shuffled documents."""
    return _run(
        Stage(
            name="512", context=512, batch_tokens=2048, tokens=640_000, lr=5e-3, lr_end=2e-3,
            mix={"text": 0.57, "needle": 0.35, "aggregation": 0.04, "scattered": 0.04},
        )
    )  # fmt: skip


def nano_2k() -> Run:
    """Reasoning chains: variables set from variables, files that name files."""
    return _run(
        Stage(
            name="2k", context=2048, batch_tokens=2048, tokens=560_000, lr=3e-3, lr_end=8e-4,
            mix={"text": 0.57, "needle": 0.35, "variables": 0.04, "files": 0.04},
        )
    )  # fmt: skip


def nano_8k() -> Run:
    """Long text alone, and all tasks over its whole length."""
    return _run(
        Stage(
            name="8k", context=8192, batch_tokens=8192, tokens=130_000, lr=1.5e-3, lr_end=1e-4, min_document=4096,
            mix={"text": 0.63, "needle": 0.25, "variables": 0.04, "files": 0.04, "scattered": 0.04},
        )
    )  # fmt: skip


def _run(stage: Stage) -> Run:
    return Run(
        model=presets.nano(),  # with num_nextn_predict_layers=1 a step takes a quarter longer
        stages=(stage,),
        data=DataConfig(vocab_size=2048),
        optimizer=OptimizerConfig(momentum=0.85, adamw_lr=1.5 * stage.lr),
    )

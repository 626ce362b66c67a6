"""The nano model on Python's own library: minutes on two cores, every mechanism on."""

from perilune.models.k3 import presets
from perilune.train.config import DataConfig, OptimizerConfig, Run, Stage


def nano() -> Run:
    """1.8M tokens in two context stages, the second four times as long as the first."""
    return Run(
        model=presets.nano(),
        data=DataConfig(vocab_size=2048),
        stages=(
            Stage(name="512", context=512, batch_tokens=2048, tokens=1_400_000, lr=1e-2, lr_end=2e-3),
            Stage(name="2048", context=2048, batch_tokens=2048, tokens=400_000, lr=4e-3, lr_end=2e-4),
        ),
        optimizer=OptimizerConfig(),
    )

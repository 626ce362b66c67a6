"""The nano model on Python's own library: minutes on two cores, every mechanism on."""

from perilune.models.k3 import presets
from perilune.train.config import DataConfig, OptimizerConfig, Run, Stage


def nano() -> Run:
    """1.2M tokens in two stages: many short pieces first, then contexts eight times as long."""
    return Run(
        model=presets.nano().replace(num_nextn_predict_layers=1),
        data=DataConfig(vocab_size=2048),
        stages=(
            Stage(name="256", context=256, batch_tokens=2048, tokens=900_000, lr=8e-3, lr_end=3e-3),
            Stage(name="2048", context=2048, batch_tokens=2048, tokens=300_000, lr=3e-3, lr_end=1e-4),
        ),
        optimizer=OptimizerConfig(momentum=0.85, adamw_lr=1.2e-2),
    )

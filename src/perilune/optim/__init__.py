"""Optimisation: per-head Muon with AdamW for the rest, QK-clip, learning-rate schedules.

Names load on first use, so that `perilune.optim.schedule` can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.optim.muon import PerHeadMuon
    from perilune.optim.qk_clip import qk_clip_
    from perilune.optim.roles import Blocks, Role, Roles
    from perilune.optim.schedule import LearningRateStage, Schedule

__all__ = ["Blocks", "LearningRateStage", "PerHeadMuon", "Role", "Roles", "Schedule", "qk_clip_"]

_MODULE_OF = {
    "Blocks": "roles",
    "LearningRateStage": "schedule",
    "PerHeadMuon": "muon",
    "Role": "roles",
    "Roles": "roles",
    "Schedule": "schedule",
    "qk_clip_": "qk_clip",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

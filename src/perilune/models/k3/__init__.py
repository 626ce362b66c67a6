"""The K3 family: configuration and presets (no torch), the model, its files."""

from typing import TYPE_CHECKING, Any

from perilune.models.k3 import presets
from perilune.models.k3.config import K3Config

if TYPE_CHECKING:
    from perilune.models.k3.model import K3Model, K3Output

__all__ = ["K3Config", "K3Model", "K3Output", "presets"]


def __getattr__(name: str) -> Any:
    if name in ("K3Model", "K3Output"):  # torch is loaded only when the model is asked for
        from perilune.models.k3 import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

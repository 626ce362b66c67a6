"""Modules that become a subclass of their class, in place: parameters, names and hooks stay, `forward` is another."""

from collections.abc import Iterable

from torch import nn

from perilune.core.errors import ConfigError


def check_forward(modules: Iterable[nn.Module], what: str) -> None:
    """Raises ConfigError for a module whose `forward` hangs on the object: another class would never be asked.

    So it is after `accelerate.dispatch_model`, which `device_map` calls.  what: is to be added to the modules.
    """
    for module in modules:
        if "forward" in vars(module):
            raise ConfigError(
                f"model: expected layers with the forward of their class, got a {type(module).__name__} with one of "
                f"its own, as device_map leaves it; load it on one device, add {what}, then accelerate.dispatch_model"
            )

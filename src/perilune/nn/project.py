"""Linear layers that read the same input, or one alone, as one step of the graph where nobody has changed them."""

import torch
from torch import Tensor, nn

from perilune.nn.hooks import untouched
from perilune.ops import projections


def project(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """`layer(x)` of every one.

    While training, layers that are nothing but a matrix go through `projections`; an adapter, a hook, a bias or a
    sharded weight on any of them, and each is called as it is.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and all(_plain(layer) for layer in layers):
        return projections(x, [layer.weight for layer in layers])  # type: ignore[misc]
    return tuple(layer(x) for layer in layers)


def plain_weights(*modules: nn.Module) -> list[Tensor]:
    """Of layers below these modules that are nothing but a matrix: what a step may cast at once (`cast_once`)."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear))
    return [layer.weight for layer in layers if _plain(layer)]


def _plain(layer: nn.Module) -> bool:
    return untouched(layer, nn.Linear) and layer.bias is None and type(layer.weight) is nn.Parameter

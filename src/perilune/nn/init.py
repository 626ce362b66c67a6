"""Every parameter is initialised on purpose, on any device, after any way of building the module."""

from torch import nn

from perilune.nn.moe import Experts


def initialize_(module: nn.Module, std: float = 0.02) -> None:
    """Draws all parameters of `module` anew: matrices, embeddings and experts from N(0, std), the rest as each says.

    What has a distribution of its own (norms, router, convolution, decay, pseudo-queries, selection bias) draws it in
    its `reset_parameters`.  Works on a module built on the meta device and materialised with `to_empty`.
    """
    if any(p.is_meta for p in module.parameters()):  # no memory yet
        return
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, Experts):
            part.reset_parameters(std)
        elif callable(reset := getattr(part, "reset_parameters", None)):
            reset()

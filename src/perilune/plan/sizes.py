"""How many parameters a model has for each kind of treatment, layer by layer, counted in the model itself."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

import torch

from perilune.models.k3 import K3Config, K3Model
from perilune.optim.roles import Role

STEPS = 5  # of Newton-Schulz


@dataclass
class Share:
    """The parameters of a layer, or of what stands before the first or behind the last."""

    muon: int = 0
    """Of matrices that Muon takes, routed experts left out."""
    experts: int = 0
    """Of routed experts, Muon's too."""
    adamw: int = 0
    orthogonalizing: float = 0.0
    """Operations of Newton-Schulz on all of them, experts left out."""
    orthogonalizing_experts: float = 0.0
    shapes: dict[tuple[int, ...], int] = field(default_factory=lambda: defaultdict(int))
    """Numbers in blocks of one shape, the shorter side first; they are orthogonalized together."""

    @property
    def dense(self) -> int:
        return self.muon + self.adamw

    @property
    def total(self) -> int:
        return self.dense + self.experts

    def __add__(self, other: "Share") -> "Share":
        added = Share(*(getattr(self, name) + getattr(other, name) for name in NUMBERS))
        for shapes in (self.shapes, other.shapes):
            for shape, numbers in shapes.items():
                added.shapes[shape] += numbers
        return added


NUMBERS = ("muon", "experts", "adamw", "orthogonalizing", "orthogonalizing_experts")


@dataclass(frozen=True)
class Sizes:
    first: Share
    """The embedding."""
    layers: tuple[Share, ...]
    last: Share
    """The head, the last norm and mixer, layers that predict further."""

    @property
    def total(self) -> int:
        return sum(share.total for share in (self.first, *self.layers, self.last))


def sizes(config: K3Config) -> Sizes:
    """Every trainable parameter of the model, built on the meta device, under its treatment."""
    with torch.device("meta"):
        roles = K3Model(config).parameter_roles()
    first, last = Share(), Share()
    layers = tuple(Share() for _ in range(config.num_hidden_layers))
    for name, role in roles.items():
        words = name.split(".")
        share = layers[int(words[2])] if words[1] == "layers" else first if words[1] == "embed_tokens" else last
        _count(share, name, role)
    return Sizes(first, layers, last)


def _count(share: Share, name: str, role: Role) -> None:
    if role.kind == "adamw":
        share.adamw += role.param.numel()
        return
    operations = 0.0
    for piece in role.blocks.of(torch.empty(role.param.shape, device="meta")):
        n, m = sorted(piece.shape[-2:])
        share.shapes[n, m] += piece.numel()
        operations += orthogonalizing(n, m) * prod(piece.shape[:-2])
    if ".experts." in name:
        share.experts += role.param.numel()
        share.orthogonalizing_experts += operations
    else:
        share.muon += role.param.numel()
        share.orthogonalizing += operations


def orthogonalizing(n: int, m: int) -> float:
    """Operations on one block: A = X X^T, A A and (b A + c A^2) X in each step (`perilune.optim.newton_schulz`)."""
    return STEPS * (4.0 * n * n * m + 2.0 * n**3)

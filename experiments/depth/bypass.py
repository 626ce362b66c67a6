"""The simple bypass: what a shallow layer's attention gave, through a low-rank projection, into a deeper layer's input.

x_j <- x_j + U V a_i,   V [r, D], U [D, r], zero at the start
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from perilune.models.k3 import K3Model
from perilune.optim.roles import Blocks, Role, Roles


class Bypass(nn.Module):
    """One of them.  `[..., D]` to `[..., D]`."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.down.weight, std=width**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, attention: Tensor) -> Tensor:
        return self.up(self.down(attention))


def add_bypasses(model: K3Model, pairs: Sequence[tuple[int, int]], rank: int) -> nn.ModuleList:
    """Hooks a bypass onto `model` for every (shallow, deep) pair of its layers, which must have the plain residual."""
    assert not pairs or model.model.period is None, "a bypass adds to the running sum"
    made = nn.ModuleList(Bypass(model.config.hidden_size, rank) for _ in pairs)
    taken: dict[int, Tensor] = {}
    layers: Any = model.model.layers
    for bypass, (shallow, deep) in zip(made, pairs):

        def take(module: nn.Module, args: tuple[Any, ...], output: Tensor, i: int = shallow) -> None:
            taken[i] = output

        def give(module: nn.Module, args: tuple[Any, ...], bypass: nn.Module = bypass, i: int = shallow) -> None:
            args[0].add(bypass(taken.pop(i)))

        layers[shallow].self_attn.register_forward_hook(take)
        layers[deep].register_forward_pre_hook(give)
    return made


def roles_of(bypasses: nn.ModuleList) -> Roles:
    """Both matrices of each, whole, to Muon."""
    roles = Roles()
    for name, param in bypasses.named_parameters():
        roles[f"bypass.{name}"] = Role(param, "muon", Blocks())
    return roles

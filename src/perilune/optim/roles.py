"""How each parameter of a model is to be optimised: a table that can be printed and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from perilune.core.errors import ConfigError, ShapeError


@dataclass(frozen=True)
class Blocks:
    """How a tensor [..., n, m] is made of matrices that have nothing to do with each other.

    Leading axes are separate matrices (stacked experts).  The rows are cut into `repeat` equal parts (heads); in a
    part, `interleave` matrices may take turns row by row; each is then cut into pieces of `sizes` rows.

        Blocks()                         the whole matrix, or one for each index of the leading axes
        Blocks(repeat=H)                 H heads
        Blocks((128, 128), repeat=H)     H heads, in each the keys apart from the values
        Blocks((F, F))                   gate and up projection, one above the other
        Blocks(interleave=2)             gate and up projection with alternating rows
        Blocks((F, F), columns=True)     the same cuts across the columns: weights stored [in, out]
    """

    sizes: tuple[int, ...] = ()
    """Rows of each piece; () is one piece."""
    repeat: int = 1
    interleave: int = 1
    columns: bool = False
    """Cut the columns, not the rows."""

    def of(self, tensor: Tensor) -> list[Tensor]:
        """The blocks, as views: for every piece one tensor [..., repeat, interleave, rows, m].

        With `columns` they come transposed.  Raises ShapeError where the cuts do not fit.
        """
        if tensor.dim() < 2:
            raise ShapeError(
                f"blocks: expected a matrix or a stack of them, got {list(tensor.shape)}; give it to AdamW"
            )
        x = tensor.mT if self.columns else tensor
        rows, turns = x.shape[-2], self.repeat * self.interleave
        if turns < 1 or rows % turns or (self.sizes and sum(self.sizes) != rows // turns):
            raise ShapeError(
                f"blocks: expected cuts that add up to {rows} {'columns' if self.columns else 'rows'}, got {self}; "
                "count the heads and pieces again"
            )
        x = x.unflatten(-2, (self.repeat, rows // turns, self.interleave)).transpose(-3, -2)
        return list(x.split(self.sizes, dim=-2)) if self.sizes else [x]

    def describe(self, tensor: Tensor) -> str:
        """For example `96 x [128, 512] + 96 x [128, 512]`."""
        pieces = [(piece.shape[:-2].numel(), list(piece.shape[-2:])) for piece in self.of(_shape_of(tensor))]
        return " + ".join(f"{count} x {shape}" if count > 1 else f"{shape}" for count, shape in pieces)


@dataclass(frozen=True, eq=False)
class Role:
    """What the optimiser does with one parameter."""

    param: Tensor
    kind: Literal["muon", "adamw"]
    blocks: Blocks = Blocks()
    """The matrices in it, for Muon."""
    weight_decay: bool = True
    lr_scale: float = 1.0
    """Factor on the learning rate."""

    def __post_init__(self) -> None:
        if self.kind not in ("muon", "adamw"):
            raise ConfigError(f"kind: expected 'muon' or 'adamw', got {self.kind!r}; choose one of them")
        if self.kind == "muon":
            self.blocks.of(_shape_of(self.param))


def _shape_of(tensor: Tensor) -> Tensor:
    """A tensor without data of the same shape; for a DTensor the whole shape."""
    return torch.empty(tensor.shape, device="meta")


class Roles(dict[str, Role]):
    """The roles of a model's parameters by name, in the model's order."""

    @classmethod
    def match(cls, module: nn.Module, muon: Mapping[str, Blocks], decay: tuple[str, ...] = ()) -> "Roles":
        """Roles from name patterns (`*` and `?`), for a model that brings none.

        The first pattern of `muon` that fits gives a parameter to Muon, with weight decay; all others go to AdamW,
        without it unless a pattern of `decay` fits.  Raises ConfigError for a pattern that fits nothing.
        """
        roles, used = cls(), set()
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            pattern = next((p for p in muon if fnmatchcase(name, p)), None)
            if pattern is not None:
                roles[name] = Role(param, "muon", muon[pattern])
                used.add(pattern)
                continue
            decaying = [p for p in decay if fnmatchcase(name, p)]
            roles[name] = Role(param, "adamw", weight_decay=bool(decaying))
            used.update(decaying)
        for pattern in (*muon, *decay):
            if pattern not in used:
                raise ConfigError(f"{pattern}: expected to match a parameter, got none left; mend it or its order")
        return roles

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """Rows of name, shape, treatment, blocks, decay."""
        return [
            (
                name,
                str(list(role.param.shape)),
                role.kind if role.lr_scale == 1 else f"{role.kind}, lr x {role.lr_scale:g}",
                role.blocks.describe(role.param) if role.kind == "muon" else "",
                "decay" if role.weight_decay else "",
            )
            for name, role in self.items()
        ]

    def check(self, module: nn.Module) -> None:
        """Raises ConfigError unless every trainable parameter of `module` is here once, and nothing else is."""
        names = {id(param): name for name, param in module.named_parameters() if param.requires_grad}
        buffers = {id(buffer): name for name, buffer in module.named_buffers()}
        seen: dict[int, str] = {}
        for name, role in self.items():
            key = id(role.param)
            if key in buffers:
                raise ConfigError(f"{name}: expected a parameter, got the buffer {buffers[key]}; drop its role")
            if key not in names:
                raise ConfigError(f"{name}: expected a trainable parameter of the model, got another; drop its role")
            if key in seen:
                raise ConfigError(
                    f"{name}: expected one role for each parameter, got {seen[key]} too; drop one of them"
                )
            seen[key] = name
        missing = [name for key, name in names.items() if key not in seen]
        if missing:
            raise ConfigError(f"{missing[0]}: expected a role, got none ({len(missing)} missing); give it one")

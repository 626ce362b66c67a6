"""Attention residuals around any stack of layers, whole or cut into the stages of a pipeline."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from perilune.core.errors import ConfigError, ShapeError
from perilune.nn.attn_res import Bank, BlockAttnRes, DepthStream, Start, check_bank


class AttnResStack(nn.Module):
    """Layers one after another; each reads a learned mixture over depth instead of what the layer before it returned.

    With f_n what layer n computes, R_n its mixer and S = block_size:

        h_n = R_n(x, b_1, ..., live),   live += f_n(h_n),   y = R(x, b_1, ..., live)      (K3 report, section 2.2)

    where x is the input, b_j the sum of a finished block of S layers and live the sum of the block in the making.

    layers: modules from [..., D] to [..., D].
    hidden_size: D.
    block_size: how many of these layers make a block; 1 for full attention residuals.  From the number of layers on,
        there are two sources, the input and the live sum.
    adds_input: whether a layer returns h + f(h), as whole Transformer layers do, or f(h), as a sublayer.
    start: what mixers do before they have learned: "residual", what the layers did without them, or "mean"
        (`BlockAttnRes`).
    eps: of the mixers' norms.
    bank: in what finished blocks are kept, "bfloat16", "float8" or a `LowRankBank` (`DepthStream`); None: as they are.

    `forward(x, **options)` is x: [..., D] to y: [..., D]; options go to every layer.  As a stage of a pipeline
    (`split`), it takes the stream's sources and returns them as a tuple; the last stage returns y.

    Raises ConfigError for what cannot be stacked, ShapeError for a layer that returns something else than a tensor of
    its input's shape and for a wrong number of sources.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        hidden_size: int,
        block_size: int,
        *,
        adds_input: bool = True,
        start: Start = "residual",
        eps: float = 1e-5,
        bank: Bank | None = None,
    ) -> None:
        super().__init__()
        check_block_size(block_size)
        check_bank(bank)
        if not isinstance(hidden_size, int) or hidden_size < 1:
            raise ConfigError(f"hidden_size: expected the width of the layers, got {hidden_size!r}; give the last axis")
        given = _checked(layers)
        self.block_size = block_size
        self.adds_input = adds_input
        self.first = 0
        """The index of the first of these layers in the whole stack; parameters are named by it."""
        self.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(given)})
        self.mixers = nn.ModuleDict({str(n): BlockAttnRes(hidden_size, eps, start=start) for n in range(len(given))})
        self.output: BlockAttnRes | None = BlockAttnRes(hidden_size, eps, start=start)
        self.bank = bank

    def split(self, starts: Sequence[int]) -> "list[AttnResStack]":
        """The stack as stages of a pipeline, which share its modules and their names; none of them is empty.

        starts: the index of the first layer of each stage but the first, in rising order; they need not be where
            blocks begin.

        A stage gets `DepthStream.depth(block_size, stage.first)` tensors [..., D] from the one before it: finished
        blocks in their order, then the live sum.  Raises ConfigError for other starts.
        """
        edges: list[Any] = [0, *starts, len(self.layers)] if isinstance(starts, Sequence) else [None]
        if self.first or self.output is None:
            raise ConfigError(f"split: expected the whole stack, got a stage from layer {self.first}; split that once")
        if self.bank is not None:
            raise ConfigError("bank: expected none in a stack that is split, got one; stages hand on whole sources")
        if not all(isinstance(edge, int) for edge in edges) or any(a >= b for a, b in pairwise(edges)):
            raise ConfigError(
                f"starts: expected a list of rising ones from 1 to {len(self.layers) - 1}, got {starts!r}; "
                "every stage has a layer"
            )
        return [self._stage(first, last) for first, last in pairwise(edges)]

    def _stage(self, first: int, last: int) -> "AttnResStack":
        stage = AttnResStack.__new__(AttnResStack)
        nn.Module.__init__(stage)
        stage.block_size, stage.adds_input, stage.first = self.block_size, self.adds_input, first
        names = [str(n) for n in range(first, last)]
        stage.layers = nn.ModuleDict({name: self.layers[name] for name in names})
        stage.mixers = nn.ModuleDict({name: self.mixers[name] for name in names})
        stage.output = self.output if last == len(self.layers) else None
        stage.bank = None
        stage.training = self.training
        return stage

    def forward(self, *sources: Tensor, **options: Any) -> Tensor | tuple[Tensor, ...]:
        if self.first == 0 and len(sources) != 1:
            raise ShapeError(f"forward: expected one input by position, got {len(sources)}; give options by name")
        if other := [type(source).__name__ for source in sources if not isinstance(source, Tensor)]:
            raise ShapeError(f"forward: expected tensors, got {other[0]}; unpack what an earlier stage returned")
        stream = DepthStream.resume(sources, self.block_size, self.first, self.bank)
        for name, layer in self.layers.items():
            mixer = self.mixers[name]
            assert isinstance(mixer, BlockAttnRes)
            h = stream.read(mixer)
            version = _changes(h)
            y = layer(h, **options)
            if not isinstance(y, Tensor) or y.shape != h.shape:
                got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
                raise ShapeError(
                    f"layers[{name}]: expected to return a tensor {list(h.shape)} like its input, got {got}; "
                    "wrap it in a module that does"
                )
            if _changes(h) != version:
                raise ShapeError(
                    f"layers[{name}]: expected a layer that leaves its input alone, got one that writes into it; "
                    "let it return a new tensor"
                )
            stream.add(y - h if self.adds_input else y)
        if self.output is not None:
            return stream.mixed(self.output)
        whole = cast("list[Tensor]", stream.sources)  # a stage has no bank of its own
        return tuple(source.view_as(source) for source in whole)  # a stage's outputs are never its inputs

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, adds_input={self.adds_input}, first={self.first}"


def check_block_size(block_size: Any, other: str = "") -> None:
    """Raises ConfigError unless it is a whole number from 1 on; `other`: what else the caller would have taken."""
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ConfigError(
            f"block_size: expected a whole number of layers from 1 on{other}, got {block_size!r}; give, say, 4"
        )


def _changes(x: Tensor) -> int:
    """How often a tensor has been written into, where that is counted."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _checked(layers: Any) -> list[nn.Module]:
    given: list[Any] = list(layers) if isinstance(layers, Sequence | nn.ModuleList | nn.Sequential) else [None]
    if not given or not all(isinstance(layer, nn.Module) for layer in given):
        got = f"a {type(layers).__name__}" if given else "none"
        raise ConfigError(f"layers: expected a list of one or more modules, got {got}; give a list or an nn.ModuleList")
    return given

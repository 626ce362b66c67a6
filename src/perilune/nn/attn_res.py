"""Attention residuals: what a sublayer reads is a learned mixture over depth, not the plain running sum.

A mixer scores every source `v_i` (the embedding, finished blocks, the block in the making) against a learned vector:

    score_i = < w * gamma, v_i / rms(v_i) >,   a = softmax(score),   h = sum_i a_i v_i         (K3 report, section 2.2)
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perilune.nn.norm import RMSNorm
from perilune.ops import attn_res, share_gradient


class BlockAttnRes(nn.Module):
    """One mixer: a pseudo-query and the norm of its keys.

    `sources`: tensors `[..., D]`; returns their mixture `[..., D]`.  The pseudo-query starts at zero, so that training
    begins from the plain mean of the sources.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.query = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        return attn_res(self.query, sources, self.norm.weight, eps=self.norm.eps)


class DepthStream:
    """The residual stream of one forward pass: what sublayers read from and add to.

    `period` is the number of sublayers in a block (attention and feed-forward count one each): 2S for K3's blocks of S
    layers, 1 for full attention residuals, None for the plain residual x + f(x).

    A sublayer reads the mixture over the finished blocks and the live sum; where a block begins, the live sum is
    finished right after that read.  The embedding is thus the first finished source and part of no block.
    """

    def __init__(self, embedding: Tensor, period: int | None) -> None:
        self.period = period
        self.dtype = embedding.dtype
        self.bank: list[Tensor] = []
        self._live: Tensor | None = embedding
        self._reads = 0

    @property
    def live(self) -> Tensor:
        """The running sum of the block in the making."""
        assert self._live is not None, "a block begins with a read followed by an add"
        return self._live

    def read(self, mixer: BlockAttnRes | None) -> Tensor:
        """The next sublayer's input."""
        h = self.mixed(mixer)
        if self.period is not None and self._reads % self.period == 0:
            self.bank.append(share_gradient(self.live))  # every later mixer reads it
            self._live = None
        self._reads += 1
        return h

    def add(self, output: Tensor) -> None:
        """Takes the sublayer's output into the live sum, which keeps the embedding's dtype under autocast too."""
        output = output.to(self.dtype)
        self._live = output if self._live is None else self._live + output

    def mixed(self, mixer: BlockAttnRes | None) -> Tensor:
        """The mixture over everything so far; the live sum itself where there is no mixer."""
        return self.live if mixer is None else mixer([*self.bank, self.live])

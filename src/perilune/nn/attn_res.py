"""Attention residuals: what a sublayer reads is a learned mixture over depth, not the plain running sum.

A mixer scores every source `v_i` (the embedding, finished blocks, the block in the making) against a learned vector:

    score_i = < w * gamma, v_i / rms(v_i) >,   a = softmax(score),   h = sum_i a_i v_i         (K3 report, section 2.2)
"""

from collections.abc import Sequence
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from perilune.core.errors import ConfigError, ShapeError
from perilune.nn.hooks import untouched
from perilune.nn.norm import RMSNorm
from perilune.ops import attn_res, share_gradient

Start = Literal["mean", "residual"]


class BlockAttnRes(nn.Module):
    """One mixer: a pseudo-query and the norm of its keys.

    `sources`: N tensors `[..., D]`; returns their mixture `[..., D]`.  The pseudo-query starts at zero, where all
    weights are 1/N, so that training begins from

        start="mean":      h = sum_i a_i v_i      the plain mean of the sources, as in the papers
        start="residual":  h = N sum_i a_i v_i    their sum: of a depth stream, the plain residual x + f(x) itself

    A norm behind the mixer takes the factor N out again, up to its eps: the two are one function of the sources, and
    differ in nothing but what a sublayer without a norm reads.

    Raises ConfigError for another start.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, start: Start = "mean") -> None:
        super().__init__()
        if start not in get_args(Start):
            raise ConfigError(f"start: expected 'mean' or 'residual', got {start!r}; for trained weights 'residual'")
        self.start = start
        self.norm = RMSNorm(hidden_size, eps)
        self.query = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(
        self, sources: Sequence[Tensor], norm: RMSNorm | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The mixture; with a norm behind it, what that makes of it, in `dtype` as `RMSNorm` has it, in one step where
        nobody has changed the norm."""
        times = 1 if self.start == "mean" else len(sources)
        if norm is not None and untouched(norm, RMSNorm):
            return attn_res(
                self.query, sources, self.norm.weight, eps=self.norm.eps,
                norm_weight=norm.weight, norm_eps=norm.eps / times**2, dtype=dtype,
            )  # fmt: skip
        h = attn_res(self.query, sources, self.norm.weight, eps=self.norm.eps)
        h = h if times == 1 else h * times
        return h if norm is None else norm(h, dtype)

    def extra_repr(self) -> str:
        return f"{self.query.shape[0]}, start={self.start!r}"


class DepthStream:
    """The residual stream of one forward pass: what sublayers read from and add to.

    `period` is the number of sublayers in a block (attention and feed-forward count one each): 2S for K3's blocks of S
    layers, 1 for full attention residuals, None for the plain residual x + f(x).

    A sublayer reads the mixture over the finished blocks and the live sum; where a block begins, the live sum is
    finished right after that read.  The embedding is thus the first finished source and part of no block.

    Between sublayers a stream is its `sources`, finished blocks and live sum: tensors, which may be handed to another
    function or another process, where `resume` goes on.
    """

    def __init__(self, embedding: Tensor, period: int | None) -> None:
        self.period = period
        self.dtype = embedding.dtype
        self.bank: list[Tensor] = []
        self._live: Tensor | None = embedding
        self._reads = 0

    @classmethod
    def resume(cls, sources: Sequence[Tensor], period: int | None, reads: int) -> Self:
        """Goes on from the `sources` of a stream of this period after `reads` reads and as many adds.

        Raises ShapeError if they are not as many as such a stream has (`depth`).
        """
        if len(sources) != (depth := cls.depth(period, reads)):
            raise ShapeError(
                f"sources: expected {depth} of them before sublayer {reads} in blocks of {period}, got {len(sources)}; "
                "hand over all sources of the stream, in their order"
            )
        stream = cls(sources[-1], period)
        stream.bank = [share_gradient(source) for source in sources[:-1]]
        stream._reads = reads
        return stream

    @staticmethod
    def depth(period: int | None, reads: int) -> int:
        """How many sources there are after so many reads and adds; the next read mixes as many."""
        return 1 if period is None else 1 + -(-reads // period)

    @property
    def sources(self) -> list[Tensor]:
        """The finished blocks in their order, and the live sum."""
        return [*self.bank, self.live]

    @property
    def live(self) -> Tensor:
        """The running sum of the block in the making."""
        assert self._live is not None, "a block begins with a read followed by an add"
        return self._live

    def read(self, mixer: BlockAttnRes | None, norm: RMSNorm | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The next sublayer's input, behind its norm if given one; dtype: what is wanted of the norm."""
        h = self.mixed(mixer, norm, dtype)
        if self.period is not None and self._reads % self.period == 0:
            self.bank.append(share_gradient(self.live))  # every later mixer reads it
            self._live = None
        self._reads += 1
        return h

    def add(self, output: Tensor) -> None:
        """Takes the sublayer's output into the live sum, which keeps the embedding's dtype under autocast too."""
        if self._live is None or torch.promote_types(self.dtype, output.dtype) != self.dtype:
            output = output.to(self.dtype)
        self._live = output if self._live is None else self._live + output  # which casts as it reads

    def mixed(
        self, mixer: BlockAttnRes | None, norm: RMSNorm | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The mixture over everything so far; the live sum itself where there is no mixer.  norm, dtype: as `read`."""
        if mixer is not None:
            return mixer(self.sources, norm, dtype)
        return self.live if norm is None else norm(self.live, dtype)

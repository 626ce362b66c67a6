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
from perilune.ops import Stored, attn_res, project_source, share_gradient, store_source
from perilune.ops.attn_res.stored import Form, check_form

Start = Literal["mean", "residual"]


class BlockAttnRes(nn.Module):
    """One mixer: a pseudo-query and the norm of its keys.

    `sources`: N tensors `[..., D]`, or what a bank keeps of them (`Stored`); returns their mixture `[..., D]`.  The
    pseudo-query starts at zero, where all weights are 1/N, so that training begins from

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
        self, sources: Sequence[Tensor | Stored], norm: RMSNorm | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The mixture; with a norm behind it, what that makes of it, in `dtype` as `RMSNorm` has it."""
        times = 1 if self.start == "mean" else len(sources)
        if norm is not None and _in_one_step(self, norm):
            return attn_res(
                self.query, sources, self.norm.weight, eps=self.norm.eps,
                norm_weight=norm.weight, norm_eps=norm.eps / times**2, dtype=dtype,
            )  # fmt: skip
        h = attn_res(self.query, sources, self.norm.weight, eps=self.norm.eps)
        h = h if times == 1 else h * times
        return h if norm is None else norm(h, dtype)

    def extra_repr(self) -> str:
        return f"{self.query.shape[0]}, start={self.start!r}"


def _in_one_step(mixer: BlockAttnRes, norm: RMSNorm) -> bool:
    """Whether one kernel makes the mixture's norm; in plain torch the norm's own form keeps less, and an altered norm
    is called."""
    return mixer.query.is_cuda and untouched(norm, RMSNorm)


class LowRankBank(nn.Module):
    """Keeps a finished block v `[..., D]` as v A, `[..., rank]`, and has mixers read v A B.

    A is an orthonormal basis and B its transpose: at first one drawn at random, with `fit` the one that loses least.

    learned: whether B is a parameter.  A is none: for its gradient every v would have to be kept.

    Raises ConfigError for a rank that is not from 1 to hidden_size.
    """

    down: Tensor

    def __init__(self, hidden_size: int, rank: int, *, learned: bool = True) -> None:
        super().__init__()
        if not isinstance(rank, int) or not 1 <= rank <= hidden_size:
            raise ConfigError(f"rank: expected from 1 to hidden_size ({hidden_size}), got {rank!r}; give, say, a half")
        self.register_buffer("down", torch.empty(hidden_size, rank))
        self.up = nn.Parameter(torch.empty(rank, hidden_size), requires_grad=learned)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self._take(nn.init.orthogonal_(torch.empty(self.down.shape, device=self.down.device)))

    @torch.no_grad()
    def fit(self, blocks: Tensor) -> None:
        """Takes the directions in which `blocks` `[..., D]`, finished sources of some tokens, are largest.

        They are the eigenvectors of the mean of v v^T; rows count alike, however large they are.
        """
        v = blocks.flatten(0, -2).double()
        v = v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        self._take(torch.linalg.eigh(v.T @ v).eigenvectors[:, -self.down.shape[1] :])  # in rising order

    @torch.no_grad()
    def _take(self, basis: Tensor) -> None:
        self.down.copy_(basis)
        self.up.copy_(basis.T)

    def forward(self, source: Tensor) -> Stored:
        return project_source(source, self.down, self.up)

    def extra_repr(self) -> str:
        return f"{self.down.shape[0]}, rank={self.down.shape[1]}, learned={self.up.requires_grad}"


Bank = Form | LowRankBank


def check_bank(bank: Bank | None) -> None:
    """Raises ConfigError for what a stream cannot keep its finished blocks in."""
    if bank is not None and not isinstance(bank, LowRankBank):
        check_form(bank)


class DepthStream:
    """The residual stream of one forward pass: what sublayers read from and add to.

    `period` is the number of sublayers in a block (attention and feed-forward count one each): 2S for K3's blocks of S
    layers, 1 for full attention residuals, None for the plain residual x + f(x).

    A sublayer reads the mixture over the finished blocks and the live sum; where a block begins, the live sum is
    finished right after that read.  The embedding is thus the first finished source and part of no block.

    Between sublayers a stream is its `sources`, finished blocks and live sum: tensors, which may be handed to another
    function or another process, where `resume` goes on.

    `bank`: in what finished blocks, the embedding among them, are kept: as they are (None), "bfloat16", "float8" with a
    scale a row (`store_source`), or a `LowRankBank`.  The read where a block begins is the first that sees the finished
    one so; the live sum, and the last block, are never rounded.
    """

    def __init__(self, embedding: Tensor | Stored, period: int | None, bank: Bank | None = None) -> None:
        check_bank(bank)
        self.period = period
        self.dtype = embedding.dtype
        self.bank: list[Tensor | Stored] = []
        self._keep_as = bank
        self._live: Tensor | Stored | None = embedding
        self._reads = 0

    @classmethod
    def resume(
        cls, sources: Sequence[Tensor | Stored], period: int | None, reads: int, bank: Bank | None = None
    ) -> Self:
        """Goes on from the `sources`, or the `handed_over` ones, of a stream of this period and bank after `reads`
        reads and as many adds.

        Raises ShapeError if they are not as many as such a stream has (`depth`).
        """
        if len(sources) != (depth := cls.depth(period, reads)):
            raise ShapeError(
                f"sources: expected {depth} of them before sublayer {reads} in blocks of {period}, got {len(sources)}; "
                "hand over all sources of the stream, in their order"
            )
        stream = cls(sources[-1], period, bank)
        stream.bank = [x if isinstance(x, Stored) else share_gradient(x) for x in sources[:-1]]
        stream._reads = reads
        return stream

    @staticmethod
    def depth(period: int | None, reads: int) -> int:
        """How many sources there are after so many reads and adds; the next read mixes as many."""
        return 1 if period is None else 1 + -(-reads // period)

    @property
    def sources(self) -> list[Tensor | Stored]:
        """The finished blocks in their order, and the live sum."""
        return [*self.bank, self._sum]

    def handed_over(self) -> list[Tensor | Stored]:
        """The sources for a stretch of sublayers that follows; a complete block already as the bank keeps it."""
        if self._complete:
            self._live = self._kept()
        return self.sources

    @property
    def live(self) -> Tensor:
        """The running sum of the block in the making."""
        return self._sum.read() if isinstance(self._sum, Stored) else self._sum

    @property
    def like(self) -> Tensor:
        """A tensor of the live sum's shape, dtype and device, for whoever asks for no more."""
        return self._sum.like if isinstance(self._sum, Stored) else self._sum

    @property
    def _sum(self) -> Tensor | Stored:
        assert self._live is not None, "a block begins with a read followed by an add"
        return self._live

    @property
    def _complete(self) -> bool:
        """Whether the next read is the one at which the live sum is finished."""
        return self.period is not None and self._reads % self.period == 0

    def _kept(self) -> Tensor | Stored:
        """The live sum as the bank keeps it."""
        live, bank = self._sum, self._keep_as
        if bank is None or isinstance(live, Stored) or (bank == "bfloat16" and live.element_size() <= 2):
            return live
        return bank(live) if isinstance(bank, LowRankBank) else store_source(live, bank)

    def read(self, mixer: BlockAttnRes | None, norm: RMSNorm | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The next sublayer's input, behind its norm if given one; dtype: what is wanted of the norm."""
        begins = self._complete
        if begins:
            self._live = self._kept()
        h = self.mixed(mixer, norm, dtype)
        if begins:
            live = self._sum
            self.bank.append(live if isinstance(live, Stored) else share_gradient(live))  # every later mixer reads it
            self._live = None
        self._reads += 1
        return h

    def add(self, output: Tensor) -> None:
        """Takes the sublayer's output into the live sum, which keeps the embedding's dtype under autocast too."""
        if self._live is None or torch.promote_types(self.dtype, output.dtype) != self.dtype:
            output = output.to(self.dtype)
        self._live = output if self._live is None else self.live + output  # which casts as it reads

    def mixed(
        self, mixer: BlockAttnRes | None, norm: RMSNorm | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The mixture over everything so far; the live sum itself where there is no mixer.  norm, dtype: as `read`."""
        if mixer is not None:
            return mixer(self.sources, norm, dtype)
        return self.live if norm is None else norm(self.live, dtype)

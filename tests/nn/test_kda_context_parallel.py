"""KDA layers whose rows are cut over ranks: outputs and all gradients are those of one process, in float64.

Three processes are started once; every case is run on groups of two and three of them.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from perilune.core.errors import ShapeError
from perilune.nn import KimiDeltaAttention
from ranks import one_rank, run_ranks

f64 = torch.float64
D, H, K, T = 20, 3, 8, 36  # borders at 18; at 12 and 24
GROUPS = ([2, 0], [0, 1, 2])  # also in another order than the processes'
PACKS: dict[str, list[int] | None] = {
    "batch of two": None,
    "one document": [0, 36],
    "documents over borders": [0, 7, 31, 36],
    "ends at borders, empty documents": [0, 0, 12, 12, 18, 24, 36, 36],
    "shorter than a window": [0, 10, 11, 13, 17, 19, 22, 25, 26, 36],
}
KINDS = ((-5.0, True), (None, False))
Ranks = tuple[dist.ProcessGroup, int, int]  # the group, the rank in it, the number of ranks


class Stack(nn.Module):
    """Two layers on a residual: what one exchanges is read by the other."""

    def __init__(self, g_min: float | None, full_rank_gate: bool, dtype: torch.dtype = f64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            KimiDeltaAttention(D, H, K, g_min=g_min, full_rank_gate=full_rank_gate) for _ in range(2)
        )
        for name, p in self.named_parameters():
            nn.init.normal_(p, 1.0 if "o_norm" in name else -4.0 if "dt_bias" in name else 0.0, 0.3)  # slow decay
        self.to(dtype)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: list[int] | Tensor | None = None,
        group: dist.ProcessGroup | None = None,
        recomputed: bool = False,
    ) -> Tensor:
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if recomputed else layer
            x = x + run(x, cu_seqlens=cu_seqlens, group=group)
        return x


def rows(case: str) -> tuple[Tensor, Tensor]:
    """Inputs, and what comes back to the outputs: [B, T, D]."""
    draw = torch.Generator().manual_seed(len(case))
    B = 2 if PACKS[case] is None else 1
    return tuple(torch.randn(B, T, D, generator=draw, dtype=f64) for _ in range(2))


def tokens_of(rank: int, P: int) -> slice:
    return slice(rank * (T // P), (rank + 1) * (T // P))


def results(m: Stack, x: Tensor, dy: Tensor, *args, **options) -> dict[str, Tensor]:
    leaf, named = x.clone().requires_grad_(), dict(m.named_parameters())
    y = m(leaf, *args, **options)
    return {"y": y.detach(), **dict(zip(["x", *named], torch.autograd.grad((y * dy).sum(), [leaf, *named.values()])))}


def assert_one_process(got: dict[str, Tensor], want: dict[str, Tensor], ranks: Ranks, what: str) -> None:
    group, rank, P = ranks
    here = tokens_of(rank, P)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        if name in ("y", "x"):
            expected = expected[:, here]
        else:
            dist.all_reduce(got[name], group=group)
        off = (got[name] - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert off <= 1e-10, f"{name} on rank {rank} of {P}, {what}: off by {off:.1e}"  # and not NaN
        assert expected.abs().max() > 0, name


def check_outputs_and_gradients(ranks: Ranks) -> None:
    group, rank, P = ranks
    here = tokens_of(rank, P)
    for kind in KINDS:
        m = Stack(*kind)
        for case, cu in PACKS.items():
            x, dy = rows(case)
            want = results(m, x, dy, cu)
            given = None if cu is None else torch.tensor(cu) if rank else cu  # as they come
            for recomputed in (False, True):
                got = results(m, x[:, here], dy[:, here], given, group, recomputed)
                assert_one_process(got, want, ranks, f"{case}, g_min={kind[0]}, recomputed: {recomputed}")


def check_a_rank_without_loss(ranks: Ranks) -> None:
    group, rank, P = ranks
    here = tokens_of(rank, P)
    m, (x, dy) = Stack(-5.0, True), rows("one document")
    dy[:, : T // max(P, 2)] = 0  # the first rank's
    want = results(m, x, dy, PACKS["one document"])
    assert_one_process(results(m, x[:, here], dy[:, here], [0, T], group), want, ranks, "no loss on one rank")


def check_without_gradients(ranks: Ranks) -> None:
    """In inference mode and in bfloat16: as near to float64 as one process."""
    group, rank, P = ranks
    here = tokens_of(rank, P)
    for case, cu in PACKS.items():
        x = rows(case)[0]
        for dtype in (f64, torch.bfloat16):
            m, narrow = Stack(-5.0, True, dtype), x.to(dtype)
            with torch.inference_mode():
                exact, alone = Stack(-5.0, True)(narrow.double(), cu), m(narrow, cu)
                y = m(narrow[:, here], cu, group)
            assert y.dtype == dtype
            allowed = 1e-10 + 2 * (alone.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
            assert (y.double() - exact[:, here]).abs().max() <= allowed, f"{case} in {dtype} on rank {rank} of {P}"


def check_what_does_not_fit(ranks: Ranks) -> None:
    group, _, P = ranks
    m, x = KimiDeltaAttention(D, H, K), torch.randn(1, T // P, D)
    for call, message in (
        (lambda: m(x, cache=m.new_cache(1), group=group), "cache: expected none beside group, got both; .*"),
        (lambda: m(x, cu_seqlens=[0, T - 1], group=group), rf"cu_seqlens: expected last entry {T} \(T\), got {T - 1}"),
        (
            lambda: m(x, cu_seqlens=[0, T], group=dist.GroupMember.NON_GROUP_MEMBER),
            "group: expected one that this process is in",
        ),
    ):
        with pytest.raises(ShapeError, match=message):
            call()


CHECKS = (check_outputs_and_gradients, check_a_rank_without_loss, check_without_gradients, check_what_does_not_fit)


def run_rank(rank: int, ranks: int) -> None:
    groups = [dist.new_group(members, sort_ranks=False) for members in GROUPS]
    for members, group in zip(GROUPS, groups):
        if rank in members:
            for check in CHECKS:
                check((group, dist.get_rank(group), len(members)))


@pytest.mark.slow
def test_ranks_together_are_one_process(tmp_path: Path) -> None:
    run_ranks(3, tmp_path, run_rank)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with one_rank(tmp_path):
        yield


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_is_no_group() -> None:
    group = dist.group.WORLD
    for check in CHECKS:
        check((group, 0, 1))
    m, (x, dy) = Stack(-5.0, True), rows("documents over borders")
    cu = PACKS["documents over borders"]
    assert all(a.equal(b) for a, b in zip(results(m, x, dy, cu, group).values(), results(m, x, dy, cu).values()))

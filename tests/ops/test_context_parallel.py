"""Context parallelism: a row cut over ranks gives what one process gives; the ranks are processes of this machine.

Four processes are started once.  Every case is run on groups of one to four of them, in float64, against the float64
recurrence over the whole row: outputs and gradients for each head on each rank, states for each document.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from perilune.core.errors import ShapeError
from perilune.ops import BoundedGate, SoftplusGate, kda, kda_context_parallel, short_conv, short_conv_context_parallel
from perilune.ops.shards import Shard, cut
from ranks import one_rank, run_ranks

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
T = 48  # borders at 24; 16, 32; 12, 24, 36
PACKS: dict[str, list[int] | None] = {
    "batch of two": None,
    "one document": [0, 48],
    "ends at borders": [0, 12, 16, 24, 32, 36, 48],
    "no document crosses": [0, 5, 12, 16, 24, 32, 36, 40, 48],
    "a document over all borders, one token on the first rank": [0, 11, 37, 48],
    "one-token documents at borders": [0, 1, 11, 12, 13, 15, 16, 17, 23, 24, 25, 47, 48],
    "empty documents at both ends and at borders": [0, 0, 12, 12, 12, 24, 24, 30, 30, 48, 48],
    "several documents on every rank": [0, 3, 8, 14, 21, 26, 31, 38, 44, 48],
    "documents shorter than the window at borders": [0, 10, 14, 22, 25, 31, 33, 34, 37, 48],
    "a tail of padding": [0, 9, 41, 48],
}
GROUPS = ([0], [1, 3], [0, 2, 3], [0, 1, 2, 3])  # also of ranks whose numbers differ from those in the group


# Rows, and what one process makes of them


def row(cu: list[int] | None, kind: str = "random", HV: int = 3, H: int = 3, K: int = 6, V: int = 10) -> dict[str, Any]:
    """Inputs of the whole row in float64; head 0 never forgets, head 1 hardly, head 2 at once and at random."""
    B, N = (2, 2) if cu is None else (1, len(cu) - 1)
    draw = torch.Generator().manual_seed(sum(map(ord, kind)) + N)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=f64)

    z = randn(B, T, HV, K)
    g = -5 * z.sigmoid()
    g[:, :, 0], g[:, :, 1] = 0, -10 / T
    x = {
        "q": normalize(randn(B, T, H, K), dim=-1),
        "k": normalize(randn(B, T, H, K), dim=-1),
        "v": randn(B, T, HV, V),
        "g": g,
        "beta": randn(B, T, HV).sigmoid(),
        "initial": 0.5 * randn(N, HV, K, V),
    }
    if kind in ("bounded", "softplus"):
        x |= {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "g": z, "beta": randn(B, T, HV)}
        x |= {"A_log": torch.tensor([-2.0, 0.0, 2.0], dtype=f64), "dt_bias": randn(HV, K)}
    return x


def upstream(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return tuple(torch.randn(x[name].shape, generator=draw, dtype=f64) for name in ("v", "initial"))


def options_of(kind: str, x: dict[str, Tensor]) -> dict[str, Any]:
    if kind not in ("bounded", "softplus"):
        return {"scale": 0.3}
    gate = (BoundedGate if kind == "bounded" else SoftplusGate)(x["A_log"], x["dt_bias"])
    return {"gate": gate, "normalize_qk": True, "beta_logits": True}


def call(
    fn: Callable[..., tuple[Tensor, Tensor | None]],
    x: dict[str, Tensor],
    do: Tensor,
    dstate: Tensor | None,
    kind: str = "random",
    **options: Any,
) -> dict[str, Tensor]:
    """o, the states, and the gradient of every input."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    o, state = fn(
        *(leaves[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=leaves.get("initial"),
        output_final_state=dstate is not None,
        **options_of(kind, leaves),
        **options,
    )
    loss = (o * do).sum() + (0 if dstate is None else (state * dstate).sum())
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    result = {"o": o.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads)}}
    return result if state is None else result | {"state": state.detach()}


TOKENS = ("q", "k", "v", "g", "beta", "o", "dq", "dk", "dv", "dg", "dbeta")


def on_rank(whole: dict[str, Tensor], shard: Shard, P: int) -> dict[str, Tensor]:
    """A rank's part of inputs or results of the whole row."""
    states = {"initial": shard.begins, "dinitial": shard.begins, "state": shard.ends}
    here = tokens_of(shard.rank, P)
    return {n: x[:, here] if n in TOKENS else x[states[n]] if n in states else x for n, x in whole.items()}


def tokens_of(rank: int, P: int) -> slice:
    return slice(rank * (T // P), (rank + 1) * (T // P))


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], where: str, tolerance: float = 1e-10) -> None:
    """Head by head: the worst difference over the largest value of that head, or 1 where that is smaller."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].shape == expected.shape, f"{name} on {where}: {got[name].shape}, not {expected.shape}"
        dim = {"state": 1, "dinitial": 1, "dA_log": 0, "ddt_bias": 0}.get(name, 2)
        for head, (a, b) in enumerate(zip(got[name].double().unbind(dim), expected.unbind(dim))):
            scale = max(1.0, b.abs().max().item() if b.numel() else 0)
            difference = (a - b).abs().max().item() / scale if b.numel() else 0
            assert difference <= tolerance, f"{name} of head {head} on {where}: off by {difference:.1e}"  # and not NaN


# What every rank does, alike on all of a group

Ranks = tuple[dist.ProcessGroup, int, int]  # the group, the rank in it, the number of ranks


@cache
def by_one_process(case: str, kind: str, states: bool, **shape: int) -> tuple[dict[str, Tensor], ...]:
    """Inputs, what comes back to the outputs, and the results; the same for every group."""
    cu = PACKS[case]
    whole = row(cu, kind, **shape)
    do, dstate = upstream(whole)
    if not states:
        del whole["initial"]
    want = call(kda, whole, do, dstate if states else None, kind, cu_seqlens=cu, backend="reference")
    return whole, {"o": do, "state": dstate}, want


def check_kda(ranks: Ranks, case: str, kind: str, *, states: bool, **shape: int) -> None:
    group, rank, P = ranks
    cu = PACKS[case]
    whole, back, want = by_one_process(case, kind, states, **shape)
    shard = cut(cu, len(back["o"]), T // P, rank, P)
    here, back = on_rank(whole, shard, P), on_rank(back, shard, P)
    dstate = back["state"] if states else None
    got = call(kda_context_parallel, here, back["o"], dstate, kind, cu_seqlens=cu, group=group)
    if kind in ("bounded", "softplus"):
        for name in ("dA_log", "ddt_bias"):
            dist.all_reduce(got[name], group=group)
    assert_close(got, on_rank(want, shard, P), f"rank {rank} of {P}, {case}, {kind}")


def check_every_pack(ranks: Ranks) -> None:
    for case in PACKS:
        check_kda(ranks, case, "random", states=True)


def check_kinds(ranks: Ranks) -> None:
    for kind in ("bounded", "softplus"):
        for case in ("batch of two", "a tail of padding"):
            check_kda(ranks, case, kind, states=False)
    check_kda(ranks, "a tail of padding", "three value heads to one of q", states=True, H=2, HV=6)
    check_kda(ranks, "a tail of padding", "K > V", states=True, K=9, V=4)
    check_kda(ranks, "one document", "smallest", states=True, H=2, HV=2, K=1, V=1)


def check_precision(ranks: Ranks) -> None:
    """In float32 and bf16 a cut costs no more than a few roundings of one process."""
    group, rank, P = ranks
    cu = [0, 7, 45, 48]
    for dtype in (f32, bf16):
        whole = {name: x.to(f32 if name == "initial" else dtype) for name, x in row(cu).items()}
        do, dstate = upstream(whole)
        exact = call(kda, {n: x.double() for n, x in whole.items()}, do.to(dtype).double(), dstate, cu_seqlens=cu)
        plain = call(kda, whole, do.to(dtype), dstate.float(), cu_seqlens=cu)
        shard = cut(cu, 1, T // P, rank, P)
        here = on_rank(whole, shard, P)
        back = do[:, tokens_of(rank, P)].to(dtype), dstate[shard.ends].float()
        got = call(kda_context_parallel, here, *back, cu_seqlens=cu, group=group)
        wanted = on_rank(exact, shard, P)
        for name, x in got.items():
            assert x.dtype == plain[name].dtype, name
            allowed = 3 * (plain[name].double() - exact[name]).abs().max()
            allowed += torch.finfo(dtype).eps * exact[name].abs().max()
            difference = (x.double() - wanted[name]).abs()
            assert not x.numel() or difference.max() <= allowed, f"{name} in {dtype} on rank {rank} of {P}"


def check_nothing_leaks(ranks: Ranks) -> None:
    """Changing a document, be it to NaN, leaves the others' outputs and gradients as they are to the bit."""
    group, rank, P = ranks
    here = tokens_of(rank, P)
    for cu in ([0, 14, 34, 48], [0, 12, 36, 48]):
        clean = row(cu)
        clean["g"] = torch.full_like(clean["g"], -0.001)
        shard = cut(cu, 1, T // P, rank, P)
        outcomes = []
        for value in (None, torch.nan):
            x = {name: t.clone() for name, t in clean.items()}
            do, dstate = upstream(x)
            if value is not None:
                for name in ("q", "k", "v", "beta"):
                    x[name][:, cu[1] : cu[2]] = value
                x["initial"][1] = do[:, cu[1] : cu[2]] = dstate[1] = value
            back = do[:, here], dstate[shard.ends]
            outcomes.append(call(kda_context_parallel, on_rank(x, shard, P), *back, cu_seqlens=cu, group=group))
        token = torch.arange(T)[here]
        other = (token < cu[1]) | (token >= cu[2])
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            a, b = (outcome[name][:, other] for outcome in outcomes)
            assert a.isfinite().all(), f"{name} on rank {rank} of {P}"
            assert torch.equal(a, b), f"{name} on rank {rank} of {P}"


def check_a_rank_without_loss(ranks: Ranks) -> None:
    """It takes part nevertheless: nobody waits, and the others' gradients are those of one process."""
    group, rank, P = ranks
    cu = torch.tensor([0, T])
    whole = row([0, T])
    do, _ = upstream(whole)
    silent = tokens_of(P // 2, P)  # in the middle; what the others lose passes through it
    do[:, silent] = 0
    want = call(kda, whole, do, None, cu_seqlens=cu)
    shard = cut(cu, 1, T // P, rank, P)
    here = on_rank(whole, shard, P)
    got = call(kda_context_parallel, here, do[:, tokens_of(rank, P)], None, cu_seqlens=cu, group=group)
    assert_close(got, on_rank(want, shard, P), f"rank {rank} of {P}, no loss on one rank")
    with torch.inference_mode():
        x = (here[name] for name in ("q", "k", "v", "g", "beta"))
        o, state = kda_context_parallel(*x, initial_state=here["initial"], scale=0.3, cu_seqlens=cu, group=group)
    assert state is None
    assert torch.equal(o, got["o"]), "inference"  # and the same to the bit every time


def check_autocast(ranks: Ranks) -> None:
    """It has no say: everything is as without it, to the bit."""
    group, rank, P = ranks
    whole = {name: x.float() for name, x in row([0, T]).items()}
    here = on_rank(whole, cut([0, T], 1, T // P, rank, P), P)
    do = upstream(whole)[0][:, tokens_of(rank, P)].float()
    plain = call(kda_context_parallel, here, do, None, cu_seqlens=[0, T], group=group)
    with torch.autocast("cpu", bf16):
        cast = call(kda_context_parallel, here, do, None, cu_seqlens=[0, T], group=group)
    for name, x in plain.items():
        assert torch.equal(cast[name], x), f"{name} on rank {rank} of {P}"


# The convolution


def conv_results(
    fn: Callable[..., Any], x: Tensor, weight: Tensor, state: Tensor, dy: Tensor, dfinal: Tensor, **options
):
    leaves = [t.clone().requires_grad_() for t in (x, weight, state)]
    y, final = fn(leaves[0], leaves[1], initial_state=leaves[2], output_final_state=True, **options)
    loss = (y * dy).sum() + (final * dfinal).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [y.detach(), final.detach(), *grads]


def check_conv(ranks: Ranks) -> None:
    """Also before shards of two rows, several of which it takes to fill a window, and with filters of one tap."""
    group, rank, P = ranks
    few = 2 * P
    long = [(4, T, cu) for cu in PACKS.values()]
    short = [(W, few, cu) for W in (1, 2, 4, 7) for cu in (None, [0, few], [0, 1, few], [0, 1, 1, few - 1, few])]
    for W, length, cu in long + short:
        B, N, D, L = (2, 2, 3, length // P) if cu is None else (1, len(cu) - 1, 3, length // P)
        draw = torch.Generator().manual_seed(W)
        shapes = (B, length, D), (D, W), (N, W - 1, D), (B, length, D), (N, W - 1, D)
        x, weight, state, dy, dfinal = (torch.randn(shape, generator=draw, dtype=f64) for shape in shapes)
        y, final, dx, dweight, dstate = conv_results(
            short_conv, x, weight, state, dy, dfinal, cu_seqlens=cu, backend="reference"
        )
        shard, here = cut(cu, B, L, rank, P), slice(rank * L, (rank + 1) * L)
        got = conv_results(
            short_conv_context_parallel,
            x[:, here],
            weight,
            state[shard.begins],
            dy[:, here],
            dfinal[shard.ends],
            cu_seqlens=cu,
            group=group,
        )
        dist.all_reduce(got[3], group=group)
        want = [y[:, here], final[shard.ends], dx[:, here], dweight, dstate[shard.begins]]
        for name, a, b in zip(("y", "final", "dx", "dweight", "dstate"), got, want):
            where = f"{name}, W={W}, {cu}, rank {rank} of {P}"
            assert a.shape == b.shape, where
            assert not a.numel() or (a - b).abs().max() < 1e-12, where


def check_conv_leaks_nothing(ranks: Ranks) -> None:
    group, rank, P = ranks
    cu, here = [0, 14, 34, 48], tokens_of(rank, P)
    weight, clean = torch.ones(2, 4), torch.ones(1, T, 2, dtype=bf16)
    spoilt = clean.clone()
    spoilt[:, cu[1] : cu[2]] = torch.nan
    token = torch.arange(T)[here]
    other = (token < cu[1]) | (token >= cu[2])
    outcomes = []
    for x in (clean[:, here].clone().requires_grad_(), spoilt[:, here].clone().requires_grad_()):
        y, _ = short_conv_context_parallel(x, weight, cu_seqlens=cu, group=group)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        outcomes.append((y[:, other], dx[:, other]))
    for a, b in zip(*outcomes):
        assert a.isfinite().all()
        assert torch.equal(a, b)


# All of it as a layer has it


class Layer(nn.Module):
    """Three convolutions and the operation, twice: several exchanges a pass, in an order that all ranks must share."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.weight = nn.ParameterList(torch.randn(12, 4, generator=draw, dtype=f64) for _ in range(3))
        self.beta = nn.Parameter(torch.randn(12, 2, generator=draw, dtype=f64))
        self.A_log = nn.Parameter(torch.tensor([-1.0, 1.0], dtype=f64))
        self.dt_bias = nn.Parameter(torch.randn(2, 6, generator=draw, dtype=f64))

    def forward(self, x: Tensor, cu: list[int], group: dist.ProcessGroup | None, alone: bool) -> Tensor:
        conv = short_conv if alone else lambda *a, **o: short_conv_context_parallel(*a, group=group, **o)
        attend = kda if alone else lambda *a, **o: kda_context_parallel(*a, group=group, **o)
        for _ in range(2):
            q, k, v = (conv(x, w, cu_seqlens=cu)[0].unflatten(2, (2, 6)) for w in self.weight)
            o, _ = attend(
                q,
                k,
                v,
                x.unflatten(2, (2, 6)),
                x @ self.beta,
                gate=BoundedGate(self.A_log, self.dt_bias),
                normalize_qk=True,
                beta_logits=True,
                cu_seqlens=cu,
            )
            x = x + o.flatten(2)
        return x


def check_layer(ranks: Ranks) -> None:
    group, rank, P = ranks
    here = tokens_of(rank, P)
    draw = torch.Generator().manual_seed(4)
    x, dy = (torch.randn(1, T, 12, generator=draw, dtype=f64) for _ in range(2))
    for case in ("one document", "documents shorter than the window at borders"):
        cu, results = PACKS[case], []
        for alone, recomputed in ((True, False), (False, False), (False, True)):
            layer, rows = Layer(), (x if alone else x[:, here]).clone().requires_grad_()
            run = partial(checkpoint, layer, use_reentrant=False) if recomputed else layer
            y = run(rows, cu, group, alone)
            y.backward(dy if alone else dy[:, here])
            if not alone:
                for parameter in layer.parameters():
                    dist.all_reduce(parameter.grad, group=group)
            y, dx = (t[:, here] if alone else t for t in (y.detach(), rows.grad))
            results.append([y, dx, *(parameter.grad for parameter in layer.parameters())])
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-9, atol=1e-9)


CHECKS = (
    check_every_pack,
    check_kinds,
    check_precision,
    check_nothing_leaks,
    check_a_rank_without_loss,
    check_autocast,
    check_conv,
    check_conv_leaks_nothing,
    check_layer,
)


def run_rank(rank: int, ranks: int) -> None:
    groups = [dist.new_group(members) for members in GROUPS]
    for members, group in zip(GROUPS, groups):
        if rank in members:
            for check in CHECKS:
                check((group, members.index(rank), len(members)))


@pytest.mark.slow
def test_ranks_together_are_one_process(tmp_path: Path) -> None:
    run_ranks(4, tmp_path, run_rank)


# Without other processes


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with one_rank(tmp_path):
        yield


@pytest.mark.parametrize("P", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("cu", [cu for cu in PACKS.values() if cu is not None] + [[0, 0, 48], [0, 48, 48, 48]])
def test_shards_are_those_of_the_tokens(cu: list[int], P: int) -> None:
    """Against the document of every token; documents without any stand on one rank, in their order."""
    L = T // P
    document = torch.arange(len(cu) - 1).repeat_interleave(torch.tensor(cu).diff()).tolist()
    places = [{t // L for t in range(T) if document[t] == n} for n in range(len(cu) - 1)]
    shards = [cut(torch.tensor(cu), 1, L, rank, P) for rank in range(P)]
    for rank, shard in enumerate(shards):
        here = range(shard.ends.start, shard.begins.stop)
        tokens = [[t for t in range(T) if t // L == rank and document[t] == n] for n in here]
        assert [b - a for a, b in pairwise(shard.cu)] == [len(x) for x in tokens]
        assert {n for n, p in enumerate(places) if rank in p} <= set(here)
        assert (shard.origin, shard.target) == (
            min(places[here[0]] or {rank}),
            max(places[here[-1]] or {rank}),
        )
        assert shard.continued == (rank > 0 and document[rank * L - 1] == document[rank * L])
        assert shard.goes_on == (rank < P - 1 and document[rank * L + L - 1] == document[rank * L + L])
        assert shard.passes == (shard.continued and shard.goes_on and len({*document[rank * L : rank * L + L]}) == 1)
        assert shard.linked == any(len(p) > 1 for p in places)
    for which in ("begins", "ends"):
        listed = [n for shard in shards for n in range(len(cu) - 1)[getattr(shard, which)]]
        assert listed == list(range(len(cu) - 1))


def test_no_tokens_at_all() -> None:
    assert [cut([0, 0, 0], 1, 0, rank, 2).cu for rank in range(2)] == [[0, 0, 0], [0]]


@pytest.mark.usefixtures("alone")
def test_what_does_not_fit_is_refused() -> None:
    x = row([0, 20, 48])
    tokens = [x[name] for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises(ShapeError, match=r"cu_seqlens: expected last entry 48 \(T\), got 40"):
        kda_context_parallel(*tokens, cu_seqlens=[0, 40], group=None)
    with pytest.raises(ShapeError, match=r"initial_state: expected \[2, 3, 6, 10\] on rank 0, got \[1, 3, 6, 10\]"):
        kda_context_parallel(*tokens, cu_seqlens=[0, 20, 48], initial_state=x["initial"][:1], group=None)
    with pytest.raises(ShapeError, match="k: expected the shape of q"):
        kda_context_parallel(tokens[0], tokens[1][:, 1:], *tokens[2:], group=None)
    with pytest.raises(ShapeError, match=r"initial_state: expected .* on rank 0"):
        short_conv_context_parallel(
            torch.ones(1, 9, 2), torch.ones(2, 4), initial_state=torch.ones(2, 3, 2), group=None
        )
    with pytest.raises(ShapeError, match="x: expected"):
        short_conv_context_parallel(torch.ones(9, 2), torch.ones(2, 4), group=None)
    with pytest.raises(ShapeError, match="group: expected one that this process is in"):
        kda_context_parallel(*tokens, group=dist.GroupMember.NON_GROUP_MEMBER)

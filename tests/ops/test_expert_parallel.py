"""Experts spread over ranks give what one process gives: outputs and all gradients, in float64."""

import pytest
import torch
import torch.distributed as dist

from perilune.core.errors import ConfigError, ShapeError
from perilune.ops import grouped_experts
from perilune.ops.grouped_experts import expert_parallel
from perilune.ops.grouped_experts.expert_parallel import grouped_experts_parallel
from ranks import one_rank, run_ranks

E, F, D, K = 6, 5, 4, 3
BALANCED = {"some each": [7, 4, 2], "none on one": [0, 9, 5], "none at all": [0, 0, 0]}
CROWDS = {"one expert has all": [5, 6, 2], "the last rank has none": [4, 4, 4]}
CROWDS_OF = {"one expert has all": torch.zeros_like, "the last rank has none": lambda ids: ids.clamp(max=3)}
TOKENS = {"some each": [7, 4], "none on one": [0, 9], "none at all": [0, 0]}


def problem(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    M = sum(tokens)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(M)]) if M else torch.zeros(0, K).long()
    weights = draw(M, K).sigmoid()
    if M > 3:
        ids[1, 1] = ids[3, 0] = -1  # empty slots
        ids[2] = torch.tensor([0, 1, 2])  # all on the first rank
    return draw(M, D), (draw(E, F, D), draw(E, F, D), draw(E, D, F)), ids, weights, draw(M, D)


def check_balanced(rank, ranks):
    """Every rank computes its share, copies' gradients are at their experts."""
    for case, tokens in {**BALANCED, **CROWDS}.items():
        x, matrices, ids, weights, dout = problem(tokens)
        if case in CROWDS:
            ids = CROWDS_OF[case](ids)
        whole = [t.clone().requires_grad_() for t in (x, *matrices, weights)]
        expected = grouped_experts(*whole[:4], ids, whole[4])
        expected.backward(dout)
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        home = slice(rank * E // ranks, (rank + 1) * E // ranks)
        own = [t.clone().requires_grad_() for t in (x[mine], *(w[home] for w in matrices), weights[mine])]
        computed = []
        real = expert_parallel.grouped_experts

        def count(rows, *rest, computed=computed, real=real, **options):
            computed.append(len(rows))
            return real(rows, *rest, **options)

        expert_parallel.grouped_experts = count
        out = grouped_experts_parallel(*own[:4], ids[mine], own[4], group=dist.group.WORLD, balanced=True)
        expert_parallel.grouped_experts = real
        assert computed[0] <= -(-int((ids >= 0).sum()) // ranks)
        out.backward(dout[mine])
        where = f"{case}, rank {rank} of {ranks}"
        torch.testing.assert_close(out, expected[mine], rtol=0, atol=1e-12, msg=where)
        for name, a, b, part in zip(
            ("x", "w_gate", "w_up", "w_down", "weights"), own, whole, (mine, home, home, home, mine), strict=True
        ):
            torch.testing.assert_close(a.grad, b.grad[part], rtol=0, atol=1e-12, msg=f"{name}, {where}")


def check(rank, ranks):
    for case, tokens in TOKENS.items():
        for capacity in (None, max(tokens) * K, 3):
            x, matrices, ids, weights, dout = problem(tokens)
            if capacity == 3 and case == "some each":
                continue  # too few: see below
            whole = [t.clone().requires_grad_() for t in (x, *matrices, weights)]
            expected = grouped_experts(*whole[:4], ids, whole[4])
            expected.backward(dout)

            mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
            home = slice(rank * E // ranks, (rank + 1) * E // ranks)
            if capacity == 3:
                ids = ids[:, :1].clamp(min=0)  # one slot each, and nine tokens: 3 for each rank must not be enough
                if case == "none on one":
                    ids = torch.arange(9)[:, None] % 2 * (E // 2)
                    ids[6:] = -1
                weights = weights[:, :1]
                whole = [t.clone().requires_grad_() for t in (x, *matrices, weights)]
                expected = grouped_experts(*whole[:4], ids, whole[4])
                expected.backward(dout)
            own = [t.clone().requires_grad_() for t in (x[mine], *(w[home] for w in matrices), weights[mine])]
            out = grouped_experts_parallel(*own[:4], ids[mine], own[4], group=dist.group.WORLD, capacity=capacity)
            out.backward(dout[mine])
            where = f"{case}, capacity {capacity}, rank {rank}"
            torch.testing.assert_close(out, expected[mine], rtol=0, atol=1e-12, msg=where)
            for name, a, b, part in zip(
                ("x", "w_gate", "w_up", "w_down", "weights"), own, whole, (mine, home, home, home, mine), strict=True
            ):
                assert a.grad is not None, f"{name}, {where}"
                torch.testing.assert_close(a.grad, b.grad[part], rtol=0, atol=1e-12, msg=f"{name}, {where}")
    x, matrices, _, weights, _ = problem([4, 4])
    home = slice(rank * E // ranks, (rank + 1) * E // ranks)
    crowd = torch.zeros(4, K, dtype=torch.int64)  # twelve slots of one expert
    out = grouped_experts_parallel(
        x[:4], *(w[home] for w in matrices), crowd, weights[:4], group=dist.group.WORLD, capacity=11
    )
    assert out.isnan().all()


def test_ranks_together_are_one_process(tmp_path):
    """With shapes that follow the router and with static ones; a rank without tokens, slots without an expert; what
    does not fit is not lost in silence."""
    run_ranks(2, tmp_path, check)


def test_balanced_ranks_compute_alike(tmp_path):
    """Three ranks, whatever the router does: crowded experts are copied, and all gradients are at home."""
    run_ranks(3, tmp_path, check_balanced)


def test_balance_has_no_capacity(tmp_path):
    x, matrices, ids, weights, _ = problem([4])
    with one_rank(tmp_path), pytest.raises(ConfigError, match="capacity: expected none where experts are balanced"):
        grouped_experts_parallel(x, *matrices, ids, weights, group=dist.group.WORLD, capacity=9, balanced=True)


def test_ids_of_no_expert_are_refused(tmp_path):
    x, matrices, ids, weights, _ = problem([4])
    with one_rank(tmp_path), pytest.raises(ShapeError, match="ids: expected expert numbers from 0 to 2, or -1, got"):
        grouped_experts_parallel(x, *(w[:3] for w in matrices), ids, weights, group=dist.group.WORLD)

"""Balanced experts: every rank computes the same number of rows, with few copies, whatever the loads."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ShapeError
from perilune.ops.grouped_experts.placement import copies, place


def check(loads: list[int], ranks: int) -> list[list[int]]:
    """All that the plan promises; returns its copies."""
    placed = place(loads, ranks)
    home = len(loads) // ranks
    assert [sum(rows.values()) for rows in placed] == [sum(loads) // ranks] * ranks
    computed = [0] * len(loads)
    for rows in placed:
        for expert, number in rows.items():
            assert number > 0
            computed[expert] += number
    assert computed == loads
    remote = copies(placed, len(loads))
    assert max(map(len, remote)) <= home
    assert all(len({expert // home for expert in experts}) <= 1 for experts in remote)
    assert sum(bool(experts) for experts in remote) <= ranks - 1
    return remote


@st.composite
def cases(draw) -> tuple[list[int], int]:
    ranks, home = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    some = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 10_000))
    loads = draw(st.lists(some, min_size=ranks * home, max_size=ranks * home))
    loads[draw(st.integers(0, len(loads) - 1))] += -sum(loads) % ranks
    return loads, ranks


@settings(deadline=None, max_examples=500)
@given(cases())
def test_every_promise_for_any_loads(case) -> None:
    check(*case)


@pytest.mark.parametrize(("experts", "ranks", "number"), [(8, 4, 2), (64, 8, 7), (896, 32, 28)])
def test_the_worst_case_needs_as_many_as_the_bound(experts: int, ranks: int, number: int) -> None:
    """Rank 0's experts get nothing, all others alike."""
    home = experts // ranks
    each = ranks * home  # rows that divide by all there is
    remote = check([0] * home + [each] * (experts - home), ranks)
    assert len(remote[0]) == number == math.ceil(experts * (ranks - 1) / ranks**2)


def test_a_small_example() -> None:
    """Ranks at 11 and 1 rows of 6: five of expert 0 move, one copy."""
    placed = place([8, 3, 1, 0], 2)
    assert placed == [{0: 3, 1: 3}, {2: 1, 0: 5}]
    assert copies(placed, 4) == [[], [0]]


@pytest.mark.parametrize("loads", [[5] * 8, [0] * 8, [40] + [0] * 7], ids=["even", "none", "all in one"])
def test_the_ends(loads: list[int]) -> None:
    remote = check(loads, 4)
    assert sum(map(len, remote)) == (3 if max(loads) == 40 else 0)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ShapeError, match="ranks: expected a divisor of 6 experts, got 4"):
        place([1] * 6, 4)
    with pytest.raises(ShapeError, match="loads: expected rows >= 0 that divide by 2 ranks, got 5"):
        place([2, 3], 2)
    with pytest.raises(ShapeError, match="loads: expected rows >= 0"):
        place([-2, 4], 2)

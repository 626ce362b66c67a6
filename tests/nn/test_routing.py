import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ShapeError
from perilune.nn.routing import route, stable_topk


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([-2.0, -1e-40, -0.0, 0.0, 1e-40, 0.5, 0.5000001, 3.0]), min_size=1, max_size=12),
    st.data(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_stable_topk_is_a_stable_sort(row, data, dtype):
    k = data.draw(st.integers(1, len(row)))
    scores = torch.tensor([row, row[::-1]], dtype=dtype)
    values, ids = stable_topk(scores, k)
    for got, numbers in zip(ids.tolist(), scores.double().tolist()):
        assert got == sorted(range(len(numbers)), key=lambda i: -numbers[i])[:k]
    assert torch.equal(values, scores.gather(-1, ids))


def test_stable_topk_orders_the_ends_of_the_range():
    scores = torch.tensor([-torch.inf, 3e38, torch.inf, -3e38, 0.0, torch.inf])
    assert stable_topk(scores, 6)[1].tolist() == [2, 5, 1, 4, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stable_topk_agrees_with_topk_where_nothing_ties(dtype):
    scores = torch.randn(50, 896, dtype=dtype)
    values, ids = stable_topk(scores, 16)
    expected = scores.topk(16)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


def test_saturated_scores_go_to_the_lowest_index():
    ids, weights = route(torch.ones(3, 10), torch.zeros(10), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(weights, torch.full((3, 4), 0.25))


def test_chosen_by_biased_weighed_by_raw_scores():
    scores = torch.tensor([[0.6, 0.5, 0.4, 0.3]], requires_grad=True)
    bias = torch.tensor([0, 0, 0.3, 0], requires_grad=True)
    ids, weights = route(scores, bias, 2, scaling=2.0)
    assert ids.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.8, 1.2]]))
    weights[0, 0].backward()
    assert bias.grad is None
    # w = 2 a / (a + c): dw/da = 2 c / (a + c)^2 = 1.2, dw/dc = -2 a / (a + c)^2 = -0.8; experts not chosen get none.
    torch.testing.assert_close(scores.grad, torch.tensor([[-0.8, 0.0, 1.2, 0.0]]))


def test_weights_do_not_know_the_bias_of_a_fixed_choice():
    scores = torch.rand(20, 8)
    ids, weights = route(scores, torch.zeros(8), 3)
    shifted_ids, shifted_weights = route(scores, torch.full((8,), 0.25), 3)
    assert torch.equal(ids, shifted_ids)
    assert torch.equal(weights, shifted_weights)
    torch.testing.assert_close(weights.sum(-1), torch.ones(20))


def test_near_equal_scores_are_told_apart_in_float32():
    scores = torch.tensor([[0.8800, 0.8805, 0.8790, 0.1]])
    assert route(scores, torch.zeros(4), 1)[0].tolist() == [[1]]
    assert scores.bfloat16()[0, :3].unique().numel() == 1  # what a 16-bit router would see
    assert route(scores.bfloat16(), torch.zeros(4), 1)[1].dtype == torch.float32


def test_without_renormalisation_weights_are_the_scores():
    scores = torch.rand(5, 6, dtype=torch.float64)
    ids, weights = route(scores, torch.zeros(6), 2, renormalize=False, scaling=2.5)
    assert torch.equal(weights, 2.5 * scores.gather(-1, ids))
    assert weights.dtype == torch.float64


def test_groups_by_the_sum_of_their_two_best():
    #                       group 0: 1.0     group 1: 1.1     group 2: 1.05
    scores = torch.tensor([[0.9, 0.1, 0.0, 0.6, 0.5, 0.4, 0.55, 0.5, 0.45]])
    ids, weights = route(scores, torch.zeros(9), 3, num_groups=3, topk_group=2)
    assert ids.tolist() == [[3, 6, 4]]
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    # The bias counts towards the group's score.
    assert 0 in route(scores, torch.tensor([0.2] + [0.0] * 8), 3, num_groups=3, topk_group=2)[0]
    # One group, or all of them kept, is no restriction.
    plain = route(scores, torch.zeros(9), 3)[0]
    assert torch.equal(route(scores, torch.zeros(9), 3, num_groups=3, topk_group=3)[0], plain)


def test_leading_axes_are_kept():
    ids, weights = route(torch.rand(2, 5, 8), torch.zeros(8), 3)
    assert ids.shape == weights.shape == (2, 5, 3)


def test_errors_name_what_is_wrong():
    with pytest.raises(ShapeError, match=r"k: expected 1 to 4, got 5"):
        route(torch.rand(2, 4), torch.zeros(4), 5)
    with pytest.raises(ShapeError, match=r"room for 3 choices, got 4, 1"):
        route(torch.rand(2, 8), torch.zeros(8), 3, num_groups=4, topk_group=1)


def test_groups_by_their_best_alone():
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.1, 0.2]])
    for best, expected in ((1, [0, 1]), (2, [2, 3])):  # 0.9 beats 0.6; 0.9 + 0.0 does not beat 0.6 + 0.5
        ids, _ = route(scores, torch.zeros(6), 2, num_groups=3, topk_group=1, best_of_group=best)
        assert ids.tolist() == [expected]

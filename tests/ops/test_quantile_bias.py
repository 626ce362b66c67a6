import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ShapeError
from perilune.nn.routing import route
from perilune.ops import quantile_bias
from perilune.ops.quantile_bias import Groups, bias_from_histogram, limiting, rebin, score_histogram
from perilune.ops.quantile_bias.exact import required_bias

# Eight tokens, four experts, top 1, worked out by hand.
SCORES = torch.tensor(
    [
        [0.49, 0.81, 0.33, 0.21],
        [0.67, 0.88, 0.30, 0.08],
        [0.51, 0.75, 0.47, 0.61],
        [0.76, 0.52, 0.28, 0.30],
        [0.51, 0.65, 0.66, 0.07],
        [0.70, 0.61, 0.64, 0.40],
        [0.74, 0.65, 0.24, 0.60],
        [0.92, 0.87, 0.52, 0.05],
    ],
    dtype=torch.float64,
)
# Eight real tokens that all take expert 0, for the padding case.
SKEWED = torch.tensor(
    [
        [0.9, 0.5, 0.4, 0.1],
        [0.8, 0.6, 0.3, 0.2],
        [0.85, 0.55, 0.45, 0.15],
        [0.95, 0.35, 0.25, 0.05],
        [0.7, 0.65, 0.2, 0.1],
        [0.75, 0.5, 0.6, 0.3],
        [0.6, 0.4, 0.35, 0.5],
        [0.65, 0.3, 0.55, 0.45],
    ]
)
ZERO = torch.zeros(4)


def loads(scores, bias, top_k=1):
    ids = (scores + bias).topk(top_k).indices
    return torch.bincount(ids.flatten(), minlength=bias.numel()).tolist()


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(
    ("bins", "bias", "after"),
    [
        (None, [-0.10, -0.18, 0.10, 0.18], [2, 2, 2, 2]),
        (1000, [-0.0275, -0.1475, 0.0625, 0.1125], [3, 2, 2, 1]),
        (20, [-0.05, -0.18333333333333332, 0.11666666666666667, 0.11666666666666667], [2, 2, 2, 2]),
    ],
)
def test_worked_example(bins, bias, after, backend):
    zero = ZERO.double()
    assert loads(SCORES, zero) == [4, 3, 1, 0]
    got = quantile_bias(SCORES, zero, 1, bins=bins, backend=backend)
    torch.testing.assert_close(got, torch.tensor(bias, dtype=torch.float64), rtol=0, atol=1e-12)
    assert loads(SCORES, got) == after


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.integers(1, 40), st.integers(2, 12), st.integers(1, 12), st.sampled_from([None, 7, 1000]), st.integers(0, 9999)
)
def test_chunked_is_the_reference(M, E, top_k, bins, seed):
    """Including q < 1, q no integer, top_k = E, a mask, no real token at all."""
    top_k = min(top_k, E)
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(M, E, generator=random, dtype=torch.float64)
    bias = torch.randn(E, generator=random, dtype=torch.float64)
    mask = torch.rand(M, generator=random) < 0.7
    args = (scores, bias, top_k)
    got, expected = (quantile_bias(*args, mask=mask, bins=bins, backend=b) for b in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bins", [None, 1000])
def test_mean_is_zero_and_a_constant_changes_nothing(bins):
    scores, bias = torch.rand(500, 12), torch.randn(12)
    got = quantile_bias(scores, bias, 3, bins=bins)
    assert got.dtype == torch.float32
    assert abs(got.double().mean()) < 1e-6
    torch.testing.assert_close(quantile_bias(scores, bias + 0.5, 3, bins=bins), got, rtol=0, atol=2.1 / 1000)
    assert torch.equal((scores + bias).topk(3).indices, (scores + (bias + 0.5)).topk(3).indices)


def test_histogram_counts_every_real_token_once_for_every_expert_however_it_is_split():
    scores, bias, mask = torch.rand(640, 8), 0.3 * torch.randn(8), torch.rand(640) < 0.8
    whole = score_histogram(scores, bias, 2, 1000, mask)
    assert whole.dtype == torch.int64
    assert whole.sum(-1).tolist() == [int(mask.sum())] * 8
    for pieces in ([1, 639], [320, 320], [100, 0, 200, 340]):
        parts = zip(scores.split(pieces), mask.split(pieces))
        assert torch.equal(sum(score_histogram(s, bias, 2, 1000, m) for s, m in parts), whole)


def test_two_ranks_with_two_micro_batches_each_are_one_process():
    counts = sum(score_histogram(part, ZERO, 1) for part in SKEWED.split(2))
    assert counts.sum(-1).tolist() == [8, 8, 8, 8]
    assert torch.equal(bias_from_histogram(counts, ZERO, 1), quantile_bias(SKEWED, ZERO, 1, bins=1000))
    # The mean of the parts' own quantiles is something else.
    mean = torch.stack([quantile_bias(part, ZERO, 1, bins=1000) for part in SKEWED.split(2)]).mean(0)
    assert (mean - quantile_bias(SKEWED, ZERO, 1, bins=1000)).abs().max() > 0.01


@pytest.mark.parametrize("bins", [None, 1000])
def test_padding_moves_nothing(bins):
    assert loads(SKEWED, ZERO) == [8, 0, 0, 0]
    got = quantile_bias(SKEWED, ZERO, 1, bins=bins)
    padded = torch.cat([SKEWED, torch.tensor([[0.5, 0.5, 0.5, 0.9]]).expand(8, 4)])
    mask = torch.arange(16) < 8
    assert torch.equal(quantile_bias(padded, ZERO, 1, mask=mask, bins=bins), got)
    assert (quantile_bias(padded, ZERO, 1, bins=bins) - got).abs().max() > 0.05
    # Before centring each lies between the second and third smallest required bias, up to one bin.
    low, high = torch.tensor([-0.4, 0, 0, 0.1]), torch.tensor([-0.3, 0, 0.1, 0.3])
    bin_ = 0 if bins is None else 2 / bins
    shift = torch.linspace(-1, 1, 4001)[:, None]  # what centring took away, unknown to the caller
    uncentred = got + shift
    assert ((uncentred >= low - bin_ - 1e-6) & (uncentred <= high + bin_ + 1e-6)).all(-1).any()


def test_required_biases_lie_inside_the_bins():
    """Nothing is clamped into the end bins: widening the range by a bin on each side moves no count out of it."""
    scores, bias = torch.rand(300, 6).round(), 2 * torch.randn(6)  # scores 0 and 1, the ends of the range
    low, width = bias.min() - 1, (bias.max() - bias.min() + 2) / 50
    cutoff = (scores + bias).topk(3).values[:, -1:]
    position = (cutoff - scores - low) / width
    assert position.min() >= -1e-4
    assert position.max() <= 50 + 1e-4
    assert score_histogram(scores, bias, 2, 50).sum(-1).tolist() == [300] * 6


def test_at_most_q_margins_pass_and_fewer_only_at_the_structural_tie():
    scores, zero = torch.rand(640, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    margins = scores - scores.topk(3).values[:, -1:]
    bias = quantile_bias(scores, zero, 2)
    # Some column at least lands off the tie, where the estimate is -margin exactly: undo the centring there.
    estimate = -margins.sort(0, descending=True).values[160]
    torch.testing.assert_close(bias, estimate - estimate.mean(), rtol=0, atol=1e-12)
    passing = (margins > -estimate).sum(0)
    assert (passing <= 160).all()
    assert ((passing == 160) | (estimate.abs() < 1e-12)).all()
    assert (passing == 160).any()


def test_histogram_is_within_a_bin_and_the_local_gap_of_exact():
    scores, bias = torch.rand(2000, 16, dtype=torch.float64), 0.2 * torch.randn(16, dtype=torch.float64)
    top_k, q = 3, 2000 * 3 // 16
    required = (scores + bias).topk(top_k + 1).values[:, -1:] - scores
    ordered = required.sort(0).values
    gap = ordered[q] - ordered[q - 1]
    width = (bias.max() - bias.min() + 2) / 1000
    exact = ordered[q]
    binned = quantile_bias(scores, bias, top_k, bins=1000)
    # Both are centred, so compare up to the mean of what each may be off.
    error = (binned - (exact - exact.mean())).abs()
    assert (error <= width + gap + (width + gap).mean()).all()


def test_rebinning_keeps_every_count_where_it_was():
    scores, old, new = torch.rand(5000, 6, dtype=torch.float64), 0.3 * torch.randn(6), 0.4 * torch.randn(6)
    counts = score_histogram(scores, old, 2, 1000)
    torch.testing.assert_close(rebin(counts, old, old), counts.double(), rtol=0, atol=1e-6)
    moved = rebin(counts, old, new)
    torch.testing.assert_close(moved.sum(-1), counts.sum(-1).double())
    assert (moved > -1e-9).all()
    # The same required biases give the same quantiles, read through either range, within a bin of each.
    width = max((b.max() - b.min() + 2) / 1000 for b in (old, new))
    error = bias_from_histogram(moved, new.double(), 2) - bias_from_histogram(counts, old.double(), 2)
    assert error.abs().max() < 2 * width


def test_rebinning_to_a_narrower_range_collects_the_rest_at_its_ends():
    counts = torch.tensor([[4, 0, 0, 4], [0, 8, 0, 0]])
    wide, narrow = torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 0.0])  # bins of 1 over [-2, 2], of 1/2 over [-1, 1]
    assert rebin(counts, wide, narrow).tolist() == [[4, 0, 0, 4], [4, 4, 0, 0]]


@pytest.mark.parametrize("bins", [None, 1000])
def test_without_a_next_expert_or_a_token_the_bias_stays(bins):
    bias = torch.tensor([0.1, -0.3, 0.5])
    assert torch.equal(quantile_bias(torch.rand(5, 3), bias, 3, bins=bins), bias)
    assert torch.equal(quantile_bias(torch.rand(0, 3), bias, 1, bins=bins), bias)
    nothing = torch.zeros(5, dtype=torch.bool)
    assert torch.equal(quantile_bias(torch.rand(5, 3), bias, 1, mask=nothing, bins=bins), bias)


@pytest.mark.parametrize("bins", [None, 1000])
def test_an_896_expert_router_gone_wrong_is_balanced_by_one_update(bins):
    E, top_k, M = 896, 16, 16384
    skew = 1.8 * torch.randn(E)
    bias = torch.zeros(E)

    def fresh(step):
        return torch.sigmoid(0.7 * torch.randn(M, E, generator=torch.Generator().manual_seed(step)) + skew)

    def measure(scores):
        load = torch.bincount((scores + bias).topk(top_k).indices.flatten(), minlength=E).double()
        x = load.sort().values
        gini = 2 * (torch.arange(1, E + 1, dtype=x.dtype) @ x).item() / (E * x.sum().item()) - (E + 1) / E
        return gini, int((load == 0).sum())

    history = []
    for step in range(3 if bins else 2):
        scores = fresh(step)
        history.append(measure(scores))
        bias = quantile_bias(scores, bias, top_k, bins=bins)
    assert history[0][0] > 0.8
    assert history[0][1] > 200
    assert history[1][0] < 0.1
    assert history[1][1] == 0
    if bins:
        assert history[2][0] < 0.06


def test_alternating_sweeps_settle_near_balance():
    """Both half-sweeps of the dual on one fixed batch; the structural ties keep it from exact balance."""
    for _ in range(10):
        scores = torch.rand(64, 8, dtype=torch.float64)
        bias = torch.zeros(8, dtype=torch.float64)
        for _ in range(60):
            bias = quantile_bias(scores, bias, 2)
        assert max(abs(load - 16) for load in loads(scores, bias, 2)) <= 6


def test_bias_keeps_at_least_float32_and_no_graph():
    scores = torch.rand(50, 4, requires_grad=True)
    got = quantile_bias(scores, torch.zeros(4, dtype=torch.bfloat16), 1)
    assert got.dtype == torch.float32
    assert not got.requires_grad
    assert math.isclose(got.double().mean().item(), 0, abs_tol=1e-7)


def test_errors_name_what_is_wrong():
    with pytest.raises(ShapeError, match=r"top_k: expected 1 to 4, got 5"):
        quantile_bias(SKEWED, ZERO, 5)
    with pytest.raises(ShapeError, match=r"bias: expected \[4\], got \[3\]"):
        quantile_bias(SKEWED, ZERO[:3], 1)
    with pytest.raises(ShapeError, match=r"mask: expected bool \[8\]"):
        quantile_bias(SKEWED, ZERO, 1, mask=torch.ones(8))
    with pytest.raises(ShapeError, match=r"scores: expected \[M, E\]"):
        quantile_bias(SKEWED[None], ZERO, 1)
    with pytest.raises(ShapeError, match=r"bins: expected 1 or more, got 0"):
        quantile_bias(SKEWED, ZERO, 1, bins=0)
    with pytest.raises(ShapeError, match=r"top_k: expected fewer than 4 experts, got all"):
        score_histogram(SKEWED, ZERO, 4)
    for out in (torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, 10), torch.zeros(10, 4, dtype=torch.int64).mT):
        with pytest.raises(ShapeError, match=r"out: expected contiguous int64 \[4, 10\], got"):
            score_histogram(SKEWED, ZERO, 1, 10, out=out)


GROUPED = [  # experts, top_k, groups: two best or one, one expert a group, no expert left over, groups of odd size
    (16, 4, Groups(4, 2)),
    (12, 3, Groups(4, 2, best=1)),
    (6, 2, Groups(6, 3)),
    (16, 4, Groups(4, 1)),
    (9, 2, Groups(3, 1)),
    (8, 3, Groups(4, 4)),
]


@pytest.mark.parametrize(("E", "top_k", "groups"), GROUPED)
@pytest.mark.parametrize("bins", [None, 50])
def test_chunked_is_the_reference_in_groups(E, top_k, groups, bins):
    scores, bias = torch.rand(60, E, dtype=torch.float64), 0.3 * torch.randn(E, dtype=torch.float64)
    args = {"mask": torch.rand(60) < 0.8, "bins": bins, "groups": groups}
    got, expected = (quantile_bias(scores, bias, top_k, **args, backend=b) for b in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("E", "top_k", "groups"), GROUPED)
def test_an_expert_is_chosen_where_its_bias_is_above_the_one_required(E, top_k, groups):
    """Against the router itself: the cutoffs know why an expert is in or out, its group's fate included."""
    scores, bias = torch.rand(500, E, dtype=torch.float64), 0.2 * torch.randn(E, dtype=torch.float64)
    options = {"num_groups": groups.number, "topk_group": groups.kept, "best_of_group": groups.best}
    ids, _ = route(scores, bias, top_k, **options)
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, ids, True)
    required = required_bias(scores, bias, top_k, limiting(groups, E, top_k))
    assert torch.equal(required < bias - 1e-12, chosen)
    assert required.isfinite().all()


def test_groups_that_do_not_fit_are_refused():
    scores = torch.rand(5, 8)
    for groups in (Groups(0, 1), Groups(3, 1), Groups(4, 0), Groups(4, 5), Groups(4, 1), Groups(4, 2, best=0)):
        with pytest.raises(ShapeError, match="groups: expected a number that divides 8 experts and room for 3 choices"):
            quantile_bias(scores, torch.zeros(8), 3, groups=groups)
        with pytest.raises(ShapeError, match="groups: expected a number that divides 8 experts"):
            score_histogram(scores, torch.zeros(8), 3, groups=groups)

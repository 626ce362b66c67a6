import math

import pytest
import torch

from perilune.nn.load import (
    LayerLoad,
    LoadWindow,
    bias_drift,
    dead_experts,
    entropy_ratio,
    gini,
    layer_load,
    max_violation,
    sampling_floor,
    worst,
)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [([4, 3, 1, 0], 0.4375), ([0, 0, 0, 8], 0.75), ([2, 2, 2, 2], 0), ([1, 2, 3, 4], 0.25), ([0, 0], 0)],
)
def test_gini(loads, expected):
    loads = torch.tensor(loads)
    assert gini(loads) == pytest.approx(expected, abs=1e-15)
    assert gini(loads * 7) == pytest.approx(expected, abs=1e-15)
    assert gini(loads.flip(0)) == pytest.approx(expected, abs=1e-15)


def test_gini_is_half_the_mean_difference_over_the_mean():
    x = torch.rand(30, dtype=torch.float64)
    assert gini(x) == pytest.approx(((x[:, None] - x).abs().mean() / (2 * x.mean())).item())


def test_max_violation_and_the_dead():
    assert max_violation(torch.tensor([4, 3, 1, 0])) == 1.0
    assert max_violation(torch.tensor([2, 2, 2, 2])) == 0.0
    assert max_violation(torch.tensor([0, 0, 0, 8])) == 3.0
    assert max_violation(torch.zeros(4)) == 0.0
    assert dead_experts(torch.tensor([4, 0, 1, 0])) == 2


def test_entropy_ratio_forgives_dead_experts():
    assert entropy_ratio(torch.full((8,), 3)) == pytest.approx(1)
    assert entropy_ratio(torch.tensor([0, 9, 0])) == pytest.approx(0, abs=1e-15)
    assert entropy_ratio(torch.tensor([5])) == 1
    half_dead = torch.cat([torch.ones(448), torch.zeros(448)])
    assert entropy_ratio(half_dead) == pytest.approx(1 - math.log(2) / math.log(896))
    assert dead_experts(half_dead) == 448


def test_a_layers_figures_and_the_worst_of_each():
    layers = {
        "even": layer_load(torch.tensor([2, 2, 2, 2])),
        "one dead": layer_load(torch.tensor([3, 3, 3, 0])),
        "one full": layer_load(torch.tensor([1, 1, 1, 9])),
    }
    assert layers["one dead"] == LayerLoad(gini=0.25, max_violation=pytest.approx(1 / 3), dead=0.25)
    assert worst(layers) == ("one full", LayerLoad(gini=0.5, max_violation=2.0, dead=0.25))
    assert worst({}) == (None, LayerLoad(0.0, 0.0, 0.0))


def test_drift_is_the_root_mean_square_of_the_move():
    assert bias_drift(torch.tensor([0.5, -0.5, 0, 0]), torch.tensor([0.5, 0.5, 0, 0])) == 0.5
    assert bias_drift(torch.ones(3), torch.ones(3)) == 0


def test_sampling_floor_is_what_random_loads_show():
    floor = sampling_floor(16384 * 16 / 896, 896)
    assert floor.gini == pytest.approx(0.033, abs=5e-4)
    assert floor.max_violation == pytest.approx(0.215, abs=1e-3)
    measured = gini(torch.poisson(torch.full((896,), 16384 * 16 / 896)))
    assert measured == pytest.approx(floor.gini, rel=0.1)
    assert sampling_floor(0, 8).gini == math.inf


def test_window_forgets_the_oldest():
    window = LoadWindow(2)
    for loads in ([9, 9], [1, 2], [3, 4]):
        window.add(torch.tensor(loads))
    assert len(window) == 2
    assert window.total().tolist() == [4, 6]
    assert window.stack().tolist() == [[1, 2], [3, 4]]


def test_window_keeps_its_own_copy():
    window, loads = LoadWindow(3), torch.tensor([1, 2])
    window.add(loads)
    loads.zero_()
    assert window.total().tolist() == [1, 2]

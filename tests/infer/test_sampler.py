import math

import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.infer.sampler import Sampling, sample

V = 50


def drawn(p, n, **options):
    """Shares of n draws from probabilities `p`."""
    rows = torch.tensor(p).log().expand(n, -1)
    return (torch.bincount(sample(rows, Sampling(**options)), minlength=len(p)) / n).tolist()


@pytest.mark.parametrize("top_k", [0, 1, V, V + 5])
@pytest.mark.parametrize("top_p", [0, 1e-9, 1])
@pytest.mark.parametrize("temperature", [0, 1e-6, 1, 1e6])
def test_edges_of_every_setting(temperature, top_k, top_p):
    logits = 30 * torch.randn(8, V)
    tokens = sample(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert tokens.shape == (8,)
    assert ((tokens >= 0) & (tokens < V)).all()
    if temperature < 1 or top_k == 1 or top_p < 1:
        assert tokens.equal(logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_temperature_of_zero_takes_the_first_of_the_likeliest(dtype):
    logits = torch.tensor([[0, 3, 3, -1], [-math.inf, -math.inf, -5, -6], [1e4, -1e4, 0, 1e4]], dtype=dtype)
    for temperature in (0, 1e-6):
        tokens = sample(logits, Sampling(temperature=temperature, top_k=1))
        assert tokens.tolist() == [1, 2, 0]


def test_draws_follow_the_probabilities():
    p = [0.05, 0.5, 0.15, 0.3]
    assert drawn(p, 20_000) == pytest.approx(p, abs=0.015)
    flat = torch.tensor(p).sqrt()
    assert drawn(p, 20_000, temperature=2.0) == pytest.approx((flat / flat.sum()).tolist(), abs=0.015)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.79}, [1, 3]),
        ({"top_p": 0.81}, [1, 2, 3]),
        ({"top_p": 0.97}, [0, 1, 2, 3]),
        ({"top_p": 0.97, "top_k": 3}, [1, 2, 3]),
        ({"top_p": 0.6, "temperature": 0.5}, [1]),  # the temperature comes first: 0.25 of 0.365 in all
    ],
)
def test_only_what_is_allowed_is_drawn(options, kept):
    """By falling likeliness 1, 3, 2, 0; top-p takes the token that reaches it."""
    p = torch.tensor([0.05, 0.5, 0.15, 0.3]) ** (1 / options.get("temperature", 1.0))
    allowed = torch.zeros(4).index_fill(0, torch.tensor(kept), 1) * p
    shares = drawn([0.05, 0.5, 0.15, 0.3], 20_000, **options)
    assert [i for i, share in enumerate(shares) if share] == kept
    assert shares == pytest.approx((allowed / allowed.sum()).tolist(), abs=0.015)


def test_impossible_tokens_are_never_drawn():
    assert drawn([0.0, 0.5, 0.0, 0.5], 1000)[::2] == [0, 0]


def test_rows_are_drawn_independently():
    tokens = sample(torch.zeros(16, 1000), Sampling(), torch.Generator().manual_seed(0))
    assert tokens.unique().numel() > 10


def test_one_seed_gives_one_draw():
    logits = torch.randn(16, V)
    draws = [sample(logits, Sampling(), torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])


@pytest.mark.parametrize(
    "options", [{"temperature": -0.1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 1.1}, {"top_p": math.nan}]
)
def test_settings_out_of_range_are_named(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: expected"):
        Sampling(**options)

import pytest
import torch

from perilune.core.errors import ShapeError
from perilune.optim import qk_clip_

H, NOPE, ROPE, V, RANK_Q, RANK_KV, T = 5, 6, 3, 4, 7, 8, 9


def logits(q_weight, kv_b_weight, inputs):
    """Scaled attention logits [H, T, T] of multi-head latent attention, head by head."""
    latent_q, latent_kv, shared_key = inputs
    heads = []
    for h in range(H):
        q = latent_q @ q_weight[h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)].T
        k = latent_kv @ kv_b_weight[h * (NOPE + V) : h * (NOPE + V) + NOPE].T
        heads.append(q @ torch.cat([k, shared_key], dim=1).T * (NOPE + ROPE) ** -0.5)
    return torch.stack(heads)


@pytest.fixture
def weights():
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    inputs = normal(T, RANK_Q), normal(T, RANK_KV), normal(T, ROPE)
    return normal(H * (NOPE + ROPE), RANK_Q), normal(H * (NOPE + V), RANK_KV), inputs


def clip(q, kv_b, max_logits, **options):
    return qk_clip_(q, kv_b, max_logits, nope=NOPE, rope=ROPE, v=V, **options)


def test_logits_of_the_heads_above_are_scaled_by_gamma_and_others_keep_every_bit(weights):
    q, kv_b, inputs = weights
    before = logits(q, kv_b, inputs)
    largest = before.amax(dim=(1, 2))
    threshold = largest.sort().values[2].item()  # two heads above, one exactly at it
    old_q, old_kv_b = q.clone(), kv_b.clone()
    gamma = clip(q, kv_b, largest, threshold=threshold)
    after = logits(q, kv_b, inputs)

    above = largest > threshold
    assert above.sum() == 2
    torch.testing.assert_close(after, before * gamma[:, None, None], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(
        after.amax(dim=(1, 2))[above], torch.full((2,), threshold, dtype=torch.float64), rtol=1e-14, atol=0
    )
    assert gamma[~above].eq(1).all()
    assert after[~above].equal(before[~above])
    for new, old in ((q, old_q), (kv_b, old_kv_b)):
        assert new.view(H, -1)[~above].equal(old.view(H, -1)[~above])
    assert kv_b.view(H, NOPE + V, -1)[:, NOPE:].equal(old_kv_b.view(H, NOPE + V, -1)[:, NOPE:])  # values


def test_the_default_threshold_is_100_and_a_head_that_saw_nothing_stays(weights):
    q, kv_b, _ = weights
    old = q.clone()
    gamma = clip(q, kv_b, torch.tensor([100.0, 200.0, -torch.inf, -5.0, 400.0]))
    assert gamma.tolist() == [1, 0.5, 1, 1, 0.25]
    changed = (q != old).view(H, -1).any(dim=1)
    assert changed.tolist() == [False, True, False, False, True]


def test_bfloat16_weights_are_scaled_in_float32_and_rounded_once(weights):
    q, kv_b, _ = (x.bfloat16() if isinstance(x, torch.Tensor) else x for x in weights)
    old = q.clone()
    clip(q, kv_b, torch.full((H,), 300.0))
    expected = old.view(H, NOPE + ROPE, -1).float()
    expected[:, :NOPE] *= torch.tensor(1 / 3).sqrt()
    expected[:, NOPE:] *= torch.tensor(1 / 3)
    torch.testing.assert_close(q, expected.view_as(q).bfloat16(), rtol=2**-8, atol=0)
    assert q.dtype == torch.bfloat16


def test_parameters_are_changed_in_place_outside_autograd(weights):
    q, kv_b = (torch.nn.Parameter(w) for w in weights[:2])
    old = q.detach().clone()
    clip(q, kv_b, torch.full((H,), 200.0))
    assert q.is_leaf
    torch.testing.assert_close(q.detach().view(H, -1, RANK_Q)[:, NOPE:], old.view(H, -1, RANK_Q)[:, NOPE:] / 2)


def test_mistakes_are_named(weights):
    q, kv_b, _ = weights
    high = torch.full((H,), 200.0)
    with pytest.raises(ShapeError, match=r"q_weight: expected 5 heads x 9 = 45 rows, got \[44, 7\]"):
        clip(q[1:], kv_b, high)
    with pytest.raises(ShapeError, match="kv_b_weight: expected 5 heads x 10 = 50 rows"):
        clip(q, kv_b[1:], high)
    with pytest.raises(ShapeError, match="threshold: expected > 0"):
        clip(q, kv_b, high, threshold=0.0)
    old = q.clone()
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ShapeError, match="max_logits: expected no inf or NaN"):
            clip(q, kv_b, torch.tensor([bad, 1.0, 1.0, 200.0, 1.0]))
    assert q.equal(old)

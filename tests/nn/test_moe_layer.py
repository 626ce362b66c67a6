"""The mixture of experts against one token after another, and what routing, norm and bias must not do."""

import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.nn import AuxLossBalancer, QuantileBalancer, StableLatentMoE, initialize_
from perilune.ops.quantile_bias import Groups

D, E, K, F, L, SHARED = 10, 6, 2, 7, 8, 9


def moe(dtype=torch.float64, **changes):
    options = {
        "num_experts": E, "top_k": K, "expert_size": F, "latent_size": L, "shared_size": SHARED,
        "balancer": QuantileBalancer(E, changes.get("top_k", K)),
    }  # fmt: skip
    made = StableLatentMoE(D, **{**options, **changes})
    for name, p in made.named_parameters():
        torch.nn.init.normal_(p, float("norm" in name), 0.5)
    torch.nn.init.normal_(made.balancer.bias, std=0.1)
    return made.to(dtype)


def activate(m, g, u):
    if m.activation == "silu":
        return g * torch.sigmoid(g) * u
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)


def token_by_token(m, x):
    """`x: [M, D]` to (y [M, D], the experts of each token)."""
    outputs, chosen = [], []
    for row in x:
        s = torch.sigmoid(m.gate.weight @ row)
        ids = (s.detach() + m.balancer.bias).argsort(descending=True)[: m.top_k].tolist()
        total = sum(s[e] for e in ids) if m.routing["renormalize"] else 1
        z = row if m.routed_expert_down_proj is None else m.routed_expert_down_proj.weight @ row
        u = sum(
            m.routing["scaling"] * s[e] / total
            * (m.experts.w2[e] @ activate(m, m.experts.w1[e] @ z, m.experts.w3[e] @ z))
            for e in ids
        )  # fmt: skip
        if m.routed_expert_norm is not None:
            u = u / (u.square().mean() + 1e-5).sqrt() * m.routed_expert_norm.weight
        y = u if m.routed_expert_up_proj is None else m.routed_expert_up_proj.weight @ u
        if m.shared_experts is not None:
            shared = m.shared_experts
            y = y + shared.down_proj.weight @ activate(m, shared.gate_proj.weight @ row, shared.up_proj.weight @ row)
        outputs.append(y)
        chosen.append(set(ids))
    return torch.stack(outputs), chosen


def chosen_by(m, x):
    """The experts of each token, read from what the layer hands to its balancer."""
    seen = []
    observe = m.balancer.observe
    m.balancer.observe = lambda scores, ids, mask: seen.append((scores, ids)) or observe(scores, ids, mask)
    m(x)
    del m.balancer.observe
    return seen[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"latent_norm": False, "scaling": 2.5},
        {"latent_size": None, "activation": "silu", "scaling": 2.446},  # Kimi Linear's
        {"shared_size": 0, "renormalize": False},
        {"top_k": E},
        {"top_k": 1},
    ],
)
def test_layer_is_the_loop_over_tokens_with_all_gradients(changes):
    m = moe(**changes)
    x = torch.randn(3, 5, D, dtype=torch.float64, requires_grad=True)
    expected, chosen = token_by_token(m, x.reshape(-1, D))
    expected = expected.view_as(x)
    assert [set(row) for row in chosen_by(m, x)[1].tolist()] == chosen
    torch.testing.assert_close(m(x), expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(x)
    names, inputs = zip(("x", x), *m.named_parameters())
    grads = [torch.autograd.grad((y * weights).sum(), inputs) for y in (m(x), expected)]
    for name, got, want in zip(names, *grads):
        scale = want.abs().max().clamp(min=1)
        assert (got - want).abs().max() <= 1e-11 * scale, name


def test_latent_norm_stands_after_the_sum_and_before_the_way_up():
    """So a common scale of the routing weights or of the experts' outputs is lost in it."""
    m, x = moe(shared_size=0), torch.randn(4, D, dtype=torch.float64)
    base = m(x)
    m.routing["scaling"] = 100.0
    torch.testing.assert_close(m(x), base, rtol=1e-3, atol=1e-3)  # but for the norm's eps
    m.routing["scaling"] = 1.0
    with torch.no_grad():
        m.experts.w2.mul_(100)
        torch.testing.assert_close(m(x), base, rtol=1e-3, atol=1e-3)
        m.routed_expert_up_proj.weight.mul_(3)
        torch.testing.assert_close(m(x), 3 * base, rtol=1e-3, atol=1e-3)


def test_router_and_shared_experts_read_the_full_width():
    m = moe()
    assert m.gate.weight.shape == (E, D)
    assert m.shared_experts.gate_proj.weight.shape == (SHARED, D)
    assert m.experts.w1.shape == m.experts.w3.shape == (E, F, L)
    assert m.experts.w2.shape == (E, L, F)
    assert m.routed_expert_norm.weight.shape == (L,)
    plain = moe(latent_size=None)
    assert plain.experts.w1.shape == (E, F, D)
    assert plain.routed_expert_down_proj is plain.routed_expert_up_proj is plain.routed_expert_norm is None


def test_weights_come_from_scores_and_the_choice_from_biased_scores():
    """Scores .6 .5 .4 .3, bias on expert 2: experts 2 and 0 with weights .8 and 1.2 at scaling 2."""
    m = StableLatentMoE(1, num_experts=4, top_k=2, expert_size=1, scaling=2.0, activation="silu").double()
    with torch.no_grad():
        m.gate.weight.copy_(torch.logit(torch.tensor([[0.6], [0.5], [0.4], [0.3]])))
        m.balancer.bias[2] = 0.3
        for w in (m.experts.w1, m.experts.w3):
            w.fill_(1)
        m.experts.w2.copy_(torch.tensor([1.0, 10, 100, 1000])[:, None, None])
    x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    assert chosen_by(m, x)[1].tolist() == [[2, 0]]
    one = 1 / (1 + torch.tensor(-1.0).double().exp())  # silu(1) * 1
    assert m(x).item() == pytest.approx((0.8 * 100 + 1.2 * 1) * one.item(), rel=1e-6)
    assert not m.balancer.bias.requires_grad
    assert "balancer.bias" not in dict(m.named_parameters())


def test_a_bias_moves_the_choice_only():
    m, x = moe(), torch.randn(20, D, dtype=torch.float64)
    base, (_, ids) = m(x), chosen_by(m, x)
    m.balancer.bias.add_(0.25)
    assert m(x).equal(base)  # the same for all
    m.balancer.bias.add_(1e-6 * torch.randn(E))
    assert chosen_by(m, x)[1].sort().values.equal(ids.sort().values)
    torch.testing.assert_close(
        m(x), base, rtol=1e-13, atol=1e-13
    )  # too little to change a choice: summed in other order
    m.balancer.bias[0] = 10
    assert (chosen_by(m, x)[1] == 0).any(-1).all()
    assert not torch.allclose(m(x), base)


def test_routing_weights_sum_to_one():
    """Experts that all return the same: so does their mixture."""
    m, x = moe(latent_norm=False, shared_size=0), torch.randn(20, D, dtype=torch.float64)
    with torch.no_grad():
        for w in m.experts.parameters():
            w.copy_(w[:1].expand_as(w))
    z = m.routed_expert_down_proj(x)
    one = activate(m, z @ m.experts.w1[0].T, z @ m.experts.w3[0].T) @ m.experts.w2[0].T
    torch.testing.assert_close(m(x), m.routed_expert_up_proj(one), rtol=1e-12, atol=1e-12)


def test_experts_without_tokens_get_gradients_of_zero():
    m = moe()
    m.balancer.bias[:] = torch.tensor([5.0, 0, 5.0, 0, 0, 0])
    m(torch.randn(30, D, dtype=torch.float64)).square().sum().backward()
    for w in m.experts.parameters():
        busy = w.grad.abs().amax((1, 2)) > 0
        assert busy.tolist() == [True, False, True, False, False, False]


def test_no_token_at_all_is_a_forward_too():
    m = moe()
    x = torch.randn(2, 0, D, dtype=torch.float64, requires_grad=True)
    y = m(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad.eq(0).all() for p in m.parameters())
    m.balancer.update()
    assert m.balancer.loads.eq(0).all()


def test_bfloat16_model_scores_in_float32():
    """.8800 .8805 .8790 are one bfloat16 number, and so are biases .30128 and .3: the choice must not be."""
    m = StableLatentMoE(2, num_experts=4, top_k=1, expert_size=3, latent_size=2).bfloat16()
    assert m.gate.weight.dtype == torch.bfloat16
    assert m.balancer.bias.dtype == torch.float32
    with torch.no_grad():  # logits 2 w0 + w1 / 256, with weights that bfloat16 holds
        m.gate.weight.copy_(torch.tensor([[1.0, 0.5], [1.0, 1.0], [1.0, 0.25], [-1.0, 0.0]]))
    x = torch.tensor([[2.0, 1 / 256]]).bfloat16()
    scores, ids = chosen_by(m, x)
    assert scores.dtype == torch.float32
    assert scores.bfloat16()[0, :3].unique().numel() == 1
    assert ids.tolist() == [[1]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, ids = chosen_by(m.float(), x.float())
    assert scores.dtype == torch.float32
    assert ids.tolist() == [[1]]
    with torch.no_grad():
        m.bfloat16().gate.weight.zero_()
        m.balancer.bias.copy_(torch.tensor([0.3000, 0.0, 0.30128125, 0.0]))
    assert chosen_by(m.bfloat16(), x)[1].tolist() == [[2]]


def test_bfloat16_stays_close():
    m = moe(torch.bfloat16)
    x = torch.randn(30, D).bfloat16()
    y = m(x)
    exact, _ = token_by_token(m.double(), x.double())
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= 2e-2 * exact.abs().max()


def test_auxiliary_loss_reaches_the_router_and_nothing_else():
    m = moe(balancer=AuxLossBalancer(E, K, coefficient=0.1))
    m.balancer.bias.zero_()
    x = torch.randn(30, D, dtype=torch.float64)
    m(x)
    scores, ids = chosen_by(m, x)
    fraction = (
        torch.zeros(E, dtype=torch.float64).index_add(0, ids.flatten(), torch.ones(ids.numel()).double()) / ids.numel()
    )
    expected = 0.1 * E * (fraction * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    torch.testing.assert_close(m.auxiliary_loss, expected)
    m.auxiliary_loss.backward()
    assert {name for name, p in m.named_parameters() if p.grad is not None} == {"gate.weight"}
    assert m.gate.weight.grad.abs().max() > 0
    m.eval()(x)
    assert m.auxiliary_loss is None
    without = moe()
    without(x)
    assert without.auxiliary_loss is None


def test_padding_is_computed_but_not_counted():
    m, twin = moe(), moe()
    twin.load_state_dict(m.state_dict())
    x, mask = torch.randn(2, 20, D, dtype=torch.float64), torch.rand(2, 20) < 0.6
    y = m(x, mask)
    assert y.equal(m.eval()(x))
    m.train().balancer.update()
    twin(x[mask])
    twin.balancer.update()
    assert m.balancer.loads.sum() == mask.sum() * K
    assert m.balancer.loads.equal(twin.balancer.loads)
    assert m.balancer.bias.equal(twin.balancer.bias)
    assert not m.balancer.bias.equal(moe().balancer.bias)


def test_every_parameter_has_its_distribution():
    m = StableLatentMoE(64, num_experts=16, top_k=2, expert_size=32, latent_size=48, shared_size=32)
    assert all(p.isfinite().all() for p in m.parameters())
    initialize_(m)
    for name, p in m.named_parameters():
        if name == "gate.weight":
            assert p.abs().max() <= 64**-0.5
            assert p.std().item() == pytest.approx((64 * 3) ** -0.5, rel=0.05)
        elif name == "routed_expert_norm.weight":
            assert p.eq(1).all()
        else:
            assert p.std().item() == pytest.approx(0.02, rel=0.1), name
    assert m.balancer.bias.eq(0).all()


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="top_k: expected from 1 to num_experts"):
        StableLatentMoE(D, num_experts=4, top_k=5, expert_size=F)


def test_a_layer_that_makes_its_own_balancer_tells_it_of_groups():
    made = moe(balancer=None, num_groups=3, topk_group=2)
    assert made.balancer.groups == Groups(3, 2)
    assert moe(balancer=None).balancer.groups is None

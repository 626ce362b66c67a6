import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perilune.core.errors import CheckpointError, ConfigError, ShapeError
from perilune.nn.balancer import (
    KINDS,
    AuxLossBalancer,
    Balancer,
    BandBalancer,
    QuantileBalancer,
    SignBalancer,
    balancer,
)
from perilune.nn.load import LoadWindow, dead_experts, gini
from perilune.nn.routing import route
from perilune.ops import quantile_bias
from perilune.ops.quantile_bias import Groups, score_histogram

E, TOP_K = 8, 2


def scores_of(tokens, seed=0, skew=1.0):
    random = torch.Generator().manual_seed(seed)
    tilt = skew * torch.linspace(-1, 1, E)
    return torch.sigmoid(torch.randn(tokens, E, generator=random) + tilt)


def observe(b, scores, mask=None):
    ids, _ = route(scores, b.bias, b.top_k)
    return b.observe(scores, ids, mask)


def step(b, *batches):
    for scores in batches:
        observe(b, scores)
    b.update()


NAMES = ["quantile", "exact", "decay", "ema", "sign", "band", "wide band", "aux", "none"]


def named(name):
    options = {"exact": {"bins": None}, "quantile": {"decay": None}, "ema": {"ema": 0.8}, "wide band": {"window": 3}}
    options["wide band"]["adaptive"] = False
    kind = name if name in KINDS else "band" if "band" in name else "quantile"
    return balancer(kind, E, TOP_K, **options.get(name, {}))


@pytest.fixture(params=NAMES)
def any_balancer(request):
    return named(request.param)


class Layer(nn.Module):
    """A router in somebody's model: the balancer is used as its docstring says."""

    def __init__(self, b):
        super().__init__()
        self.router = nn.Linear(6, E, bias=False)
        self.balancer = b

    def forward(self, x, mask=None):
        scores = torch.sigmoid(self.router(x.float()))
        ids, weights = route(scores, self.balancer.bias, TOP_K)
        loss = self.balancer.observe(scores, ids, mask)
        out = x * weights.max(-1, keepdim=True).values
        return out if loss is None else out + loss


# What every balancer keeps.


def test_bias_is_a_saved_buffer_of_mean_zero_and_no_parameter(any_balancer):
    step(any_balancer, scores_of(300))
    assert list(any_balancer.parameters()) == []
    assert list(any_balancer.state_dict()) == ["bias"]
    assert abs(any_balancer.bias.double().mean()) < 1e-6


def test_bias_moves_in_update_only_and_knows_no_later_batch(any_balancer):
    other = copy.deepcopy(any_balancer)
    for b, seed in ((any_balancer, 1), (other, 2)):
        step(b, scores_of(300))
        before = b.bias.clone()
        observe(b, scores_of(300, seed))
        assert torch.equal(b.bias, before)
    assert torch.equal(any_balancer.bias, other.bias)


def test_micro_batches_are_one_batch_bit_for_bit(any_balancer):
    whole, parts = any_balancer, copy.deepcopy(any_balancer)
    for seed in range(3):
        scores = scores_of(320, seed)
        step(whole, scores)
        step(parts, *scores.split([1, 100, 0, 219]))
        assert torch.equal(whole.bias, parts.bias)
        assert torch.equal(whole.loads, parts.loads)
        assert whole.loads.sum() == 320 * TOP_K


def test_two_ranks_pool_their_statistics(any_balancer):
    if getattr(any_balancer, "bins", 1) is None:
        with pytest.raises(ConfigError, match="bins: expected a number to pool over ranks"):
            any_balancer.statistics()
        return
    single, ranks = any_balancer, [copy.deepcopy(any_balancer) for _ in range(3)]
    for seed in range(3):
        scores = scores_of(320, seed)
        step(single, scores)
        for rank, share in zip(ranks, scores.split([200, 120, 0])):  # the last has no token
            observe(rank, share)
        for tensors in zip(*(rank.statistics() for rank in ranks)):
            assert not tensors[0].is_floating_point()
            total = sum(tensors)
            for tensor in tensors:
                tensor.copy_(total)
        for rank in ranks:
            rank.update()
            assert torch.equal(rank.bias, single.bias)
            assert torch.equal(rank.loads, single.loads)


def test_padding_is_never_counted(any_balancer):
    plain, padded = any_balancer, copy.deepcopy(any_balancer)
    scores = scores_of(100)
    loss = observe(plain, scores)
    full = torch.cat([scores[:60], torch.rand(30, E), scores[60:]]).view(2, 65, E)
    mask = ((torch.arange(130) < 60) | (torch.arange(130) >= 90)).view(2, 65)
    padded_loss = observe(padded, full, mask)
    if loss is not None:
        torch.testing.assert_close(padded_loss, loss)
    plain.update()
    padded.update()
    assert torch.equal(plain.bias, padded.bias)
    assert torch.equal(plain.loads, padded.loads)


def test_recomputation_counts_once(any_balancer):
    plain, again = Layer(any_balancer), None
    again = copy.deepcopy(plain)
    x = torch.randn(50, 6)
    for _ in range(2):
        plain(x).square().sum().backward()
        for reentrant in (False, True):
            one = copy.deepcopy(again)
            inputs = x.clone().requires_grad_()
            checkpoint(one, inputs, use_reentrant=reentrant).square().sum().backward()
            torch.testing.assert_close(one.router.weight.grad, plain.router.weight.grad)
            for a, b in zip(one.balancer._buffers_to_sum(), plain.balancer._buffers_to_sum()):
                assert torch.equal(a, b)
            one.balancer.update()
        plain.balancer.update()
        assert torch.equal(one.balancer.bias, plain.balancer.bias)
        assert plain.balancer.loads.sum() == 50 * TOP_K
        again = one
        for layer in (plain, again):
            layer.zero_grad()


@pytest.mark.parametrize("stop", ["eval", "freeze"])
def test_nothing_is_observed_in_eval_or_frozen(any_balancer, stop):
    b = any_balancer
    step(b, scores_of(100))
    before = copy.deepcopy(b)
    getattr(b, stop)()
    assert observe(b, scores_of(100, 1)) is None
    b.update()
    assert torch.equal(b.bias, before.bias)
    assert torch.equal(b.loads, before.loads)
    b.train()
    b.unfreeze()
    for x in (b, before):
        step(x, scores_of(100, 2))
    assert torch.equal(b.bias, before.bias)
    assert torch.equal(b.loads, before.loads)


def test_a_discarded_step_leaves_no_trace(any_balancer):
    kept = copy.deepcopy(any_balancer)
    observe(any_balancer, scores_of(100, 7))
    any_balancer.discard()
    any_balancer.update()
    assert torch.equal(any_balancer.bias, kept.bias)
    for b in (any_balancer, kept):
        step(b, scores_of(100))
    assert torch.equal(any_balancer.bias, kept.bias)


def test_update_without_observation_changes_nothing(any_balancer):
    step(any_balancer, scores_of(100))
    before, loads = any_balancer.bias.clone(), any_balancer.loads.clone()
    state = any_balancer.training_state()
    any_balancer.update()
    any_balancer.update()
    assert torch.equal(any_balancer.bias, before)
    assert torch.equal(any_balancer.loads, loads)
    for name, value in any_balancer.training_state().items():
        assert torch.equal(value, state[name])


def test_resume_goes_on_bit_for_bit(any_balancer):
    resumed = copy.deepcopy(any_balancer)
    for seed in range(3):
        step(any_balancer, scores_of(50, seed))
    resumed.load_state_dict(any_balancer.state_dict())
    resumed.load_training_state(any_balancer.training_state())
    for seed in range(3, 6):
        for b in (any_balancer, resumed):
            step(b, scores_of(50, seed))
        assert torch.equal(any_balancer.bias, resumed.bias)


def test_training_state_is_a_copy(any_balancer):
    step(any_balancer, scores_of(50))
    state = any_balancer.training_state()
    saved = {name: value.clone() for name, value in state.items()}
    step(any_balancer, scores_of(50, 1))
    assert all(torch.equal(state[name], saved[name]) for name in state)


def test_bias_stays_float32_under_every_cast(any_balancer):
    values = torch.tensor([0.30128125, 0.3000] + [0.0] * 6)
    assert values[0].bfloat16() == values[1].bfloat16()
    any_balancer.bias.copy_(values)
    model = nn.Sequential(nn.Linear(2, 2), any_balancer)
    for cast in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)):
        cast(model)
        assert model[0].weight.dtype.itemsize == 2
        assert any_balancer.bias.dtype == torch.float32
        assert torch.equal(any_balancer.bias, values)
    loaded = copy.deepcopy(any_balancer)
    loaded.load_state_dict(any_balancer.state_dict())
    assert torch.equal(loaded.bias, values)
    loaded.load_state_dict({"bias": values.bfloat16()}, assign=True)
    assert loaded.bias.dtype == torch.float32
    step(any_balancer, scores_of(50))
    assert any_balancer.bias.dtype == torch.float32
    assert any_balancer.double().bias.dtype == torch.float64


def test_state_is_not_rounded_by_casts():
    b = QuantileBalancer(E, TOP_K, decay=0.75, ema=0.5)
    step(b, scores_of(50))
    before = b.training_state()
    b.bfloat16()
    assert all(torch.equal(value, before[name]) for name, value in b.training_state().items())


def test_no_gradient_reaches_the_bias_and_the_loss_is_the_same_with_and_without_balancing():
    layer = Layer(QuantileBalancer(E, TOP_K))
    off = copy.deepcopy(layer)
    off.balancer = Balancer(E, TOP_K)
    x = torch.randn(20, 6)
    for one in (layer, off):
        one(x).sum().backward()
    assert torch.equal(layer(x), off(x))
    assert torch.equal(layer.router.weight.grad, off.router.weight.grad)
    assert layer.router.weight.grad.abs().sum() > 0
    assert layer.balancer.bias.grad is None


# Nothing waits for a device.


class NoLookBack(TorchDispatchMode):
    """Refuses what makes the host wait for a GPU: values read back, shapes that depend on values, copies to it."""

    FORBIDDEN = (
        "item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "bincount",
        "unique", "_unique2", "unique_consecutive", "unique_dim", "repeat_interleave", "histc", "masked_scatter",
    )  # fmt: skip

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in self.FORBIDDEN:
            raise AssertionError(f"{op} makes the host wait")
        if name.startswith(("index", "_index_put")) and any(
            x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)
        ):
            raise AssertionError(f"{op} by a mask makes the host wait")
        if len({x.device for x in tensors if x.dim()}) > 1:
            raise AssertionError(f"{op} makes a copy to the device")
        return op(*args, **kwargs)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name, masked, device):
    """Also on tensors without values, where nothing can be read back at all, not even by `tolist`."""
    with torch.device(device):
        b = named(name)
    scores = torch.rand(20, E, device=device, requires_grad=True)
    ids = scores.topk(TOP_K).indices
    mask = (torch.rand(20, device=device) < 0.5) if masked else None
    with NoLookBack():
        for observed in (2, 1, 0):
            for _ in range(observed):
                loss = b.observe(scores, ids, mask)
                if loss is not None:
                    loss.backward()
            b.update()
        b.observe(scores, ids, mask)
        b.discard()


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.any().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0.5],
        lambda x: x.masked_select(x > 0.5),
        lambda x: x.nonzero(),
        lambda x: x.long().bincount(),
        lambda x: x.index_put_((x > 0.5,), x.new_zeros(())),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
    ],
)
def test_a_look_back_is_noticed(look):
    with NoLookBack(), pytest.raises(AssertionError, match="makes the host wait"):
        look(torch.rand(5))


def test_masked_tokens_may_hold_anything(any_balancer):
    clean, dirty = any_balancer, copy.deepcopy(any_balancer)
    scores, mask = scores_of(60), torch.arange(60) % 3 > 0
    ids, _ = route(scores, clean.bias, TOP_K)
    rubbish = torch.where(mask[:, None], scores, torch.nan).requires_grad_()
    losses = clean.observe(scores, ids, mask), dirty.observe(rubbish, ids, mask)
    if losses[0] is not None:
        assert torch.equal(*losses)
        losses[1].backward()
        assert rubbish.grad.isfinite().all()
        assert not rubbish.grad[~mask].any()
    clean.update()
    dirty.update()
    assert torch.equal(clean.bias, dirty.bias)
    assert clean.bias.isfinite().all()


def test_a_step_of_padding_alone_changes_nothing(any_balancer):
    """Neither the first step, before there is any state, nor a later one."""
    padded, plain = any_balancer, copy.deepcopy(any_balancer)
    for seed in range(6):
        if seed % 2 == 0:
            loss = observe(padded, scores_of(30, 9), torch.zeros(30, dtype=torch.bool))
            assert loss is None or loss.item() == 0
            padded.update()
        for b in (padded, plain):
            step(b, scores_of(100, seed))
        assert torch.equal(padded.bias, plain.bias)
        assert torch.equal(padded.loads, plain.loads)
    state, expected = padded.training_state(), plain.training_state()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


# Each rule.


def test_quantile_balancer_overwrites_with_the_quantile_of_the_step():
    for bins in (None, 1000, 20):
        b = QuantileBalancer(E, TOP_K, bins=bins, decay=None)
        bias = torch.zeros(E)
        for seed in range(3):
            scores = scores_of(300, seed)
            step(b, *scores.split(100))
            bias = quantile_bias(scores, bias, TOP_K, bins=bins)
            assert torch.equal(b.bias, bias)


def test_ema_smooths_the_estimates():
    b = QuantileBalancer(E, TOP_K, decay=None, ema=0.9)
    step(b, scores_of(300))
    first = b.bias.clone()
    torch.testing.assert_close(first, quantile_bias(scores_of(300), torch.zeros(E), TOP_K, bins=1000))
    step(b, scores_of(300, 1))
    second = quantile_bias(scores_of(300, 1), first, TOP_K, bins=1000)
    torch.testing.assert_close(b.bias, 0.9 * first + 0.1 * second)


def test_decay_pools_steps_while_the_bias_stays():
    b, trust = QuantileBalancer(E, TOP_K, decay=0.5), []
    for seed in range(6):
        before, tokens = b.bias.clone(), 0.0 if b.pooled is None else b.pooled[0].sum().item()
        step(b, scores_of(4000, seed))
        trust.append((1 - (b.bias - before).std() / b.bias.std()).clamp(min=0).item())
        expected = trust[-1] * (4000 + 0.5 * tokens)
        assert b.training_state()["pooled"].sum(-1).tolist() == pytest.approx([expected] * E, rel=1e-5)
    assert trust[0] == 0  # everything counted with the bias of the start is forgotten
    assert trust[-1] > 0.9
    # With the same bias throughout, pooled steps are one batch in which the older count for less.
    b = QuantileBalancer(E, TOP_K, decay=0.5)
    old, new = scores_of(1000, 1), scores_of(2000, 2)
    b.pooled = score_histogram(old, b.bias, TOP_K).float()
    step(b, new)
    one_batch = quantile_bias(torch.cat([old, new, new]), torch.zeros(E), TOP_K, bins=1000)
    torch.testing.assert_close(b.bias, one_batch, rtol=0, atol=1e-6)


def test_pooling_evens_small_correlated_steps():
    """Four documents a step, each with a taste of its own: a step alone misleads, pooled steps do not."""
    experts, top_k = 32, 4
    random = torch.Generator().manual_seed(0)
    router, tilt = torch.randn(16, experts, generator=random) / 4, torch.randn(experts, generator=random)
    topics = torch.randn(24, 16, generator=random)
    rules = {decay: QuantileBalancer(experts, top_k, decay=decay) for decay in (None, 0.85)}
    windows = {decay: LoadWindow(40) for decay in rules}
    for _ in range(60):
        x = topics[torch.randint(24, (4,), generator=random)].repeat_interleave(64, 0)
        scores = torch.sigmoid((x + torch.randn(256, 16, generator=random)) @ router + tilt)
        for decay, b in rules.items():
            step(b, scores)
            windows[decay].add(b.loads)
    uneven = {decay: gini(window.total()) for decay, window in windows.items()}
    assert uneven[0.85] < 0.7 * uneven[None]
    assert uneven[0.85] < 0.1


def test_896_experts_recover_from_collapse_in_one_update():
    b = balancer("quantile", 896, 16)
    skew = 1.8 * torch.randn(896)
    seen = []
    for _ in range(4):
        scores = torch.sigmoid(0.7 * torch.randn(8192, 896) + skew)
        observe(b, scores)
        b.update()
        seen.append((gini(b.loads), dead_experts(b.loads)))
    assert seen[0][0] > 0.8
    assert seen[0][1] > 200
    assert seen[1][0] < 0.1
    assert seen[1][1] == 0
    assert seen[3][0] < 0.07  # chance alone gives 0.047 at this batch size


def test_every_token_to_every_expert_needs_no_balance():
    b = QuantileBalancer(4, 4)
    b.observe(torch.rand(10, 4), torch.arange(4).expand(10, 4))
    b.update()
    assert b.bias.tolist() == [0] * 4
    assert b.loads.tolist() == [10] * 4


def test_sign_balancer_steps_towards_the_mean():
    b = SignBalancer(4, 1, step=0.1)
    b.observe(torch.rand(8, 4), torch.tensor([1, 1, 1, 0, 2, 0, 0, 0]).unsqueeze(1))  # loads 4 3 1 0, mean 2
    b.update()
    torch.testing.assert_close(b.bias, torch.tensor([-0.1, -0.1, 0.1, 0.1]))
    b.observe(torch.rand(8, 4), torch.tensor([0, 0, 1, 1, 2, 2, 2, 3]).unsqueeze(1))  # experts 0 and 1 at the mean
    b.update()
    torch.testing.assert_close(b.bias, torch.tensor([-0.1, -0.1, 0.0, 0.2]))


def test_band_quantiles_are_torchs():
    b = BandBalancer(E, TOP_K, window=3, step=0.1, low=0.13, high=0.81, adaptive=False)
    window, bias = LoadWindow(3), torch.zeros(E)
    for seed in range(5):  # from a window that is not yet full to one that forgets
        step(b, scores_of(77, seed))
        window.add(b.loads)
        loads = window.stack().double()
        low, high = torch.quantile(loads, torch.tensor([0.13, 0.81], dtype=loads.dtype))
        push = (loads.mean(0) < low).double() - (loads.mean(0) > high).double()
        bias = bias + 0.1 * push
        bias = (bias - bias.mean()).float()
        assert torch.equal(b.bias, bias)
        assert torch.equal(b.training_state()["window"], window.stack())


@pytest.mark.parametrize("adaptive", [False, True])
def test_band_balancer_moves_the_outer_deciles_of_pooled_loads(adaptive):
    b = BandBalancer(4, 1, window=2, step=0.1, low=0.25, high=0.75, adaptive=adaptive)
    b.observe(torch.rand(12, 4), torch.tensor([0] * 8 + [1] * 2 + [2] * 2).unsqueeze(1))  # loads 8 2 2 0
    b.update()
    # Quartiles 1.5 and 3.5 of 0 2 2 8: expert 0 above, 3 below; (3.5 - 1.5) / (2 * 3) of the step when adaptive.
    size = 0.1 / 3 if adaptive else 0.1
    torch.testing.assert_close(b.bias, torch.tensor([-size, 0, 0, size]))


def test_aux_loss_is_its_coefficient_at_balance_and_has_a_gradient_through_scores():
    b = AuxLossBalancer(4, 1, coefficient=0.01)
    even = torch.full((4, 4), 0.5)
    loss = b.observe(even, torch.arange(4).unsqueeze(1))
    torch.testing.assert_close(loss, torch.tensor(0.01))
    skewed = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).repeat(4, 1).requires_grad_()
    loss = b.observe(skewed, torch.zeros(4, 1, dtype=torch.int64))  # f = 1 0 0 0, P_0 = 0.6
    torch.testing.assert_close(loss, torch.tensor(0.01 * 4 * 0.6))
    loss.backward()
    assert (skewed.grad[:, 0] > 0).all()
    b.update()
    assert b.bias.tolist() == [0] * 4
    assert b.observe(skewed[:0], torch.zeros(0, 1, dtype=torch.int64)).item() == 0


def test_aux_loss_is_not_rounded_under_autocast():
    b, scores = AuxLossBalancer(4, 1, coefficient=0.01), scores_of(100)[:, :4]
    ids = scores.topk(1).indices
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = b.observe(scores, ids)
    assert loss.dtype == scores.dtype
    assert loss.equal(b.observe(scores, ids))


def test_a_layer_without_balancing_stops_no_other():
    layers = [Balancer(E, TOP_K).freeze(), QuantileBalancer(E, TOP_K), QuantileBalancer(E, TOP_K)]
    for b in layers:
        observe(b, scores_of(100))
    for b in layers:
        b.update()
    assert [bool(b.bias.any()) for b in layers] == [False, True, True]
    assert not any(t.any() for b in layers for t in b.statistics())


# Mistakes of the caller.


def test_factory_knows_every_kind_and_names_the_nearest():
    assert type(balancer("none", E, TOP_K)) is Balancer
    assert isinstance(balancer("quantile", E, TOP_K, ema=0.9), QuantileBalancer)
    assert isinstance(balancer("band", E, TOP_K, window=1, adaptive=False), BandBalancer)
    assert balancer("quantile", E, TOP_K, groups=Groups(4, 2)).groups == Groups(4, 2)
    assert balancer("quantile", E, TOP_K, groups=Groups(4, 4)).groups is None  # all are kept: they limit nothing
    assert isinstance(balancer("sign", E, TOP_K, groups=Groups(4, 2)), SignBalancer)  # which has no use for them
    with pytest.raises(ConfigError, match=r"'quantle'; do you mean 'quantile'\?"):
        balancer("quantle", E, TOP_K)
    with pytest.raises(ConfigError, match=r"'stepp'; do you mean 'step'\?"):
        balancer("sign", E, TOP_K, stepp=1)
    with pytest.raises(ConfigError, match="it takes none"):
        balancer("none", E, TOP_K, step=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Balancer(4, 5), "top_k: expected 1 to 4 experts, got 5"),
        (lambda: QuantileBalancer(4, 1, bins=0), "bins: expected 1 or more"),
        (lambda: QuantileBalancer(4, 1, ema=1.0), "ema: expected at least 0 and below 1, got 1.0"),
        (lambda: QuantileBalancer(4, 1, decay=-0.1), "decay: expected at least 0"),
        (lambda: QuantileBalancer(8, 3, groups=Groups(4, 1)), "groups: expected a number that divides 8 experts"),
        (lambda: SignBalancer(4, 1, step=0.0), "step: expected above 0"),
        (lambda: BandBalancer(4, 1, low=0.9, high=0.1), "low, high: expected"),
        (lambda: AuxLossBalancer(4, 1, coefficient=-1.0), "coefficient: expected 0 or more"),
    ],
)
def test_impossible_options(make, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        make()


@pytest.mark.parametrize("mask", [torch.ones(49, dtype=torch.bool), torch.ones(50)])
def test_a_mask_that_does_not_fit_is_refused(mask):
    with pytest.raises(ShapeError, match=r"mask: expected bool \[50\], got"):
        observe(Balancer(E, TOP_K), scores_of(50), mask)


def test_state_of_another_rule_is_refused():
    b = BandBalancer(E, TOP_K)
    step(b, scores_of(50))
    with pytest.raises(CheckpointError, match=r"of SignBalancer, got \['window'\]"):
        SignBalancer(E, TOP_K).load_training_state(b.training_state())


def test_a_balancer_told_of_groups_balances_what_they_limit():
    """64 experts in 8 groups of which a token sees 3; half the imbalance, or less, of a balancer that is not told."""
    random = torch.Generator().manual_seed(0)
    popular, features = torch.randn(64, generator=random), torch.randn(16, 64, generator=random) / 4
    ginis = {}
    for groups in (None, Groups(8, 3)):
        balancer = QuantileBalancer(64, 6, groups=groups)
        for _ in range(16):
            scores = torch.sigmoid(torch.randn(2048, 16, generator=random) @ features + popular)
            ids, _ = route(scores, balancer.bias, 6, num_groups=8, topk_group=3)
            balancer.observe(scores, ids)
            balancer.update()
        ginis[groups] = gini(balancer.loads)
    assert ginis[Groups(8, 3)] < 0.06
    assert ginis[Groups(8, 3)] < 0.5 * ginis[None]

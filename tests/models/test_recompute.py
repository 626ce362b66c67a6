"""Activations that are computed again: the same bits, everything noted down once, and only what was promised kept."""

import gc
from itertools import pairwise

import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.nn import BlockAttnRes, GatedMLA, StableLatentMoE
from perilune.nn.recompute import _Record, decided, recomputed, recomputing
from perilune.plan.layout import Layout, Work, stages
from perilune.plan.memory import memory
from perilune.plan.sizes import sizes
from tiny_k3 import config, ids, model

UNITS = ("sublayers", "layers", "blocks")
CU = [0, 50, 50, 51, 120]


def step(k3, tokens, *, autocast=False):
    """Losses, gradients, all that balancers and QK-clip noted down, and the ids of every routing in its order."""
    routes = []
    handles = [
        moe.register_forward_pre_hook(lambda m, _: routes.append((m, recomputing()))) for m in k3.modules()
        if isinstance(moe := m, StableLatentMoE)
    ]  # fmt: skip
    for attention in k3.latent_attentions().values():
        attention.track_max_logits = True
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = k3(tokens, cu_seqlens=CU, labels=tokens)
    output.loss.backward()
    for handle in handles:
        handle.remove()
    grads = {name: p.grad.clone() for name, p in k3.named_parameters()}
    noted = [t.clone() for balancer in k3.balancers().values() for t in balancer.statistics()]
    noted += [attention.max_logits.clone() for attention in k3.latent_attentions().values()]
    for balancer in k3.balancers().values():
        balancer.discard()
    for attention in k3.latent_attentions().values():
        attention.max_logits = None
    k3.zero_grad()
    return {**output.losses, "loss": output.loss.detach()}, grads, noted, routes


@pytest.mark.parametrize("size", [1, 2, 3, "full", None])
@pytest.mark.parametrize("kind", ["quantile", "aux"])
def test_every_bit_is_the_same(size, kind):
    """In float32: losses, gradients, observations; with two layers that predict further."""
    made = {"attn_res_block_size": size, "num_nextn_predict_layers": 2, "balance": config().balance.replace(kind=kind)}
    k3, tokens = model(torch.float32, **made), ids(1, 120)
    losses, grads, noted, routes = step(k3, tokens)
    assert [again for _, again in routes] == [False] * 6
    for unit in UNITS:
        if unit == "blocks" and size is None:
            continue
        k3.recompute_activations(unit)
        other_losses, other_grads, other_noted, other_routes = step(k3, tokens)
        assert losses.keys() == other_losses.keys()
        assert all(torch.equal(loss, other_losses[name]) for name, loss in losses.items())
        for name, grad in grads.items():
            assert torch.equal(other_grads[name], grad), (unit, name)
        assert all(map(torch.equal, noted, other_noted)), unit
        assert [again for _, again in other_routes].count(False) == 6
        assert any(again for _, again in other_routes)  # it did run twice


@pytest.mark.parametrize("unit", UNITS)
def test_under_autocast_too(unit):
    k3, tokens = model(torch.float32, num_nextn_predict_layers=1), ids(1, 120)
    losses, grads, noted, _ = step(k3, tokens, autocast=True)
    plain = step(k3, tokens)[1]
    assert any(not torch.equal(grad, plain[name]) for name, grad in grads.items())
    k3.recompute_activations(unit)
    other_losses, other_grads, other_noted, _ = step(k3, tokens, autocast=True)
    assert all(torch.equal(loss, other_losses[name]) for name, loss in losses.items())
    assert all(torch.equal(other_grads[name], grad) for name, grad in grads.items())
    assert all(map(torch.equal, noted, other_noted))


@pytest.mark.parametrize("unit", UNITS)
def test_gradients_add_up_over_passes(unit):
    """The bank's shared sums are those of one backward pass each."""
    k3, parts = model(torch.float32), [ids(1, 120) for _ in range(3)]
    found = []
    for kept in ("none", unit):
        k3.recompute_activations(kept)
        for part in parts:
            k3(part, cu_seqlens=CU, labels=part).loss.backward()
        found.append({name: p.grad.clone() for name, p in k3.named_parameters()})
        k3.zero_grad()
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


@pytest.mark.parametrize("unit", UNITS)
def test_the_largest_logits_are_looked_for_once(unit, monkeypatch):
    seen = []
    plain = GatedMLA._record_max_logits
    monkeypatch.setattr(GatedMLA, "_record_max_logits", lambda *args: (seen.append(args[0]), plain(*args))[1])
    k3 = model(torch.float32)
    k3.recompute_activations(unit)
    step(k3, ids(1, 120))
    assert len(seen) == 2


@pytest.mark.parametrize("unit", UNITS)
def test_no_auxiliary_loss_of_the_second_run_is_held(unit):
    k3, tokens = model(torch.float32, balance=config().balance.replace(kind="aux")), ids(1, 120)
    k3.recompute_activations(unit)
    moe = next(m for m in k3.modules() if isinstance(m, StableLatentMoE))
    loss = k3(tokens, cu_seqlens=CU, labels=tokens).loss
    first = moe.auxiliary_loss
    loss.backward()
    assert moe.auxiliary_loss is first


@pytest.mark.parametrize("unit", UNITS)
def test_a_token_takes_the_experts_it_took(unit, monkeypatch):
    """Scores that come out another way when they are computed again, as on a device that adds up in no fixed order."""
    k3, tokens, chosen = model(torch.float32), ids(1, 120), []
    k3.recompute_activations(unit)
    gate = k3.model.layers[2].block_sparse_moe.gate
    plain = gate.forward
    monkeypatch.setattr(gate, "forward", lambda x: plain(x) if not recomputing() else plain(x).flip(-1))
    from perilune.nn import moe

    experts = moe.grouped_experts

    def spy(*args, **options):
        chosen.append((args[4].clone(), recomputing()))
        return experts(*args, **options)

    monkeypatch.setattr(moe, "grouped_experts", spy)
    k3(tokens, cu_seqlens=CU, labels=tokens).loss.backward()
    first = [i for i, again in chosen if not again]
    second = [i for i, again in chosen if again]
    assert len(first) == 4
    assert len(second) >= 4
    for found in second:
        assert any(torch.equal(found, made) for made in first)


def test_decisions_of_nested_functions_are_those_of_the_first_run():
    """Every choice is drawn by chance: the second run would choose otherwise."""
    drawn, used = [], []

    def draw():
        drawn.append(torch.rand(3))
        return drawn[-1]

    def inner(x):
        used.append(decided(draw))
        return (x * used[-1]).sin()

    def outer(x):
        used.append(decided(draw))
        return recomputed(inner, recomputed(inner, x * used[-1]))

    x = torch.ones(3, requires_grad=True)
    y = recomputed(outer, recomputed(outer, x))
    y.sum().backward()
    assert len(drawn) == 6
    assert len(used) > 12
    assert all(any(value is choice for choice in drawn) for value in used)
    a, b, c, d, e, f = drawn
    z = torch.ones(3, requires_grad=True)
    (((((z * a * b).sin() * c).sin() * d) * e).sin() * f).sin().sum().backward()
    assert torch.equal(x.grad, z.grad)
    assert torch.equal(decided(draw), drawn[-1])  # outside: anew every time
    assert len(drawn) == 7


def test_what_runs_without_gradients_runs_once(monkeypatch):
    k3, tokens, ran = model(torch.float32), ids(1, 20), []
    monkeypatch.setattr(
        BlockAttnRes, "forward", lambda *args, plain=BlockAttnRes.forward: (ran.append(args[0]), plain(*args))[1]
    )
    for unit in ("none", *UNITS):
        k3.recompute_activations(unit)
        with torch.no_grad():
            k3(tokens, labels=tokens)
        k3.eval()
        k3(tokens, cache=k3.new_cache(1))
        k3.train()
    assert len(ran) == 4 * 2 * 11


def test_what_cannot_be_says_so():
    with pytest.raises(ConfigError, match=r"^recompute: expected one of none, sublayers, layers, blocks, got 'block'"):
        model().recompute_activations("block")
    with pytest.raises(ConfigError, match=r'no "blocks" in a model without attention residuals'):
        model(attn_res_block_size=None).recompute_activations("blocks")


# what is kept


def kept(k3, tokens) -> dict[tuple, int]:
    """How many tensors of a shape and dtype the graph of one forward pass keeps; parameters and buffers left out."""
    owned = {x.untyped_storage().data_ptr() for x in (*k3.parameters(), *k3.buffers())}
    saved = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in owned:
            saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        k3(tokens, targets=tokens.roll(-1, 1))
    found = {}
    for x in saved.values():
        key = (x.untyped_storage().nbytes() // x.element_size(), x.dtype)
        found[key] = found.get(key, 0) + 1
    return found


def deep(layers, size, **changes):
    linear = config().linear_attn_config
    full = tuple(range(2, layers + 1, 2))
    linear = linear.replace(kda_layers=tuple(range(1, layers + 1, 2)), full_attn_layers=full)
    return model(
        torch.float32, num_hidden_layers=layers, linear_attn_config=linear, attn_res_block_size=size, **changes
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("unit", "size", "more"),
    [
        ("sublayers", 2, 8),
        ("sublayers", None, 8),
        ("layers", 2, 4),
        ("layers", None, 4),
        ("blocks", 2, 2),
        ("blocks", 4, 1),
    ],
)
def test_four_layers_more_keep_nothing_but_their_inputs(unit, size, more, autocast):
    """By sublayer, layer or block one live sum [T, D]; no tensor of any other size, not one number."""
    tokens, counts = ids(1, 64), []
    for layers in (4, 8, 12):
        k3 = deep(layers, size)
        k3.recompute_activations(unit)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            counts.append(kept(k3, tokens))
        if size is not None:  # the last mixer's two numbers for every source
            sources = 1 + layers // size
            assert counts[-1].pop((64 * 2 * sources, torch.float32)) == 1
    stream = (64 * 32, torch.float32)
    for few, many in pairwise(counts):
        assert many[stream] - few[stream] == more
        assert {**many, stream: 0} == {**few, stream: 0}


@pytest.mark.parametrize("unit", UNITS)
def test_choices_of_experts_are_held_once(unit):
    """[T, top_k] int64 of every MoE layer, which hooks on saved tensors do not see; gone with the graph."""

    def held():
        gc.collect()
        records = [x for x in gc.get_objects() if type(x) is _Record]
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for r in records for t in r.values}.values())

    before, k3, tokens = held(), model(torch.float32), ids(1, 64)
    k3.recompute_activations(unit)
    loss = k3(tokens, labels=tokens).loss
    (stage,) = stages(k3.config, sizes(k3.config), 1)
    layout, work = Layout(1, 1, 1, 1, "weights", unit, 1), Work("", 64, 64, 64)
    planned = memory(k3.config, stage, layout, work).passes["choices of experts"]
    assert held() - before == planned == 4 * 64 * 2 * 8
    loss.backward()
    del loss
    assert held() == before


def test_the_least_that_is_kept_by_depth():
    """Bytes of the graph for 12 layers and for 4: recomputing blocks keeps least, everything most."""
    tokens, growth = ids(1, 64), {}
    for unit in ("none", *UNITS):
        sizes = []
        for layers in (4, 12):
            k3 = deep(layers, 4)
            k3.recompute_activations(unit)
            sizes.append(sum(n * key[0] * key[1].itemsize for key, n in kept(k3, tokens).items()))
        growth[unit] = (sizes[1] - sizes[0]) / 8 / (64 * 32 * 4)  # a layer, in live sums
    assert growth["none"] > 20
    assert 2 <= growth["sublayers"] < 2.05
    assert 1 <= growth["layers"] < 1.05
    assert 0.25 <= growth["blocks"] < 0.3

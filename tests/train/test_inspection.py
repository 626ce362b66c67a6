"""What hooks read against the same figures worked out otherwise, and a model that does not notice."""

import copy
import itertools
import json
import math

import pytest
import torch

from perilune.data.packing import evaluation_batches
from perilune.data.tokenizer import ByteBPE
from perilune.models.k3 import K3Model
from perilune.nn import KimiDeltaAttention
from perilune.optim import PerHeadMuon
from perilune.train.evaluate import bits_per_byte, sample_texts
from perilune.train.inspection import decoder_layers, half_lives, inspect, observe, percentiles, rms
from tiny_k3 import config, model
from tiny_run import corpus, run

TEXTS = [document.text for document in corpus().held_out]


@pytest.fixture(scope="module")
def tokenizer():
    return ByteBPE.train([document.text for document in corpus().train], 300)


@pytest.fixture(scope="module")
def k3():
    torch.manual_seed(4)
    return model(vocab_size=300)


@pytest.fixture(scope="module")
def batch(tokenizer):
    """Pieces of 40, 40, ... and the rest of the documents."""
    return evaluation_batches(tokenizer.encode_documents(TEXTS), 40, 300)[0]


@pytest.fixture(scope="module")
def readings(k3, batch):
    return observe(k3, batch)


@torch.no_grad()
def walk(k3, batch):
    """The forward pass by hand: (name, sources, weights, input, output) of every sublayer, and of the output mixer."""
    bank, live, reads = [], k3.model.embed_tokens(batch.input_ids), 0
    cu = batch.cu_seqlens.tolist()

    def weights(mixer):
        scores = []
        for v in [*bank, live]:
            key = v / (v.square().mean(-1, keepdim=True) + mixer.norm.eps).sqrt() * mixer.norm.weight
            scores.append((key * mixer.query).sum(-1))
        scores = torch.stack(scores, -1)
        return scores.exp() / scores.exp().sum(-1, keepdim=True)  # [1, T, N]

    def mixed(a):
        return sum(a[..., i, None] * v for i, v in enumerate([*bank, live]))

    for i, layer in enumerate(k3.model.layers):
        for name, mixer in (("attention", layer.self_attention_res), ("feed_forward", layer.mlp_res)):
            a = weights(mixer)
            h = mixed(a)
            if reads % k3.model.period == 0:
                bank, live = [*bank, live], torch.zeros_like(live)
            reads += 1
            if name == "attention":
                out = layer.self_attn(layer.input_layernorm(h), cu_seqlens=cu)
            else:
                out = (layer.block_sparse_moe or layer.mlp)(layer.post_attention_layernorm(h))
            live = live + out
            yield f"{i}.{name}", a, h, out
    a = weights(k3.model.output_attn_res)
    yield "output", a, mixed(a), None


def test_depth_weights_and_norms_are_those_of_a_pass_by_hand(k3, batch, readings):
    steps = list(walk(k3.eval(), batch))
    assert [reading["sublayer"] for reading in readings.depth_attention] == [name for name, *_ in steps]
    assert [len(reading["weights"]) for reading in readings.depth_attention] == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    for reading, (_, a, _, _) in zip(readings.depth_attention, steps):
        assert reading["weights"] == pytest.approx(a.mean((0, 1)).tolist(), rel=1e-9)
        assert sum(reading["weights"]) == pytest.approx(1)
    assert len(readings.activation_rms) == 2 * len(k3.model.layers)
    for reading, (name, _, h, out) in zip(readings.activation_rms, steps):
        assert reading["sublayer"] == name
        assert reading["input"] == pytest.approx(float(h.square().mean().sqrt()), rel=1e-9)
        assert reading["output"] == pytest.approx(float(out.square().mean().sqrt()), rel=1e-9)
    assert max(weight for reading in readings.depth_attention[1:] for weight in reading["weights"]) > 0.6


def test_the_state_is_what_the_cache_holds_at_the_ends(k3, batch, readings):
    cu = batch.cu_seqlens.tolist()
    cache = k3.new_cache(len(cu) - 1)
    with torch.no_grad():
        k3.eval()(batch.input_ids, cache=cache, cu_seqlens=cu)
    kda = [i for i, layer in enumerate(k3.model.layers) if isinstance(layer.self_attn, KimiDeltaAttention)]
    assert list(readings.state_rms) == [str(i) for i in kda] == ["0", "2", "3"]
    for i in kda:
        assert readings.state_rms[str(i)] == pytest.approx(
            [float(cache.layers[i].state[:, h].square().mean().sqrt()) for h in range(2)], rel=1e-9
        )


def test_half_lives_of_a_forced_gate(tokenizer, batch):
    """With no logit and exp(A) = 1 the decay is g_min * sigmoid(dt_bias), channel by channel."""
    k3 = model(vocab_size=300)
    layer = k3.model.layers[2].self_attn
    tokens = torch.tensor([[1.0, 2, 4, 8, 16, 32, 64, 128], [3.0] * 8])  # the half-life of every channel [H, K]
    with torch.no_grad():
        layer.f_b_proj.weight.zero_()
        layer.A_log.zero_()
        layer.dt_bias.copy_(torch.logit(math.log(2) / tokens / -layer.g_min).flatten())
    reading = observe(k3, batch).half_life
    assert list(reading) == ["0", "2", "3"]
    assert torch.tensor(reading["2"]).allclose(torch.tensor([[1.0, 16, 128], [3, 3, 3]]), rtol=1e-4)
    with torch.no_grad():
        layer.A_log.copy_(torch.tensor([0.0, math.log(2)]))  # a slope: twice the logit
    g = 5 * torch.sigmoid(2 * torch.logit(torch.tensor(math.log(2) / 3 / 5)))
    assert observe(k3, batch).half_life["2"][1] == pytest.approx([math.log(2) / float(g)] * 3, rel=1e-4)


def test_half_lives_follow_the_text(k3, batch, readings):
    """The logit of the layer itself, from what the layer reads."""
    seen = []
    layer = k3.model.layers[0].self_attn
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        k3.eval()(batch.input_ids, cu_seqlens=batch.cu_seqlens)
        z = (layer.f_b_proj(layer.f_a_proj(seen[0])) + layer.dt_bias).view(-1, 2, 8)
        g = layer.g_min * torch.sigmoid(layer.A_log.exp()[:, None] * z)
    handle.remove()
    for head in range(2):
        values = sorted((math.log(2) / -g[:, head]).flatten().tolist())
        ranks = [round(share * (len(values) - 1)) for share in (0.1, 0.5, 0.9)]
        assert readings.half_life["0"][head] == pytest.approx([values[rank] for rank in ranks], rel=1e-9)
    assert readings.half_life["0"][0] != readings.half_life["0"][1]


def test_what_never_decays_has_a_finite_half_life():
    lives = half_lives(torch.tensor([-math.log(2), -math.log(2) / 10, 0.0]))
    assert lives[:2].tolist() == pytest.approx([1, 10])
    assert torch.isfinite(lives[2])
    assert lives[2] > 1e30


def test_percentiles_are_values_that_occur():
    x = torch.stack([torch.randperm(11), torch.randperm(11) * 10]).double()
    assert percentiles(x, (0, 0.1, 0.5, 0.9, 1)).tolist() == [[0, 1, 5, 9, 10], [0, 10, 50, 90, 100]]
    assert percentiles(torch.tensor([[7.0]]), (0.1, 0.9)).tolist() == [[7, 7]]


def test_rms():
    assert rms(torch.tensor([[3.0, -4.0]])) == pytest.approx(math.sqrt(12.5))
    assert rms(torch.full((3, 3), 1e30)) == pytest.approx(1e30)  # whose square is beyond float32


# models of other kinds


def test_a_model_without_a_part_has_none_of_its_figures(batch):
    plain = observe(model(vocab_size=300, attn_res_block_size=None), batch)
    assert plain.depth_attention == []
    assert len(plain.activation_rms) == 10
    assert len(plain.half_life) == 3
    linear = config().linear_attn_config.replace(kda_layers=(), full_attn_layers=(1, 2, 3, 4, 5))
    attention = observe(model(vocab_size=300, linear_attn_config=linear), batch)
    assert (attention.half_life, attention.state_rms) == ({}, {})
    assert len(attention.depth_attention) == 11
    dense = model(vocab_size=300, num_experts=0)
    assert len(observe(dense, batch).activation_rms) == 10
    assert dense.balancers() == {}


def test_expert_loads_by_layer_with_mtp(tokenizer):
    k3 = K3Model(run(model={"num_nextn_predict_layers": 1}).model)
    assert list(decoder_layers(k3)) == ["0", "1", "mtp.0"]
    loads = {name: torch.tensor([0, 1, 2, 3, 4, 5, 6, 11]) * (i + 1) for i, name in enumerate(k3.balancers())}
    snapshot = inspect(k3, tokenizer, TEXTS, context=48, loads=loads)
    expected = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2.75]
    assert snapshot["expert_load"] == {"1": expected, "mtp.0": expected}
    assert [figures["sublayer"] for figures in snapshot["activation_rms"]] == [
        "0.attention", "0.feed_forward", "1.attention", "1.feed_forward",
    ]  # fmt: skip
    nothing = inspect(k3, tokenizer, TEXTS, context=48, loads=dict.fromkeys(loads, torch.zeros(8)))
    assert nothing["expert_load"]["1"] == [0] * 8
    assert inspect(k3, tokenizer, TEXTS, context=48)["expert_load"] == {}


# the snapshot


def test_a_snapshot_is_json_and_complete(tokenizer):
    k3 = K3Model(run().model)
    snapshot = inspect(k3, tokenizer, TEXTS, context=48)
    assert set(snapshot) == {
        "bits_per_byte", "expert_load", "depth_attention", "half_life", "activation_rms", "state_rms",
    }  # fmt: skip
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert snapshot["bits_per_byte"] == pytest.approx(
        bits_per_byte(k3, tokenizer, sample_texts(TEXTS, 10**9), context=48), rel=1e-6
    )
    assert snapshot == inspect(k3, tokenizer, TEXTS[::-1], context=48)  # whatever their order


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(tokenizer, training):
    k3 = K3Model(run(model={"num_nextn_predict_layers": 1}).model).train(training)
    frozen = k3.model.layers[1].eval()
    modes = [module.training for module in k3.modules()]
    before = copy.deepcopy(k3.state_dict())
    random = torch.get_rng_state()
    inspect(k3, tokenizer, TEXTS, context=48)
    assert [module.training for module in k3.modules()] == modes
    assert not frozen.training
    assert torch.get_rng_state().equal(random)
    assert all(value.equal(before[name]) for name, value in k3.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in k3.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in k3.modules())


def test_hooks_go_when_the_pass_fails(k3, batch, monkeypatch):
    monkeypatch.setattr(k3.lm_head, "forward", None)  # not used
    monkeypatch.setattr(k3.model.layers[1], "forward", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        observe(k3, batch)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in k3.modules())


def test_training_goes_on_as_if_nothing_had_been_read(tokenizer, batch):
    """Two steps with a look between them and without: every bit the same."""

    def trained(look):
        torch.manual_seed(5)
        k3 = K3Model(run(model={"num_nextn_predict_layers": 1}).model)
        optimizer = PerHeadMuon(k3.parameter_roles(), 1e-2)
        for attention in k3.latent_attentions().values():
            attention.track_max_logits = True
        losses = []
        for step in range(3):
            if look and step:
                inspect(k3, tokenizer, TEXTS, context=48)
            output = k3(batch.input_ids, cu_seqlens=batch.cu_seqlens, targets=batch.labels)
            losses.append(float(output.loss.detach()))
            output.loss.backward()
            if look:
                observe(k3, batch)  # with gradients waiting
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for balancer in k3.balancers().values():
                balancer.update()
        return losses, k3.state_dict(), [a.max_logits for a in k3.latent_attentions().values()]

    losses, state, largest = trained(look=False)
    again, state_again, largest_again = trained(look=True)
    assert losses == again
    assert losses[2] < losses[0]
    assert all(value.equal(state_again[name]) for name, value in state.items())
    assert all(a.equal(b) for a, b in zip(largest, largest_again))


# the sample of texts


def test_a_sample_of_texts_is_cut_to_its_bytes_between_characters():
    texts = [f"{i} 漢字かな " * 20 for i in range(20)]
    size = len(texts[0].encode())
    for limit in (1, 2, 3, 4, size, 1000, 2999):
        sample = sample_texts(texts, limit)
        assert limit - 3 < sum(len(text.encode()) for text in sample) <= limit
        assert all(any(text.startswith(part) for text in texts) for part in sample)
    assert sample_texts(texts, 0) == sample_texts([], 5) == []
    assert sorted(sample_texts(texts, 10**9)) == sorted(texts)
    assert sample_texts(texts, 10**9) == sample_texts(texts[::-1], 10**9) != texts


def test_a_larger_sample_begins_with_the_smaller():
    texts = [f"text {i} " * (1 + i % 5) for i in range(50)]
    samples = ["".join(sample_texts(texts, limit)) for limit in range(50, 900, 37)]
    assert all(large.startswith(small) for small, large in itertools.pairwise(samples))

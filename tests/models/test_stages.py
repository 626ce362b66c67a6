"""A model cut into stages is the model: every cut, whatever order its micro-batches take."""

import copy
from itertools import combinations, pairwise

import pytest
import torch

from perilune.core.errors import ConfigError, ShapeError
from perilune.models.k3 import K3Model, presets
from perilune.models.k3.stages import costs, keep_stage_, reads_embedding, stages_of
from perilune.nn import DepthStream
from tiny_k3 import assert_close, config, ids, model

LAYERS = 5
MICRO = [[0, 5, 19], [0, 0, 7], [0]]  # boundaries of micro-batches: documents, an empty one among them, no token


def made(**changes):
    torch.manual_seed(3)
    return model(**changes).train()


def data():
    torch.manual_seed(4)
    packs = [(ids(1, cu[-1]), ids(1, cu[-1]), cu) for cu in MICRO]
    for _, targets, _ in packs:
        targets[:, ::4] = -100
    return packs


COUNTS = {"next_token": [20], "mtp": [17, 14]}


def losses_of(k3, recompute="none"):
    """Of the whole model, one micro-batch after the other, which leave their gradients."""
    k3.recompute_activations(recompute)
    losses = []
    for tokens, targets, cu in data():
        loss = k3(tokens, targets=targets, cu_seqlens=cu, counts=COUNTS).loss
        loss.backward()
        losses.append(loss.detach())
    return losses


class Flight:
    """A micro-batch in a stage, whose sources are leaves of a graph of its own, as if another process had sent them."""

    def __init__(self, stage, batch, sources):
        tokens, targets, cu = batch
        self.taken, stream = [], None
        if sources:
            self.taken = [x.detach().clone().requires_grad_() for x in sources]
            stream = DepthStream.resume(self.taken, stage.model.period, 2 * stage.model.stage.start)
        output = stage(tokens, targets=targets, cu_seqlens=cu, counts=COUNTS, stream=stream)
        self.given = [output.loss] if output.stream is None else output.stream.sources

    def backward(self, grads):
        torch.autograd.backward(self.given, grads)
        return [x.grad for x in self.taken]


def check(cuts, recompute="none", **changes):
    k3 = made(**changes)
    stages = [keep_stage_(copy.deepcopy(k3), range(a, b)) for a, b in pairwise([0, *cuts, LAYERS])]
    calls = []
    for stage in stages:
        stage.recompute_activations(recompute)
        for n, layer in enumerate(stage.model.layers):
            if layer is not None:
                layer.self_attn.register_forward_hook(lambda *_, n=n: calls.append(n))
    expected = losses_of(k3, recompute)

    flights = []
    for batch in data():
        flights.append([])
        for stage in stages:
            flights[-1].append(Flight(stage, batch, flights[-1][-1].given if flights[-1] else []))
    ran = sorted(calls)
    for flight in flights[1:] + flights[:1]:  # another order than forward
        grads = None
        for part in reversed(flight):
            grads = part.backward(grads)
    for flight, loss in zip(flights, expected):
        assert_close(flight[-1].given[0].detach(), loss, what="loss")
    assert ran == sorted(list(range(LAYERS)) * len(MICRO))  # each layer once a micro-batch
    sums = {}
    for stage in stages:
        for name, p in stage.named_parameters():
            sums[name] = sums[name] + p.grad if name in sums else p.grad
    grads = {name: p.grad for name, p in k3.named_parameters()}
    assert sums.keys() == grads.keys()
    for name, grad in grads.items():
        assert_close(sums[name], grad, what=f"{name} cut at {cuts}")
    names = [name for stage in stages for name in stage.state_dict()]
    twice = {"model.embed_tokens.weight"} if reads_embedding(k3.config) else set()
    assert sorted(names) == sorted([*k3.state_dict(), *twice])
    for n, balancer in k3.balancers().items():
        (own,) = (b[n] for b in (stage.balancers() for stage in stages) if n in b)
        assert torch.equal(own.counts, balancer.counts)


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (1, 3), (2, 4), (1, 2, 3, 4)])
def test_every_cut_has_the_losses_and_gradients_of_the_whole(cuts):
    """Blocks of two layers: cuts where one begins, in the middle of one, and stages of a layer alone."""
    check(cuts, num_nextn_predict_layers=1)


@pytest.mark.parametrize(("recompute", "cuts"), [("sublayers", (3,)), ("layers", (2,)), ("blocks", (1, 4))])
def test_stages_recompute(recompute, cuts):
    check(cuts, recompute)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "num_nextn_predict_layers": 2},
        {"tie_word_embeddings": True},
        {"attn_res_block_size": "full"},
        {"attn_res_block_size": None},
        {"num_experts": 0},
    ],
)
def test_of_any_model(changes):
    check((3,), **changes)


def test_the_dearest_stage_is_as_cheap_as_can_be():
    """Against all ways there are; what lies behind the layers counts with the last one."""
    for changes in ({}, {"vocab_size": 5000}, {"num_nextn_predict_layers": 1}, {"attn_res_block_size": None}):
        made = config(**changes)
        each = costs(made, 64)
        assert len(each) == LAYERS
        for number in range(1, LAYERS + 1):
            cut = stages_of(made, number, 64)
            assert len(cut) == number
            assert [i for stage in cut for i in stage] == list(range(LAYERS))
            dearest = max(sum(each[i] for i in stage) for stage in cut)
            ways = (pairwise([0, *starts, LAYERS]) for starts in combinations(range(1, LAYERS), number - 1))
            assert dearest == pytest.approx(min(max(sum(each[a:b]) for a, b in way) for way in ways))
    assert stages_of(config(vocab_size=5000), 2, 64) == [range(4), range(4, 5)]  # the head outweighs four layers


def test_a_stage_without_the_one_before_it_is_refused():
    stage = keep_stage_(made(), range(2, LAYERS))
    with pytest.raises(ShapeError, match="stream: expected that of the stage which ends before layer 2, got none"):
        stage(ids(1, 4))


def test_blocks_that_a_bank_keeps_otherwise_are_not_handed_on():
    k3 = K3Model(presets.nano().replace(attn_res_bank="float8"))
    with pytest.raises(ConfigError, match=r"^attn_res_bank: expected none in a pipeline.*'float8'"):
        keep_stage_(k3, range(2))

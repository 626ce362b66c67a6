"""A model whose rows are cut over ranks is the model of one process: losses and all gradients, in float64."""

import pytest
import torch
import torch.distributed as dist

from perilune.core.errors import ShapeError
from ranks import one_rank, run_ranks
from tiny_k3 import assert_close, ids, model

T = 24
PACKS = {
    "batch of two": None,
    "one document": [0, T],
    "documents over borders": [0, 5, 19, T],
    "ends at borders, empty documents": [0, 0, 6, 12, 12, 18, T, T],
}


def made():
    torch.manual_seed(5)
    k3 = model(num_nextn_predict_layers=1).train()
    for attention in k3.latent_attentions().values():
        attention.track_max_logits = True
    return k3


def data(case):
    torch.manual_seed(6)
    rows = 2 if PACKS[case] is None else 1
    tokens, labels = ids(rows, T), ids(rows, T)
    labels[:, ::5] = -100
    return tokens, labels


def shard(x, rank, ranks):
    return x.chunk(ranks, 1)[rank]


def check(rank, ranks, cases):
    for case in cases:
        cu = PACKS[case]
        for unit in ("none", "sublayers", "layers", "blocks") if case == "documents over borders" else ("none",):
            k3 = made()
            k3.recompute_activations(unit)
            tokens, labels = data(case)
            whole = k3(tokens, labels=labels, cu_seqlens=cu)
            whole.loss.backward()
            expected = {name: p.grad for name, p in k3.named_parameters()}
            seen = [b.counts.clone() for b in k3.balancers().values()]
            logits = [a.max_logits for a in k3.latent_attentions().values()]

            k3 = made()
            k3.recompute_activations(unit)
            output = k3(
                shard(tokens, rank, ranks), labels=shard(labels, rank, ranks), cu_seqlens=cu, group=dist.group.WORLD
            )
            output.loss.backward()
            for name, loss in output.losses.items():
                dist.all_reduce(loss)
                assert_close(loss, whole.losses[name], what=f"{name} of {case}")
            assert_close(output.logits, shard(whole.logits, rank, ranks), what=case)
            for name, p in k3.named_parameters():
                dist.all_reduce(p.grad)
                assert_close(p.grad, expected[name], what=f"{name} of {case}")
            for balancer, counts in zip(k3.balancers().values(), seen):
                dist.all_reduce(balancer.counts)
                assert torch.equal(balancer.counts, counts)
            for attention, largest in zip(k3.latent_attentions().values(), logits):
                dist.all_reduce(attention.max_logits, dist.ReduceOp.MAX)
                assert_close(attention.max_logits, largest, what=f"logits of {case}")
    check_no_leak(rank, ranks)
    check_padding(rank, ranks)


def check_no_leak(rank, ranks):
    """What stands in another document does not show, and a rank without labels does no harm."""
    k3, (tokens, labels) = made(), data("documents over borders")
    others = tokens.clone()
    others[:, 5:19] = (others[:, 5:19] + 1) % 50
    a, b = (
        k3(shard(x, rank, ranks), cu_seqlens=[0, 5, 19, T], group=dist.group.WORLD).logits for x in (tokens, others)
    )
    mine = torch.arange(T).chunk(ranks)[rank]
    apart = (mine < 5) | (mine >= 19)
    assert_close(a[:, apart], b[:, apart], 1e-13)  # a matrix of other rows rounds otherwise
    assert apart.all() or (a - b).abs().max() > 1e-3
    labels[:, T // ranks :] = -100  # the first rank alone has any
    output = k3(shard(tokens, rank, ranks), labels=shard(labels, rank, ranks), group=dist.group.WORLD)
    output.loss.backward()
    dist.all_reduce(output.loss.detach())
    assert_close(output.loss.detach(), made()(tokens, labels=labels).loss.detach(), what="labels on one rank")


def check_padding(rank, ranks):
    """A row that is filled up: nothing is learned from what fills it, and no balancer counts it."""
    tokens, labels = data("one document")
    real = T - 5
    short, k3 = made(), made()
    expected = short(tokens[:, :real], targets=labels[:, :real], cu_seqlens=[0, 7, real])
    labels[:, real:] = -100
    output = k3(
        shard(tokens, rank, ranks),
        targets=shard(labels, rank, ranks),
        cu_seqlens=[0, 7, real, T],
        group=dist.group.WORLD,
        padding=T - real,
    )
    loss = output.losses["next_token"]
    dist.all_reduce(loss)
    assert_close(loss, expected.losses["next_token"], what="padded")
    for a, b in zip(short.balancers().values(), k3.balancers().values()):
        dist.all_reduce(b.counts)
        assert torch.equal(a.counts, b.counts)


@pytest.mark.slow
def test_ranks_together_are_one_process(tmp_path):
    """Losses, those of tokens further ahead too, logits, gradients, what balancers count and QK-clip reads."""
    run_ranks(2, tmp_path, check, PACKS)


def test_three_ranks_too(tmp_path):
    """One of them in the middle of a document."""
    run_ranks(3, tmp_path, check, ["documents over borders"])


def test_a_cache_and_a_mask_are_refused(tmp_path):
    with one_rank(tmp_path):
        k3 = made().eval()
        for beside in ({"group": dist.group.WORLD}, {"mean_over": dist.group.WORLD}, {"padding": 1}):
            with pytest.raises(ShapeError, match="attention_mask: expected none beside group, mean_over and padding"):
                k3(ids(1, 4), attention_mask=torch.ones(1, 4), **beside)
        with pytest.raises(ShapeError, match="cache: expected none beside group, got both"):
            k3(ids(1, 4), cache=k3.new_cache(1), group=dist.group.WORLD)
        attention = next(iter(k3.latent_attentions().values()))
        with pytest.raises(ShapeError, match="cache: expected none beside group, got both"):
            attention(torch.randn(1, 4, 32).double(), cache=attention.new_cache(1), group=dist.group.WORLD)

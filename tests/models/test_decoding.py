"""However tokens come in (in pieces, padded, packed, on a branched or reused cache), logits are those of one forward.

The model is a hybrid stack with slow decay in float64: a leak or a loss of a thousandth shows at 1e-11.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ShapeError
from perilune.models.k3 import K3Model
from tiny_k3 import assert_close, config, ids, model

few = settings(derandomize=True, max_examples=8, deadline=None)


@pytest.fixture(scope="module")
def k3():
    torch.manual_seed(1)
    return model().eval()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def logits(k3, tokens):
    """One clean forward of one document: `[T]` to `[T, V]`."""
    return k3(tokens[None]).logits[0]


@pytest.mark.parametrize("splits", [[32, 32, 33], [1, 96], [96, 1], [1] * 97, [31, 1, 64, 1], [0, 60, 0, 37]])
def test_any_split_of_a_prompt_is_one_prompt(k3, splits):
    tokens = ids(2, 97)
    cache, whole = k3.new_cache(2), k3.new_cache(2)
    got = torch.cat([k3(piece, cache=cache).logits for piece in tokens.split(splits, 1)], 1)
    assert_close(got, k3(tokens).logits)
    assert_close(k3(tokens, cache=whole).logits, got)
    for mine, other in zip(cache.layers, whole.layers):
        for name in ("conv", "state"):
            if hasattr(mine, name):
                assert_close(getattr(mine, name), getattr(other, name), what=name)
        if hasattr(mine, "latents"):
            assert_close(mine.latents[:, :97], other.latents[:, :97], what="latents")
        assert mine.lengths == other.lengths == [97, 97]


def test_float32_is_within_its_tolerance():
    k3 = K3Model(config(initializer_range=0.05)).eval()
    tokens = ids(1, 97)
    cache = k3.new_cache(1)
    got = torch.cat([k3(piece, cache=cache).logits for piece in tokens.split([40, 1, 1, 55], 1)], 1)
    assert_close(got, k3(tokens).logits, 1e-5)


@few
@given(data=st.data(), side=st.sampled_from(["left", "right"]))
def test_ragged_batches_in_any_pieces_are_single_documents(k3, data, side):
    """Every call brings each sequence its own number of tokens, none included, padded on either side."""
    B = data.draw(st.integers(1, 3))
    tokens = ids(B, 40)
    cache, done, outputs = k3.new_cache(B), [0] * B, [[] for _ in range(B)]
    for _ in range(data.draw(st.integers(1, 4))):
        counts = data.draw(st.lists(st.integers(0, 9), min_size=B, max_size=B))
        T = max(counts) + data.draw(st.integers(0, 2))
        batch, mask = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.int64)
        for i, n in enumerate(counts):
            where = slice(T - n, T) if side == "left" else slice(0, n)
            batch[i, where] = tokens[i, done[i] : done[i] + n]
            mask[i, where] = 1
        out = k3(batch, attention_mask=mask, cache=cache).logits
        assert out.shape == (B, T, 50)
        assert out[mask == 0].eq(0).all()
        for i, n in enumerate(counts):
            outputs[i].append(out[i][mask[i] == 1])
            done[i] += n
    assert cache.lengths == done
    assert all(layer.lengths == done for layer in cache.layers)
    for i in range(B):
        assert_close(torch.cat(outputs[i]), logits(k3, tokens[i, : done[i]]))


@few
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_padding_anywhere_without_a_cache_is_no_padding(k3, lengths, seed):
    T = max(lengths) + 2
    generator = torch.Generator().manual_seed(seed)
    mask = torch.stack([torch.rand(T, generator=generator).argsort() < n for n in lengths])
    batch = ids(len(lengths), T)
    out = k3(batch, attention_mask=mask).logits
    for row in range(len(lengths)):
        assert_close(out[row][mask[row]], logits(k3, batch[row][mask[row]]))


def test_left_padding_of_a_later_turn_stays_out_of_the_state(k3):
    first, second = ids(2, 12), ids(2, 7)
    cache = k3.new_cache(2)
    k3(first, cache=cache)
    mask = torch.ones(2, 7)
    mask[0, :4] = 0  # three tokens of its own
    out = k3(second, attention_mask=mask, cache=cache).logits
    assert_close(out[0, 4:], logits(k3, torch.cat([first[0], second[0, 4:]]))[12:])
    assert_close(out[1], logits(k3, torch.cat([first[1], second[1]]))[12:])


@few
@given(data=st.data())
def test_branches_go_on_by_themselves(k3, data):
    """Select, drop, repeat and reorder sequences of a cache; the one they came from goes on unharmed."""
    tokens = ids(3, 10)
    cache = k3.new_cache(3)
    k3(tokens, cache=cache)
    histories = list(tokens)
    for _ in range(data.draw(st.integers(1, 2))):
        rows = data.draw(st.lists(st.integers(0, len(histories) - 1), min_size=1, max_size=3))
        trunk, trunk_histories = cache, histories
        cache = cache.select(torch.tensor(rows))
        assert cache.batch == len(rows)
        n = data.draw(st.integers(1, 3))
        new = ids(len(rows), n)
        histories = [torch.cat([histories[r], new[i]]) for i, r in enumerate(rows)]
        out = k3(new, cache=cache).logits
        for i, history in enumerate(histories):
            assert_close(out[i], logits(k3, history)[-n:])
        beside = ids(len(trunk_histories), 1)
        out = k3(beside, cache=trunk).logits
        for i, history in enumerate(trunk_histories):
            assert_close(out[i], logits(k3, torch.cat([history, beside[i]]))[-1:])


def test_reset_forgets_everything(k3):
    cache, tokens = k3.new_cache(2), ids(2, 9)
    k3(ids(2, 70), cache=cache)
    cache.reset()
    assert cache.lengths == [0, 0]
    assert k3(tokens, cache=cache).logits.equal(k3(tokens, cache=k3.new_cache(2)).logits)
    assert all(layer.lengths == [9, 9] for layer in cache.layers)


def test_a_call_may_bring_no_token(k3):
    cache, tokens = k3.new_cache(2), ids(2, 9)
    k3(tokens[:, :5], cache=cache)
    assert k3(tokens[:, :0], cache=cache).logits.shape == (2, 0, 50)
    assert all(layer.lengths == [5, 5] for layer in cache.layers)
    assert_close(k3(tokens[:, 5:], cache=cache).logits, k3(tokens).logits[:, 5:])


@torch.enable_grad()
def test_gradients_go_through_a_cache(k3):
    tokens, parameters = ids(2, 9), list(k3.parameters())
    expected = torch.autograd.grad(k3(tokens).logits.square().sum(), parameters)
    cache = k3.new_cache(2)
    pieces = [k3(part, cache=cache).logits for part in tokens.split([4, 1, 4], 1)]
    for got, whole in zip(torch.autograd.grad(torch.cat(pieces, 1).square().sum(), parameters), expected):
        assert_close(got, whole, 1e-10, "gradient")


def test_a_call_may_bring_no_sequence(k3):
    for call in ({}, {"cache": k3.new_cache(0)}):
        assert k3(ids(0, 7), **call).logits.shape == (0, 7, 50)
        assert k3(ids(1, 0), cu_seqlens=[0], **call).logits.shape == (1, 0, 50)


@few
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_packed_documents_are_separate_ones(k3, lengths):
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tokens = ids(1, cu[-1])
    packed = k3(tokens, cu_seqlens=torch.tensor(cu)).logits[0]
    separate = torch.cat([logits(k3, tokens[0, a:b]) for a, b in pairwise(cu)])
    assert_close(packed, separate)
    assert k3(tokens, cu_seqlens=cu, attention_mask=torch.ones(1, cu[-1])).logits[0].equal(packed)


def test_packed_gradients_are_those_of_separate_documents():
    k3, cu = model(), [0, 37, 88, 128]
    tokens = ids(1, 128)
    with torch.enable_grad():
        packed = k3(tokens, cu_seqlens=cu, labels=tokens).loss
        alone = [k3(tokens[:, a:b], labels=tokens[:, a:b]).loss * (b - a - 1) for a, b in pairwise(cu)]
        separate = sum(alone) / (128 - 3)
        assert_close(packed, separate, what="loss")
        params = list(k3.parameters())
        pairs = zip(torch.autograd.grad(packed, params), torch.autograd.grad(separate, params))
        for (name, _), (got, want) in zip(k3.named_parameters(), pairs):
            assert_close(got, want, 1e-10, name)


@pytest.fixture(scope="module", params=["dense", "moe"])
def listener(request):
    """A model, and how far its logits may move when others' tokens change: not a bit without experts; with them the
    products of an expert have other sizes when others choose it, and may round in another order."""
    torch.manual_seed(2)
    return (model(first_k_dense_replace=5).eval(), 0) if request.param == "dense" else (model().eval(), 1e-13)


def test_a_document_hears_nothing_of_the_others(listener):
    k3, tolerance = listener
    tokens, cu = ids(1, 100), [0, 37, 60, 100]
    base = k3(tokens, cu_seqlens=cu).logits[0]
    for a, b in pairwise(cu):
        other = tokens.clone()
        other[0, a:b] = (tokens[0, a:b] + 7) % 50
        changed = k3(other, cu_seqlens=cu).logits[0]
        rest = torch.ones(100, dtype=torch.bool)
        rest[a:b] = False
        assert_close(changed[rest], base[rest], tolerance)
        assert not changed[a:b].isclose(base[a:b]).all(-1).any()


def test_the_past_hears_nothing_of_the_future(listener):
    k3, tolerance = listener
    tokens = ids(2, 80)
    base = k3(tokens).logits
    for t in (1, 17, 64, 79):
        other = tokens.clone()
        other[:, t:] = (tokens[:, t:] + 7) % 50
        changed = k3(other).logits
        assert_close(changed[:, :t], base[:, :t], tolerance)
        assert not changed[:, t].isclose(base[:, t]).all()


def test_no_gradient_comes_from_the_future(k3):
    embedded = []
    hook = k3.model.embed_tokens.register_forward_hook(lambda _, args, out: embedded.append(out.requires_grad_()))
    with torch.enable_grad():
        out = k3(ids(1, 70)).logits[0]
        for t in (0, 31, 69):
            (grad,) = torch.autograd.grad(out[t].square().sum(), embedded[0], retain_graph=True)
            assert grad[0, t + 1 :].eq(0).all()
            assert grad[0, : t + 1].abs().amax(-1).gt(0).all()
    hook.remove()


def test_misuse_is_named(k3):
    tokens = ids(2, 4)
    with pytest.raises(ShapeError, match="input_ids"):
        k3(tokens[0])
    with pytest.raises(ShapeError, match="attention_mask: expected"):
        k3(tokens, attention_mask=torch.ones(2, 5))
    with pytest.raises(ShapeError, match="cu_seqlens"):
        k3(tokens, cu_seqlens=[0, 4])
    with pytest.raises(ShapeError, match="attention_mask: expected none beside cu_seqlens"):
        k3(tokens[:1], cu_seqlens=[0, 4], attention_mask=torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(ShapeError, match="cache: expected one for 2"):
        k3(tokens, cache=k3.new_cache(3))

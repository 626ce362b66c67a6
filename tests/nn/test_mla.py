"""Gated MLA against an explicit masked softmax in float64, with and without a cache; the logits that QK-clip reads."""

import math
from itertools import pairwise

import pytest
import torch

from perilune.core.errors import ShapeError
from perilune.nn import GatedMLA
from perilune.nn.mla import causal_attention
from perilune.optim import qk_clip_

D, H, NOPE, ROPE, RANK = 18, 3, 10, 4, 12
VARIANTS = [(q_rank, gate, v) for q_rank in (None, 7) for gate in (True, False) for v in (5, 20)]


def layer(q_rank=7, gate=True, v=5, rank=RANK, dtype=torch.float64):
    made = GatedMLA(
        D, H, kv_lora_rank=rank, q_lora_rank=q_rank, nope_head_dim=NOPE, rope_head_dim=ROPE, v_head_dim=v,
        output_gate=gate,
    )  # fmt: skip
    for name, p in made.named_parameters():
        torch.nn.init.normal_(p, float("norm" in name), 0.4)
    return made.to(dtype)


def logits_and_values(m, x):
    """`x: [T, D]`: scaled logits [H, T, T] before the mask, and values [H, T, v], head by head."""

    def norm(c, weight):
        return c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    q = m.q_proj(x) if m.q_lora_rank is None else m.q_b_proj(norm(m.q_a_proj(x), m.q_a_layernorm.weight))
    latent, shared = m.kv_a_proj_with_mqa(x).split([m.rank, ROPE], -1)
    latent = norm(latent, m.kv_a_layernorm.weight)
    logits, values = [], []
    for h in range(H):
        q_h = q[:, h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
        key_value = latent @ m.kv_b_proj.weight[h * (NOPE + m.v_dim) : (h + 1) * (NOPE + m.v_dim)].T
        k_h = torch.cat([key_value[:, :NOPE], shared], -1)
        logits.append(q_h @ k_h.T / math.sqrt(NOPE + ROPE))
        values.append(key_value[:, NOPE:])
    return torch.stack(logits), torch.stack(values)


def explicit(m, x):
    """The layer on one document, `[T, D]` to `[T, D]`."""
    logits, values = logits_and_values(m, x)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    o = (logits.masked_fill(future, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)
    return m.o_proj(o if m.g_proj is None else o * torch.sigmoid(m.g_proj(x)))


def assert_close(got, expected, tolerance=1e-12):
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert error <= tolerance, f"relative error {error:.1e}"


def gradients(m, x, y, weights):
    return torch.autograd.grad((y * weights).sum(), [x, *m.parameters()])


@pytest.mark.parametrize(("q_rank", "gate", "v"), VARIANTS)
def test_layer_is_masked_softmax_with_all_gradients(q_rank, gate, v):
    m = layer(q_rank, gate, v)
    x = torch.randn(2, 21, D, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    expected = torch.stack([explicit(m, row) for row in x])
    assert_close(m(x), expected)
    for got, want in zip(gradients(m, x, m(x), weights), gradients(m, x, expected, weights)):
        assert_close(got, want)


@pytest.mark.parametrize(("q_rank", "gate", "v"), VARIANTS)
def test_absorbed_and_expanded_forms_are_the_same(q_rank, gate, v):
    m = layer(q_rank, gate, v).eval()
    q, past = torch.randn(2, 4, H, NOPE + ROPE).double(), torch.randn(2, 9, RANK + ROPE).double()
    visible = torch.arange(9) <= torch.tensor([[5, 6, 7, 8], [0, 1, 2, 3]])[..., None]
    keys, values = m._expand(past)
    scores = torch.einsum("nthd,nlhd->nhtl", q, keys) / math.sqrt(NOPE + ROPE)
    p = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    assert_close(m._absorbed(q, past, visible), torch.einsum("nhtl,nlhv->nthv", p, values))


@pytest.mark.parametrize("v", [5, 20])
@pytest.mark.parametrize("splits", [[1] * 70, [69, 1], [1, 69], [30, 2, 0, 38], [70]])
def test_calls_on_a_cache_are_one_call(splits, v, monkeypatch):
    """Short calls are absorbed, long ones expanded; 70 tokens also outgrow the cache's first allocation."""
    m = layer(v=v, rank=40).eval()
    absorbed = []
    original = m._absorbed
    monkeypatch.setattr(m, "_absorbed", lambda q, *rest: absorbed.append(q.shape[1]) or original(q, *rest))
    x = torch.randn(2, 70, D, dtype=torch.float64)
    cache = m.new_cache(2)
    with torch.no_grad():
        got = torch.cat([m(piece, cache=cache) for piece in x.split(splits, 1)], 1)
        assert_close(got, torch.stack([explicit(m, row) for row in x]))
    assert cache.lengths == [70, 70]
    assert all(n in absorbed for n in splits if n <= 2)
    assert not any(n in absorbed for n in splits if n >= 30)


def test_packed_documents_are_separate_ones():
    m = layer()
    for cu in ([0, 4, 8, 12], [0, 0, 7, 8, 8, 20]):
        x = torch.randn(1, cu[-1], D, dtype=torch.float64, requires_grad=True)
        weights = torch.randn_like(x)
        packed = m(x, cu_seqlens=torch.tensor(cu))
        separate = torch.cat([explicit(m, x[0, a:b]) for a, b in pairwise(cu)])[None]
        assert_close(packed, separate)
        for got, want in zip(gradients(m, x, packed, weights), gradients(m, x, separate, weights)):
            assert_close(got, want)


@pytest.mark.parametrize("steps", [[(3, 7, 0), (2, 0, 4), (1, 1, 1), (0, 60, 1)], [(4, 4, 4), (1, 1, 1), (9, 2, 1)]])
def test_ragged_caches_move_each_sequence_by_its_own_number_of_tokens(steps):
    m = layer().eval()
    x = torch.randn(3, 70, D, dtype=torch.float64)
    cache, done, outputs = m.new_cache(3), [0, 0, 0], [[], [], []]
    with torch.no_grad():
        for counts in steps:
            new = torch.cat([x[i, done[i] : done[i] + n] for i, n in enumerate(counts)])[None]
            cu = [0, counts[0], sum(counts[:2]), sum(counts)]
            for i, piece in enumerate(m(new, cache=cache, cu_seqlens=cu)[0].split(counts)):
                outputs[i].append(piece)
            done = [n + c for n, c in zip(done, counts)]
        assert cache.lengths == done
        kept = cache.select(torch.tensor([2, 0, 2]))
        for i in range(3):
            assert_close(torch.cat(outputs[i]), explicit(m, x[i, : done[i]]))
        following = m(x[[2, 0, 1], :1], cache=kept)  # the second branch of sequence 2 goes another way
        for row, (past, new) in enumerate([(2, 2), (0, 0), (2, 1)]):
            assert_close(following[row], explicit(m, torch.cat([x[past, : done[past]], x[new, :1]]))[-1:])
        assert cache.lengths == done  # a branch leaves the trunk alone


def test_earlier_tokens_have_no_order():
    m = layer().eval()
    x = torch.randn(1, 12, D, dtype=torch.float64)
    order = torch.cat([torch.randperm(11), torch.tensor([11])])
    assert not order.equal(torch.arange(12))
    assert_close(m(x[:, order])[:, -1], m(x)[:, -1])


def test_scale_counts_the_shared_part_of_the_key():
    """q = 0.1 everywhere, keys of ones and of twos, values 0 and 1: sigmoid(0.1 * 192 / sqrt(192))."""
    m = GatedMLA(2, 1, kv_lora_rank=2, nope_head_dim=128, rope_head_dim=64, v_head_dim=1, output_gate=False).double()
    with torch.no_grad():
        m.q_proj.weight.fill_(0.1)
        # the norm turns a token's latent into (sqrt 2, 0) or (0, sqrt 2)
        m.kv_a_proj_with_mqa.weight.copy_(torch.cat([1e4 * torch.eye(2), torch.tensor([[1.0, 2.0]]).expand(64, 2)]))
        m.kv_b_proj.weight.copy_(torch.tensor([[1.0, 2.0]] * 128 + [[0.0, 1.0]]) / math.sqrt(2))
        m.o_proj.weight.copy_(torch.tensor([[1.0], [0.0]]))
        y = m(torch.eye(2, dtype=torch.float64)[None])
    assert y[0, 1, 0].item() == pytest.approx(0.799895, abs=1e-6)


def test_output_gate_is_elementwise_and_reads_the_layers_input():
    gated, plain = layer(gate=True), layer(gate=False)
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if "g_proj" not in k})
    x = torch.randn(2, 6, D, dtype=torch.float64)
    with torch.no_grad():
        gated.g_proj.weight.zero_()
        assert gated(x).equal(plain(x) / 2)
        gated.g_proj.weight[0] = 1e3 * x[0, 0]  # opens channel 0 of head 0 for the first token, and nothing else
        o = torch.linalg.lstsq(plain.o_proj.weight, plain(x)[0, 0, :, None]).solution[:, 0]
        opened = gated(x)[0, 0] - plain(x)[0, 0] / 2
    assert_close(opened, plain.o_proj.weight[:, 0] * o[0] / 2, 1e-10)


def test_bfloat16_stays_close_in_both_forms():
    m = layer(dtype=torch.bfloat16).eval()
    x = torch.randn(1, 40, D, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = m.new_cache(1)
        forms = {"whole": m(x), "absorbed": torch.cat([m(x[:, t : t + 1], cache=cache) for t in range(40)], 1)}
        exact = explicit(m.double(), x[0].double())
    for name, y in forms.items():
        assert y.dtype == torch.bfloat16
        assert (y[0].double() - exact).abs().max() <= 2e-2 * exact.abs().max(), name


def test_max_logits_are_each_heads_largest_causal_logit_of_a_document():
    m = layer()
    cu = [0, 0, 300, 301, 340]  # longer than one piece of the scan
    x = torch.randn(1, cu[-1], D, dtype=torch.float64)
    m(x, cu_seqlens=cu)
    assert m.max_logits is None  # nobody asked
    m.track_max_logits = True
    m.eval()(x, cu_seqlens=cu)
    assert m.max_logits is None  # not training
    m.train()(x, cu_seqlens=cu)

    def largest(x, cu):
        best = []
        for a, b in pairwise(cu):
            if b > a:
                logits = logits_and_values(m, x[0, a:b])[0]
                past = torch.ones(b - a, b - a, dtype=torch.bool).tril()
                best.append(logits.masked_fill(~past, -torch.inf).amax((1, 2)))
        return torch.stack(best).amax(0)

    first = largest(x, cu)
    assert (logits_and_values(m, x[0])[0].amax((1, 2)) > first).sum() == 2  # the future and other documents hold larger
    assert_close(m.max_logits, first)
    assert not m.max_logits.requires_grad
    second = torch.randn(2, 9, D, dtype=torch.float64)
    second[0] *= 1.5
    m(second)
    assert_close(m.max_logits, torch.stack([first, *(largest(row[None], [0, 9]) for row in second)]).amax(0))
    for row in torch.randn(10, 1, 5, D, dtype=torch.float64):  # short, so that one key more often shows
        m.max_logits = None
        m(row)
        assert_close(m.max_logits, largest(row, [0, 5]))


@pytest.mark.parametrize("q_rank", [None, 7])
def test_qk_clip_scales_the_logits_of_exactly_the_heads_above(q_rank):
    m = layer(q_rank)
    m.track_max_logits = True
    x = torch.randn(1, 30, D, dtype=torch.float64)
    m(x)
    before, values = logits_and_values(m, x[0])
    threshold = m.max_logits.sort().values[1].item()
    gamma = qk_clip_(
        m.q_weight, m.kv_b_proj.weight, m.max_logits, threshold=threshold, nope=m.nope, rope=m.rope, v=m.v_dim
    )
    after, same_values = logits_and_values(m, x[0])
    assert (gamma < 1).sum() == 1
    assert_close(after, before * gamma[:, None, None])
    assert after[gamma == 1].equal(before[gamma == 1])
    assert same_values.equal(values)
    m.max_logits = None
    m(x)
    assert m.max_logits.max().item() == pytest.approx(threshold, rel=1e-12)


def test_misuse_is_named():
    m = layer()
    x = torch.randn(2, 4, D, dtype=torch.float64)
    with pytest.raises(ShapeError, match="cu_seqlens"):
        m(x, cu_seqlens=[0, 4])
    with pytest.raises(ShapeError, match="cache: expected one for 2 sequences, got one for 3"):
        m(x, cache=m.new_cache(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [128, 64])
def test_narrow_values_on_a_gpu_are_those_in_float64(width):
    shapes = (2, 300, 3, 192), (2, 300, 3, 192), (2, 300, 3, width)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    o = causal_attention(q, k, v, 0.07)
    do = torch.randn_like(o)
    got = [o, *torch.autograd.grad(o, (q, k, v), do)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("nthd,nlhd->nhtl", wide[0], wide[1]) * 0.07
    future = torch.ones(300, 300, dtype=torch.bool, device="cuda").triu(1)
    exact = torch.einsum("nhtl,nlhv->nthv", scores.masked_fill(future, -torch.inf).softmax(-1), wide[2])
    for x, y in zip(got, [exact, *torch.autograd.grad(exact, wide, do.double())]):
        assert (x.double() - y).norm() <= 1e-2 * y.norm()

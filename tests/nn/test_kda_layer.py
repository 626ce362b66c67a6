"""The KDA layer against its equations written out in float64, and everything that a cache or a pack must not change."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import perilune.nn.kda
from perilune.core.errors import ConfigError, ShapeError
from perilune.nn import KimiDeltaAttention, RecurrentCache, initialize_

D, H, K = 20, 3, 8
KINDS = [(g_min, full_rank) for g_min in (-5.0, None) for full_rank in (True, False)]
FLOAT32 = ("A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight")


def layer(g_min=-5.0, full_rank_gate=True, dtype=torch.float64, **options):
    """A layer whose every parameter matters: nothing is left at zero or one."""
    made = KimiDeltaAttention(D, H, K, g_min=g_min, full_rank_gate=full_rank_gate, **options)
    for name, p in made.named_parameters():
        torch.nn.init.normal_(p, 1.0 if name == "o_norm.weight" else 0.0, 0.3)
    torch.nn.init.normal_(made.dt_bias, -2.0)
    return made.to(dtype)


def equations(m, x):
    """`x: [T, D]`, one document; returns y [T, D] and the final state [H, K, V]."""
    T = len(x)

    def heads(proj, conv):
        raw = F.pad(proj(x), (0, 0, 3, 0))
        return F.silu(sum(conv.weight[:, 0, j] * raw[j : j + T] for j in range(4))).view(T, H, K)

    def unit(u):
        return u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k = unit(heads(m.q_proj, m.q_conv1d)), unit(heads(m.k_proj, m.k_conv1d))
    v = heads(m.v_proj, m.v_conv1d)
    z = (m.f_b_proj(m.f_a_proj(x)) + m.dt_bias).view(T, H, K)
    rate = m.A_log.exp()[:, None]
    g = -rate * F.softplus(z) if m.g_min is None else m.g_min * torch.sigmoid(rate * z)
    beta = torch.sigmoid(m.b_proj(x))
    state, outputs = x.new_zeros(H, K, K), []
    for t in range(T):
        state = g[t].exp()[..., None] * state
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], error)
        outputs.append(K**-0.5 * torch.einsum("hk,hkv->hv", q[t], state))
    o = torch.stack(outputs) if outputs else x.new_zeros(0, H, K)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.o_norm.weight
    gate = m.g_proj(x) if m.full_rank_gate else m.g_b_proj(m.g_a_proj(x))
    return m.o_proj((o * torch.sigmoid(gate.view(T, H, K))).flatten(1)), state


def gradients(m, x, y, weights):
    named = dict(m.named_parameters())
    return dict(zip(["x", *named], torch.autograd.grad((y * weights).sum(), [x, *named.values()])))


def assert_close(got, expected, tolerance=1e-12):
    for name, e in expected.items():
        error = (got[name] - e).abs().max() / e.abs().max().clamp(min=1)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(("g_min", "full_rank"), KINDS)
@pytest.mark.parametrize("T", [1, 3, 70])
def test_layer_is_its_equations_with_all_gradients(g_min, full_rank, T):
    m = layer(g_min, full_rank)
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    cache = m.new_cache(2)
    y = m(x, cache=cache)
    rows = [equations(m, row) for row in x]
    expected = torch.stack([row for row, _ in rows])
    assert_close({"y": y, "state": cache.state}, {"y": expected, "state": torch.stack([s for _, s in rows])})
    assert_close(gradients(m, x, m(x), weights), gradients(m, x, expected, weights), 1e-11)


@pytest.mark.parametrize("g_min", [-5.0, None])
def test_packed_documents_are_separate_ones(g_min):
    """Slow decay, for a fast one hides what leaks."""
    m = layer(g_min)
    with torch.no_grad():
        m.dt_bias.fill_(-8.0)
        m.f_b_proj.weight.mul_(0.1)
    cu = [0, 0, 37, 38, 38, 90]
    x = torch.randn(1, cu[-1], D, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    packed = m(x, cu_seqlens=torch.tensor(cu))
    separate = torch.cat([m(x[:, a:b]) for a, b in pairwise(cu) if b > a], 1)
    assert_close({"y": packed}, {"y": separate})
    assert_close(gradients(m, x, packed, weights), gradients(m, x, separate, weights))
    joined = m(x)
    assert (joined - packed).abs().max() > 1e-3  # the boundaries do something


@pytest.mark.parametrize("splits", [[32, 32, 33], [1, 96], [96, 1], [1] * 97, [31, 1, 64, 1], [0, 50, 0, 47]])
def test_calls_on_a_cache_are_one_call(splits):
    m = layer().eval()
    x = torch.randn(2, 97, D, dtype=torch.float64)
    with torch.no_grad():
        whole, pieces = m.new_cache(2), m.new_cache(2)
        expected = m(x, cache=whole)
        got = torch.cat([m(piece, cache=pieces) for piece in x.split(splits, 1)], 1)
    assert_close(
        {"y": got, "state": pieces.state, "conv": pieces.conv},
        {"y": expected, "state": whole.state, "conv": whole.conv},
    )
    assert pieces.lengths == whole.lengths == [97, 97]


def test_several_tokens_on_a_filled_cache_are_single_ones():
    m = layer().eval()
    x = torch.randn(1, 17, D, dtype=torch.float64)
    with torch.no_grad():
        at_once, singly = m.new_cache(1), m.new_cache(1)
        for cache in (at_once, singly):
            m(x[:, :12], cache=cache)
        expected = m(x[:, 12:], cache=at_once)
        got = torch.cat([m(x[:, t : t + 1], cache=singly) for t in range(12, 17)], 1)
        fresh = m(x[:, 12:])
    assert_close({"y": got, "state": singly.state}, {"y": expected, "state": at_once.state})
    assert (fresh - expected).abs().max() > 1e-3  # the past counts


def test_cached_state_is_key_first_and_its_window_holds_raw_rows():
    m = layer()
    x = torch.randn(1, 25, D, dtype=torch.float64)
    cache = m.new_cache(1)
    m(x[:, :20], cache=cache)
    _, state = equations(m, x[0, :20])
    assert (state - state.mT).abs().max() > 0.05  # so that the layout shows
    assert_close({"state": cache.state[0]}, {"state": state})
    raw = torch.cat([proj(x[0, 17:20]) for proj in (m.q_proj, m.k_proj, m.v_proj)], -1)
    assert_close({"conv": cache.conv[0]}, {"conv": raw})
    assert_close({"y": m(x[:, 20:], cache=cache)[0]}, {"y": equations(m, x[0])[0][20:]})


def test_sequences_of_a_batch_do_not_touch_each_other():
    m = layer().eval()
    x = torch.randn(3, 30, D, dtype=torch.float64)
    order = torch.tensor([2, 0, 1])

    def decode(x, rows):
        cache = m.new_cache(len(x))
        m(x[:, :20], cache=cache)
        cache = cache.select(rows)
        return torch.cat([m(x[rows, t : t + 1], cache=cache) for t in range(20, 30)], 1)

    with torch.no_grad():
        together = decode(x, order)
        alone = torch.cat([decode(x[i : i + 1], torch.tensor([0])) for i in order.tolist()])
        other = x.clone()
        other[0] = torch.randn(30, D, dtype=torch.float64)
        changed = decode(other, order)
    assert_close({"y": together}, {"y": alone})
    assert changed[[0, 2]].equal(together[[0, 2]])
    assert not changed[1].equal(together[1])


def test_packed_decoding_moves_each_sequence_by_its_own_number_of_tokens():
    m = layer().eval()
    x = torch.randn(3, 30, D, dtype=torch.float64)
    steps = [(5, 0, 12), (0, 1, 1), (1, 1, 0), (7, 20, 2)]
    cache, done = m.new_cache(3), [0, 0, 0]
    outputs = [[], [], []]
    with torch.no_grad():
        for counts in steps:
            new = torch.cat([x[i, done[i] : done[i] + n] for i, n in enumerate(counts)])[None]
            cu = [0, counts[0], sum(counts[:2]), sum(counts)]
            for i, piece in enumerate(m(new, cache=cache, cu_seqlens=cu)[0].split(counts)):
                outputs[i].append(piece)
            done = [n + c for n, c in zip(done, counts)]
        assert cache.lengths == done == [13, 22, 15]
        for i in range(3):
            assert_close({"y": torch.cat(outputs[i])}, {"y": m(x[i : i + 1, : done[i]])[0]})


# One token a sequence goes through the fused step; where gradients are on, through the operations that it fuses.


@pytest.fixture
def steps(monkeypatch):
    """The fused steps taken, each as the number of its sequences."""
    taken, decode = [], perilune.nn.kda.kda_decode

    def counted(qkv, *args, **options):
        taken.append(len(qkv))
        return decode(qkv, *args, **options)

    monkeypatch.setattr(perilune.nn.kda, "kda_decode", counted)
    return taken


def both_ways(m, x, prompt, cu_seqlens=None):
    """Prompts in two pieces, then token by token: the outputs of the last tokens and the cache, fused and not."""
    results = []
    for gradients in (False, True):
        cache = m.new_cache(len(x))
        with torch.no_grad():
            m(x[:, : prompt // 2], cache=cache)
            m(x[:, prompt // 2 : prompt], cache=cache)
        with torch.set_grad_enabled(gradients):
            tokens = [x[:, t : t + 1] for t in range(prompt, x.shape[1])]
            if cu_seqlens is not None:
                tokens = [token.transpose(0, 1) for token in tokens]  # [1, N, D]
            y = torch.stack([m(token, cache=cache, cu_seqlens=cu_seqlens) for token in tokens])
        results.append({"y": y.detach(), "state": cache.state.detach(), "conv": cache.conv.detach()})
        assert cache.lengths == [x.shape[1]] * len(x)
    return results


@pytest.mark.parametrize(("g_min", "full_rank"), KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_fused_step_is_the_operations(steps, g_min, full_rank, dtype, tolerance):
    """An eps that weighs as much as what it is added to, so that norm, gate and scale must be the layer's own."""
    m = layer(g_min, full_rank, dtype, norm_eps=0.01)
    fused, plain = both_ways(m, torch.randn(3, 18, D, dtype=dtype), 12)
    assert steps == [3] * 6
    assert_close(fused, plain, tolerance)
    assert {name: t.dtype for name, t in fused.items()} == {name: t.dtype for name, t in plain.items()}
    m.o_norm.eps = 1e-5
    assert (both_ways(m, torch.randn(3, 18, D, dtype=dtype), 12)[0]["y"] - fused["y"]).abs().max() > 0.01


@pytest.mark.parametrize("conv_size", [1, 2, 7])
def test_a_fused_step_takes_filters_of_any_width(steps, conv_size):
    fused, plain = both_ways(layer(conv_size=conv_size), torch.randn(2, 12, D, dtype=torch.float64), 4)
    assert steps == [2] * 8
    assert fused.pop("conv").equal(plain.pop("conv"))  # empty, where the filter has one tap
    assert_close(fused, plain)


def test_a_row_of_single_tokens_is_a_step_too(steps):
    m, x = layer(), torch.randn(3, 15, D, dtype=torch.float64)
    packed, plain = both_ways(m, x, 9, cu_seqlens=[0, 1, 2, 3])
    assert steps == [3] * 6
    assert_close(packed, plain)
    assert packed["y"].shape == (6, 1, 3, D)
    assert_close({"y": packed["y"][:, 0]}, {"y": both_ways(m, x, 9)[0]["y"][:, :, 0]})


def test_what_is_no_step_takes_the_operations(steps):
    m, x = layer(), torch.randn(2, 9, D, dtype=torch.float64)
    cache = m.new_cache(2)
    with torch.no_grad():
        m(x[:, :1], cache=cache)  # nothing to go on from
        m(x[:, 1:3], cache=cache)
        m(x[:1, 3:6], cache=cache, cu_seqlens=[0, 1, 3])
        m(x[:1, :0], cache=cache, cu_seqlens=[0, 0, 0])
        m(x[:0, :1], cache=m.new_cache(0))
    m(x[:, :1], cache=cache)
    assert steps == []
    assert cache.lengths == [5, 6]


def test_bfloat16_steps_are_no_worse_than_the_operations(steps):
    m, x = layer(dtype=torch.bfloat16), torch.randn(3, 40, D, dtype=torch.bfloat16)
    fused, plain = both_ways(m, x, 20)
    exact = both_ways(m.double(), x.double(), 20)[1]
    assert steps == [3] * 40
    assert fused["state"].dtype == torch.float32
    assert fused["y"].dtype == fused["conv"].dtype == torch.bfloat16
    assert fused["conv"].equal(plain["conv"])
    for name in ("y", "state"):
        off, allowed = ((t[name].double() - exact[name]).abs().max() for t in (fused, plain))
        assert off <= 1.5 * allowed + 2**-8 * exact[name].abs().max(), name


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float64])
def test_a_cache_may_have_another_dtype(steps, cached, given):
    """As it comes from a model of that dtype, and once with its state cast as well."""
    m, x = layer(dtype=cached), torch.randn(2, 10, D, dtype=torch.float64)
    past = m.new_cache(2)
    with torch.no_grad():
        m(x[:, :8].to(cached), cache=past)
    m, new = m.to(given), x[:, 8:9].to(given)
    for state in (past.state, past.state.to(cached)):
        results = []
        for gradients in (False, True):
            cache = RecurrentCache([8, 8], past.conv, state)
            with torch.set_grad_enabled(gradients):
                y = m(new, cache=cache)
            results.append({"y": y.detach(), "state": cache.state.detach(), "conv": cache.conv.detach()})
        fused, plain = results
        assert {name: t.dtype for name, t in fused.items()} == {name: t.dtype for name, t in plain.items()}
        narrow = torch.bfloat16 in (cached, given)
        assert_close(fused, plain, 2e-2 if narrow else 1e-5 if torch.float32 in (cached, given) else 1e-12)
    assert steps == [2, 2]


def test_autocast_steps_are_the_operations(steps):
    m, x = layer(dtype=torch.float32), torch.randn(2, 20, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused, plain = both_ways(m, x, 12)
    assert steps == [2] * 8
    assert fused["state"].dtype == torch.float32
    assert_close(fused, plain, 2e-2)


def test_a_step_leaves_what_others_hold(steps):
    """Tensors taken from a cache, shallow copies and selections of it stay as they are, and so can be gone on from."""
    m, x = layer(dtype=torch.float32), torch.randn(2, 12, D)
    with torch.no_grad():
        cache = m.new_cache(2)
        m(x[:, :6], cache=cache)
        taken = cache.state, cache.conv
        values = [t.clone() for t in taken]
        fork, selected = copy.copy(cache), cache.select(torch.tensor([0, 1]))
        outputs = []
        for branch in (cache, fork, selected, RecurrentCache([6, 6], taken[1], taken[0])):
            outputs.append([m(x[:, t : t + 1], cache=branch) for t in range(6, 12)])
            assert all(a.equal(b) for a, b in zip(taken, values))
    assert len(steps) == 24
    for branch in outputs[1:]:
        assert all(a.equal(b) for a, b in zip(branch, outputs[0]))


def test_a_step_leaves_a_graph_behind_the_cache_alone(steps):
    m, x = layer(), torch.randn(1, 8, D, dtype=torch.float64)

    def gradients_of_a_prompt(decode):
        cache = m.new_cache(1)
        y = m(x[:, :6], cache=cache)
        state = cache.state
        assert state.requires_grad
        if decode:
            with torch.no_grad():
                m(x[:, 6:7], cache=cache)
            assert not cache.state.requires_grad
        return torch.autograd.grad(y.sum() + state.square().sum(), list(m.parameters()))

    expected = gradients_of_a_prompt(False)
    assert all(a.equal(b) for a, b in zip(gradients_of_a_prompt(True), expected))
    assert steps == [1]


def test_a_cache_may_leave_inference_mode(steps):
    m, x = layer(dtype=torch.float32), torch.randn(2, 9, D)
    cache, expected = m.new_cache(2), m.new_cache(2)
    with torch.no_grad():
        want = m(x, cache=expected)
    with torch.inference_mode():
        m(x[:, :6], cache=cache)
        m(x[:, 6:7], cache=cache)
    with torch.no_grad():
        got = m(x[:, 7:8], cache=cache)
    with torch.inference_mode():
        last = m(x[:, 8:], cache=cache)
    assert steps == [2, 2, 2]
    assert_close(
        {"y": torch.cat([got, last], 1), "state": cache.state}, {"y": want[:, 7:], "state": expected.state}, 1e-5
    )


def test_steps_follow_their_weights(steps):
    """Nothing that a step makes of the parameters outlives it, however they are changed."""
    m, other = layer(), layer()
    x = torch.randn(1, 8, D, dtype=torch.float64)
    both_ways(m, x, 5)
    for p, new in zip(m.parameters(), other.parameters()):
        p.data.copy_(new.data)
    assert_close(both_ways(m, x, 5)[0], both_ways(other, x, 5)[1])


def test_cached_decoding_can_be_compiled_as_a_whole():
    m, x = layer(dtype=torch.float32), torch.randn(2, 8, D)
    compiled = torch.compile(lambda x, cache: m(x, cache=cache), fullgraph=True, backend="eager")
    with torch.no_grad():
        cache, expected = m.new_cache(2), m.new_cache(2)
        want = torch.cat([m(x[:, :7], cache=expected), m(x[:, 7:], cache=expected)], 1)
        m(x[:, :7], cache=cache)
        assert_close({"y": compiled(x[:, 7:], cache)}, {"y": want[:, 7:]}, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_hidden_rows_have_finite_gradients(dtype):
    m = layer(dtype=dtype)
    x = torch.randn(1, 20, D, dtype=dtype)
    x[:, :7] = 0
    x.requires_grad_()
    m(x).float().square().sum().backward()
    for name, grad in {"x": x.grad, **{n: p.grad for n, p in m.named_parameters()}}.items():
        assert grad.isfinite().all(), name
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize(("g_min", "full_rank"), KINDS)
def test_every_parameter_has_its_distribution(g_min, full_rank):
    """Fresh memory is NaN here; a parameter that nobody drew would show."""
    m = KimiDeltaAttention(64, 16, 32, g_min=g_min, full_rank_gate=full_rank)
    assert all(p.isfinite().all() for p in m.parameters())
    initialize_(m)
    seen = set()
    for name, p in m.named_parameters():
        if name == "A_log":
            bounds = (0, 0) if g_min is not None else (0, math.log(16))
        elif name == "dt_bias":
            bounds = (-6.9073, -2.2522)
            assert p.mean().item() == pytest.approx(-4.60, abs=0.2)
        elif "conv1d" in name:
            bounds = (-0.5, 0.5)
            assert p.std().item() == pytest.approx(12**-0.5, rel=0.05)
        elif name == "o_norm.weight":
            bounds = (1, 1)
        else:
            bounds = (-0.12, 0.12)
            assert p.std().item() == pytest.approx(0.02, rel=0.1), name
        assert bounds[0] - 1e-4 <= p.min() <= p.max() <= bounds[1] + 1e-4, name
        assert p.unique().numel() > 10 or bounds[0] == bounds[1], name
        seen.add(name)
    assert set(FLOAT32) < seen


def test_initialisation_works_after_the_meta_device():
    with torch.device("meta"):
        m = KimiDeltaAttention(D, H, K, g_min=None)
    m.to_empty(device="cpu")
    assert m.dt_bias.isnan().all()
    initialize_(m)
    assert all(p.isfinite().all() for p in m.parameters())
    assert ((m.A_log >= 0) & (m.A_log <= math.log(16))).all()


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_casting_keeps_the_float32_parameters_to_the_bit(cast):
    fine = 1 + 2**-12  # no bfloat16 number
    m = KimiDeltaAttention(D, H, K)
    with torch.no_grad():
        for p in m.parameters():
            p.fill_(fine)
    cast(m)
    for name, p in m.named_parameters():
        assert (p.dtype == torch.float32) == (name in FLOAT32), name
        if name in FLOAT32:
            assert (p == fine).all(), name
    assert m.double().A_log.dtype == torch.float64
    assert m.bfloat16().A_log.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in m.float().parameters())


def test_casting_reaches_gradients_alike():
    m = KimiDeltaAttention(D, H, K)
    m(torch.randn(1, 5, D)).sum().backward()
    m.bfloat16()
    for name, p in m.named_parameters():
        assert p.grad.dtype == p.dtype, name


@pytest.mark.parametrize("g_min", [-5.0, None])
def test_bfloat16_stays_close(g_min):
    m = layer(g_min, dtype=torch.bfloat16)
    x = torch.randn(2, 70, D, dtype=torch.bfloat16)
    cache = m.new_cache(2)
    y = m(x, cache=cache)
    exact, _ = equations(m.double(), x[0].double())
    assert y.dtype == torch.bfloat16
    assert cache.state.dtype == torch.float32
    assert cache.conv.dtype == torch.bfloat16
    assert (y[0].double() - exact).abs().max() <= 2e-2 * exact.abs().max()


def test_autocast_runs_on_float32_weights_with_a_float32_state():
    m = layer(dtype=torch.float32)
    x = torch.randn(2, 20, D)
    cache = m.new_cache(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x, cache=cache)
        y.float().square().sum().backward()
    assert cache.state.dtype == torch.float32
    exact = m(x)
    assert (y - exact).abs().max() <= 2e-2 * exact.abs().max()
    for name, p in m.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.abs().max() > 0, name


def test_misuse_is_named():
    m = layer()
    x = torch.randn(2, 4, D, dtype=torch.float64)
    for size in ("hidden_size", "num_heads", "head_dim", "conv_size"):
        with pytest.raises(ConfigError, match=f"^{size}: expected 1 at least, got 0; "):
            KimiDeltaAttention(**{"hidden_size": 8, "num_heads": 1, "head_dim": 8, size: 0})
    with pytest.raises(ShapeError, match=r"^x: expected \[B, T, D\], got \[5, 32\]; "):
        layer()(torch.zeros(5, 32))
    with pytest.raises(ConfigError, match="g_min"):
        KimiDeltaAttention(D, H, K, g_min=0.5)
    with pytest.raises(ShapeError, match="cu_seqlens"):
        m(x, cu_seqlens=[0, 4])
    with pytest.raises(ShapeError, match="cache: expected one for 2 sequences, got one for 3"):
        m(x, cache=m.new_cache(3))

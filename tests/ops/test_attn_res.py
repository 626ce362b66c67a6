"""Attention residuals: a plain list version, the fast path against the reference, and the two-phase form."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.core.errors import BackendError, ShapeError
from perilune.ops import attn_res, attn_res_bank, attn_res_merge, blocks, share_gradient
from perilune.ops.attn_res import chunked
from perilune.ops.attn_res.stacked import Stacked

BACKENDS = ["reference", "chunked"]


def inputs(N: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """query, key_weight and N sources of this shape, all wanting gradients."""
    D = shape[-1]
    tensors = [torch.randn(D), 1 + 0.3 * torch.randn(D), *(2.0 ** (i % 3) * torch.randn(shape) for i in range(N))]
    return [t.to(dtype).requires_grad_() for t in tensors]


def mix(tensors: list[Tensor], **options: object) -> Tensor:
    query, key_weight, *sources = tensors
    return attn_res(query, sources, key_weight, **options)


def value_and_gradients(tensors: list[Tensor], dout: Tensor, **options: object) -> list[Tensor]:
    out = mix(tensors, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def twins(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_worked_out_in_plain_python(backend: str) -> None:
    query, key_weight = [0.5, -1.0], [2.0, 0.5]
    sources = [[3.0, 4.0], [-1.0, 1.0], [0.0, 2.0]]
    scores = []
    for v in sources:
        rms = math.sqrt(sum(x * x for x in v) / 2 + 1e-5)
        scores.append(sum(q * k * x / rms for q, k, x in zip(query, key_weight, v)))
    exps = [math.exp(s) for s in scores]
    expected = [sum(e * v[d] for e, v in zip(exps, sources)) / sum(exps) for d in range(2)]
    out = mix([torch.tensor(t, dtype=torch.float64) for t in (query, key_weight, *sources)], backend=backend)
    assert out.tolist() == pytest.approx(expected, rel=1e-14, abs=0)


@pytest.mark.parametrize("shape", [(7,), (1, 1), (3, 5, 7), (130, 33), (0, 4), (2, 1)], ids=str)
@pytest.mark.parametrize("N", [1, 2, 5, 9])
@pytest.mark.parametrize("block", [16, 2**18])
def test_fast_equals_reference(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], N: int, block: int) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", block)
    tensors, dout = inputs(N, *shape), torch.randn(shape, dtype=torch.float64)
    got, expected = (value_and_gradients(tensors, dout, backend=b) for b in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_norm_has_the_eps_it_was_given(eps: float) -> None:
    tensors, dout = inputs(3, 4, 6), torch.randn(4, 6, dtype=torch.float64)
    got, expected = (value_and_gradients(tensors, dout, eps=eps, backend=b) for b in ("chunked", "reference"))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    other = value_and_gradients(tensors, dout, eps=0.1)
    assert (other[0] - got[0]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_source_comes_back_and_teaches_the_query_nothing(backend: str, dtype: torch.dtype) -> None:
    query, key_weight, source = inputs(1, 6, 8, dtype=dtype)
    dout = torch.randn(6, 8).to(dtype)
    out, dquery, dkey_weight, dsource = value_and_gradients([query, key_weight, source], dout, backend=backend)
    assert torch.equal(out, source)
    assert dquery.eq(0).all()
    assert dkey_weight.eq(0).all()
    assert torch.equal(dsource, dout)


def test_the_output_is_a_tensor_of_its_own() -> None:
    query, key_weight, source = inputs(1, 6, 8)
    for backend in BACKENDS:
        assert mix([query, key_weight, source], backend=backend).data_ptr() != source.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_of_zeros_takes_the_plain_mean(backend: str, dtype: torch.dtype) -> None:
    sources = [torch.full((2, 5), x, dtype=dtype) for x in (1.0, 2.0, 6.0)]
    out = attn_res(torch.zeros(5), sources, torch.ones(5), backend=backend)
    assert out.eq(3).all()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(factor=st.floats(0.1, 100), N=st.integers(2, 6))
def test_the_length_of_a_source_does_not_change_its_weight(factor: float, N: int) -> None:
    query, key_weight, *sources = (t.detach() for t in inputs(N, 4, 16))
    change = (factor - 1) * sources[0]
    before = attn_res(query, sources, key_weight, eps=1e-12)
    after = attn_res(query, [sources[0] + change, *sources[1:]], key_weight, eps=1e-12)
    score = [(v * torch.rsqrt(v.square().mean(-1, keepdim=True))) @ (query * key_weight) for v in sources]
    weight = torch.stack(score).softmax(0)[0].unsqueeze(-1)
    torch.testing.assert_close(after - before, weight * change, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_scores_and_empty_sources_stay_finite(backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        query = torch.full((8,), 1e4, dtype=dtype)
        sources = [
            torch.zeros(2, 8),
            torch.ones(2, 8),
            -torch.ones(2, 8),
            1e15 * torch.ones(2, 8),
            1e-15 * torch.ones(2, 8),
        ]
        tensors = [t.to(dtype).requires_grad_() for t in (query, torch.ones(8), *sources)]
        for t in value_and_gradients(tensors, torch.ones(2, 8, dtype=dtype), backend=backend):
            assert torch.isfinite(t).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    query, key_weight, *_ = (t.detach() for t in inputs(0, 64, dtype=torch.float32))
    tensors = [query.mul(0.2), key_weight, *inputs(5, 200, 64, dtype=dtype)[2:]]
    tensors = [t.detach().requires_grad_() for t in tensors]
    dout = torch.randn(200, 64).to(dtype)
    got = value_and_gradients(tensors, dout)
    exact = value_and_gradients(twins(tensors), dout.double(), backend="reference")
    assert [t.dtype for t in got] == [dtype, torch.float32, torch.float32, *[dtype] * 5]
    for name, g, e in zip(("out", "query", "key_weight", *range(5)), got, exact):
        bound = torch.finfo(g.dtype).eps / 2 * e.abs() + 32 * torch.finfo(torch.float32).eps * e.abs().max()
        assert ((g.double() - e).abs() <= bound).all(), name


def test_strides_of_source_and_gradient_do_not_matter() -> None:
    wide = torch.randn(3, 4, 15, dtype=torch.float64)
    loose = [wide[0, 0, :5], wide[0, 0, 1::3], wide[..., 5:10], wide[..., ::3]]
    loose += [torch.randn(5, 4, 3, dtype=torch.float64).permute(2, 1, 0), wide[:1, :1, :5].expand(3, 4, 5)]
    gradients = (
        loose[4] * 2,
        torch.randn(5, dtype=torch.float64).expand(3, 4, 5),
        torch.ones(()).double().expand(3, 4, 5),
    )
    for dout in gradients:
        got = value_and_gradients([t.detach().requires_grad_() for t in loose], dout)
        tight = [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in loose]
        torch.testing.assert_close(got, value_and_gradients(tight, dout.contiguous()), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("R", [1, 600])  # one that is stacked, one that is not
def test_without_autograd_the_value_is_the_same(mode: Callable[[], AbstractContextManager], R: int) -> None:
    tensors = inputs(3, R, 64)
    expected = mix(tensors, backend="reference").detach()
    with mode():
        torch.testing.assert_close(mix(tensors), expected, rtol=1e-12, atol=1e-12)


def test_one_tensor_may_be_several_sources() -> None:
    query, key_weight, a, b = inputs(2, 4, 6)
    dout = torch.randn(4, 6, dtype=torch.float64)
    got, expected = (
        torch.autograd.grad(attn_res(query, [a, b, a], key_weight, backend=x), [query, a, b], dout)
        for x in ("chunked", "reference")
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def kept_storages(call: Callable[[], Tensor]) -> dict[int, int]:
    """The bytes of each storage that the graph of a call holds on to."""
    kept = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_graph_keeps_the_sources_themselves(dtype: torch.dtype) -> None:
    N, R, D = 6, 200, 64
    tensors = inputs(N, R, D, dtype=dtype)
    kept = kept_storages(lambda: mix(tensors))
    own = {t.untyped_storage().data_ptr() for t in tensors}
    assert own <= kept.keys()
    beside = sum(size for place, size in kept.items() if place not in own)
    assert beside <= 2 * N * R * 4  # a score and an inverse norm, float32, for each row and source
    stacked = kept_storages(lambda: mix(tensors, backend="reference"))
    assert sum(size for place, size in stacked.items() if place not in own) >= N * R * D * 4


def test_memory_grows_by_one_source_a_sublayer() -> None:
    """A stream in which every sublayer reads all before it: the graph holds each source once, not once a reader."""
    query, key_weight, *_ = inputs(0, 64, dtype=torch.float32)

    def bytes_at(depth: int) -> int:
        sources = [torch.randn(50, 64, requires_grad=True)]

        def run() -> Tensor:
            for _ in range(depth):
                sources.append(attn_res(query, sources, key_weight))
            return sources[-1]

        return sum(kept_storages(run).values())

    at = [bytes_at(depth) for depth in (4, 8, 12)]
    source = 50 * 64 * 4
    for less, more in pairwise(at):
        assert more - less <= 4 * source * 1.5  # copies would be 26 and more


@pytest.mark.parametrize("shape", [(7,), (3, 5, 7), (1, 1, 64)], ids=str)
@pytest.mark.parametrize("N", [1, 4, 8])
def test_two_phases_equal_one(N: int, shape: tuple[int, ...]) -> None:
    Q, D = 5, shape[-1]
    sources = inputs(N, *shape)[2:]
    queries, key_weights = torch.randn(Q, D, dtype=torch.float64), torch.randn(Q, D, dtype=torch.float64)
    queries[0] = 0
    queries[1] *= 100  # scores far apart
    bank = attn_res_bank(queries, sources, key_weights)
    assert bank.m.shape == bank.l.shape == (Q, *shape[:-1])
    assert bank.o.shape == (Q, *shape)
    for i in range(Q):
        live = torch.randn(shape, dtype=torch.float64)
        got = attn_res_merge(bank.of(i), queries[i], live, key_weights[i])
        torch.testing.assert_close(
            got, attn_res(queries[i], [*sources, live], key_weights[i], backend="reference"), rtol=1e-12, atol=1e-12
        )
        alone = bank.o[i] / bank.l[i].unsqueeze(-1)
        torch.testing.assert_close(
            alone, attn_res(queries[i], sources, key_weights[i], backend="reference"), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("sign", [-1, 1])
def test_two_phases_with_scores_too_far_apart_for_exp(sign: int) -> None:
    query, one = torch.full((4,), 1000.0, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    bank, live = sign * one, -2 * sign * one
    out = attn_res_merge(attn_res_bank(query[None], [bank], one[None]).of(0), query, live, one)
    assert torch.equal(out, bank if sign > 0 else live)


def test_two_phases_have_the_gradients_of_one() -> None:
    query, key_weight, live, *sources = inputs(4, 3, 6)
    wanted, dout = [query, key_weight, live, *sources], torch.randn(3, 6, dtype=torch.float64)
    bank = attn_res_bank(query[None], sources, key_weight[None], eps=0.1)
    got = torch.autograd.grad(attn_res_merge(bank.of(0), query, live, key_weight, eps=0.1), wanted, dout)
    expected = torch.autograd.grad(attn_res(query, [*sources, live], key_weight, eps=0.1), wanted, dout)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_two_phases_in_bfloat16_round_once() -> None:
    query, key_weight, live, *sources = (t.detach() for t in inputs(4, 30, 16, dtype=torch.bfloat16))
    bank = attn_res_bank(query[None], sources, key_weight[None])
    assert bank.o.dtype == bank.l.dtype == bank.m.dtype == torch.float32
    got = attn_res_merge(bank.of(0), query, live, key_weight)
    exact = mix([t.double() for t in (query, key_weight, *sources, live)], backend="reference")
    assert got.dtype == torch.bfloat16
    bound = torch.finfo(torch.bfloat16).eps / 2 * exact.abs() + 32 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing_inside(backend: str) -> None:
    tensors, dout = inputs(3, 5, 16, dtype=torch.float32), torch.randn(5, 16)
    expected = value_and_gradients(tensors, dout, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = [mix(tensors, backend=backend)]
        if backend == "chunked":  # the reference leaves its backward pass to autograd, as any equation in torch does
            got += torch.autograd.grad(got[0], tensors, dout)
    for g, e in zip(got, expected):
        assert g.dtype == torch.float32
        assert torch.equal(g, e)


def test_autocast_changes_nothing_in_two_phases() -> None:
    query, key_weight, *sources = inputs(3, 5, 16, dtype=torch.float32)

    def two_phases() -> Tensor:
        bank = attn_res_bank(query[None], sources[:2], key_weight[None])
        return attn_res_merge(bank.of(0), query, sources[2], key_weight)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = two_phases()
    assert torch.equal(got, two_phases())


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("sources: expected one or more tensors, got none", {"sources": []}),
        (r"sources\[0\]: expected a floating tensor", {"sources": [torch.zeros(2, 3, dtype=torch.long)]}),
        (r"sources\[0\]: expected a floating tensor", {"sources": [torch.zeros(())]}),
        (r"sources\[1\]: expected torch.float32 \[2, 3\]", {"sources": [torch.zeros(2, 3), torch.zeros(3)]}),
        (r"sources\[1\]: expected torch.float32", {"sources": [torch.zeros(2, 3), torch.zeros(2, 3).bfloat16()]}),
        (r"query: expected \[3\], .*, got \[1, 3\]", {"query": torch.zeros(1, 3)}),
        (r"key_weight: expected \[3\], .*, got \[4\]", {"key_weight": torch.zeros(4)}),
    ],
)
def test_what_does_not_fit_is_refused(message: str, changes: dict[str, object]) -> None:
    arguments = {"query": torch.zeros(3), "sources": [torch.zeros(2, 3)], "key_weight": torch.ones(3), **changes}
    with pytest.raises(ShapeError, match=message):
        attn_res(**arguments)


def test_what_does_not_fit_two_phases_is_refused() -> None:
    source, vector, vectors = torch.zeros(2, 3), torch.zeros(3), torch.zeros(4, 3)
    bank = attn_res_bank(vectors, [source], vectors)
    for message, call in (
        (r"queries: expected \[Q, 3\], got \[3\]", lambda: attn_res_bank(vector, [source], vector)),
        (r"key_weights: expected \[Q, 3\], got \[2, 3\]", lambda: attn_res_bank(vectors, [source], vectors[:2])),
        ("sources: expected one or more", lambda: attn_res_bank(vectors, [], vectors)),
        ("partial: expected o .* take one query", lambda: attn_res_merge(bank, vector, source, vector)),
        (r"query: expected \[3\]", lambda: attn_res_merge(bank.of(0), vectors, source, vector)),
    ):
        with pytest.raises(ShapeError, match=message):
            call()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendError, match="do you mean 'chunked'"):
        attn_res(torch.zeros(3), [torch.zeros(2, 3)], torch.ones(3), backend="chunk")


# side by side


def stacked(tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    query, key_weight, *sources = tensors
    out = Stacked.apply(query, key_weight, 1e-5, *sources)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


@pytest.mark.parametrize("shape", [(7,), (1, 1), (3, 5, 7), (130, 33), (2, 1)], ids=str)
@pytest.mark.parametrize("N", [1, 2, 9, 40])
@pytest.mark.parametrize("block", [16, 2**18])
def test_side_by_side_equals_reference(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], N: int, block: int
) -> None:
    monkeypatch.setattr(blocks, "DEVICE_BLOCK", block)
    tensors, dout = inputs(N, *shape), torch.randn(shape, dtype=torch.float64)
    expected = value_and_gradients(tensors, dout, backend="reference")
    torch.testing.assert_close(stacked(tensors, dout), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_side_by_side_shares_gradients_of_sources_read_often(dtype: torch.dtype) -> None:
    query, key_weight, *sources = inputs(4, 6, 8, dtype=dtype)
    gradients = {}
    for form in (Stacked, chunked.AttnRes):
        first, second = share_gradient(sources[0]), share_gradient(sources[1])
        total = sources[0].new_zeros(())
        for chosen in ([first, second, *sources[2:]], [second, first, first, first, second]):
            total = total + form.apply(query, key_weight, 1e-5, *chosen).square().sum()
        gradients[form] = torch.autograd.grad(total, [query, key_weight, *sources])
    close = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(gradients[Stacked], gradients[chunked.AttnRes], **close)


def test_side_by_side_a_backward_pass_under_autocast_computes_in_float32() -> None:
    query, key_weight, *sources = tensors = inputs(5, 6, 8, dtype=torch.float32)
    dout = torch.randn(6, 8)
    expected = stacked(tensors, dout)[1:]
    out = Stacked.apply(query, key_weight, 1e-5, *sources)
    with torch.autocast("cpu", torch.bfloat16):
        got = list(torch.autograd.grad(out, tensors, dout))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)

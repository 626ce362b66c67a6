"""Attention residuals over sources that a bank keeps in less memory: what is read, gradients, bytes."""

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError, ConfigError, ShapeError
from perilune.ops import Stored, attn_res, blocks, project_source, store_source

BACKENDS = ["reference", "chunked"]
f64 = torch.float64
FORMS = ["bfloat16", "float8", "rank"]


def inputs(N: int, *shape: int, dtype: torch.dtype = f64) -> tuple[Tensor, Tensor, list[Tensor]]:
    """query, key_weight [D], and N sources of different sizes."""
    torch.manual_seed(3)
    D = shape[-1]
    tensors = [torch.randn(D), 1 + 0.3 * torch.randn(D), *(2.0 ** (i % 3) * torch.randn(shape) for i in range(N))]
    query, key_weight, *sources = (x.to(dtype).requires_grad_() for x in tensors)
    return query, key_weight, sources


def matrices(D: int, r: int, dtype: torch.dtype = f64) -> tuple[Tensor, Tensor]:
    basis = torch.linalg.qr(torch.randn(D, r, dtype=f64))[0].to(dtype)
    return basis, (basis.T + 0.1 * torch.randn(r, D, dtype=dtype)).requires_grad_()


def kept(source: Tensor, form: str, down: Tensor, up: Tensor) -> Stored:
    return project_source(source, down, up) if form == "rank" else store_source(source, form)


def by_definition(source: Tensor, form: str, down: Tensor, up: Tensor) -> Tensor:
    """What is read, as an expression of torch that autograd differentiates: rounding is passed straight through."""
    if form == "rank":
        return source @ down @ up
    with torch.no_grad():
        if form == "bfloat16":
            read = source.bfloat16().to(source.dtype)
        else:
            scale = source.abs().amax(-1, keepdim=True) / 448
            read = torch.stack([x.to(torch.float8_e4m3fn).to(source.dtype) for x in (source / scale)]) * scale
    return source + (read - source).detach()


@pytest.mark.parametrize("shape", [(1, 3), (3, 5, 7), (130, 33), (2, 1)], ids=str)
@pytest.mark.parametrize("N", [1, 2, 5])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, backend: str, form: str, N: int, shape: tuple[int, ...]
) -> None:
    """N stored sources, read by two mixers, and a live one."""
    monkeypatch.setattr(blocks, "CPU_BLOCK", 64)
    query, key_weight, sources = inputs(N + 1, *shape)
    down, up = matrices(shape[-1], max(1, shape[-1] // 2))
    wanted = [query, key_weight, *sources, *([up] if form == "rank" else [])]
    douts = torch.randn(2, *shape, dtype=f64)

    def through(bank: list, **options: str) -> list[Tensor]:
        first = attn_res(query, [*bank, sources[-1]], key_weight, **options)
        second = attn_res(1 - query, bank, key_weight, **options)
        return [first, second, *torch.autograd.grad([first, second], wanted, list(douts))]

    got = through([kept(x, form, down, up) for x in sources[:-1]], backend=backend)
    expected = through([by_definition(x, form, down, up) for x in sources[:-1]], backend="reference")
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, f64])
def test_what_is_read(form: str, dtype: torch.dtype) -> None:
    source = inputs(1, 40, 24, dtype=dtype)[2][0].detach()
    down, up = (x.detach() for x in matrices(24, 8, dtype))
    stored = kept(source, form, down, up)
    assert (stored.shape, stored.dtype, stored.read().dtype) == (source.shape, dtype, dtype)
    exact = by_definition(source.double(), form, down.double(), up.double())
    size = exact.abs().amax(-1, keepdim=True)
    near = 8 * torch.finfo(dtype).eps * size
    if form == "float8" and dtype != f64:  # a quotient that falls on a border of float8 may fall to either side
        near = near + 2**-4 * exact.abs() + 2**-10 / 448 * size
        assert ((stored.read(f64) - exact).abs() <= 1e-6 * size).double().mean() > 0.98
    assert ((stored.read(f64) - exact).abs() <= near).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, f64])
def test_float8_errs_by_a_sixteenth_of_an_element_or_less(dtype: torch.dtype) -> None:
    """Over the whole range of a dtype; below a row's largest / 28672 in steps of that / 8."""
    source = (torch.randn(64, 50, dtype=f64) * 10.0 ** torch.arange(-30, 34).double()[:, None]).to(dtype)
    source[:, 0] *= 1e-6
    exact, read = source.double(), store_source(source, "float8").read(f64)
    largest = exact.abs().amax(-1, keepdim=True)
    assert ((read - exact).abs() <= exact.abs() * 2**-4 + largest / 448 * 2**-10).all()
    assert torch.allclose(read.abs().amax(-1, keepdim=True), largest, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_at_the_ends_of_the_range(form: str, dtype: torch.dtype) -> None:
    """Zeros stay zeros, huge and tiny rows finite; NaN and infinities reach their own rows and no others."""
    source = torch.randn(8, 16).to(dtype)
    source[0] = 0
    source[1] *= 1e38 / source[1].abs().max()
    source[2] = 1e-38
    source[3] = 1e-45
    down, up = (x.detach().to(dtype) for x in matrices(16, 6))
    clean = kept(source, form, down, up).read()
    assert clean.isfinite().all()
    assert clean[0].eq(0).all()
    source[4, 2], source[5, 3] = torch.nan, torch.inf
    read = kept(source, form, down, up).read()
    assert read[4].isnan().any()
    assert not read[5].isfinite().all()
    others = [0, 1, 2, 3, 6, 7]
    assert torch.equal(read[others], clean[others])
    query, weight = torch.randn(16), torch.ones(16)
    for backend in BACKENDS:
        out = attn_res(query, [kept(source, form, down, up), torch.randn(8, 16).to(dtype)], weight, backend=backend)
        assert out[4].isnan().all()
        assert out[others[2:]].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_source_comes_back_as_stored_and_teaches_the_query_nothing(backend: str, form: str) -> None:
    query, key_weight, (source,) = inputs(1, 6, 8, dtype=torch.float32)
    down, up = matrices(8, 4, torch.float32)
    stored = kept(source, form, down, up)
    out, dout = attn_res(query, [stored], key_weight, backend=backend), torch.randn(6, 8)
    dquery, dkey_weight, dsource = torch.autograd.grad(out, [query, key_weight, source], dout)
    assert dquery.eq(0).all()
    assert dkey_weight.eq(0).all()
    torch.testing.assert_close(out, stored.read(), rtol=1e-6, atol=0)
    expected = dout @ up.T @ down.T if form == "rank" else dout
    torch.testing.assert_close(dsource, expected, rtol=1e-5, atol=1e-6)


def kept_bytes(call) -> int:
    """Of all storages that the graph of a call holds, each once."""
    found = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return sum(found.values())


@pytest.mark.parametrize(
    ("form", "dtype", "each"),
    [
        ("bfloat16", torch.float32, 2 * 64), ("float8", torch.float32, 64 + 4), ("float8", torch.bfloat16, 64 + 4),
        ("rank", torch.float32, 4 * 16), ("rank", torch.bfloat16, 2 * 16),
    ],
)  # fmt: skip
def test_the_graph_keeps_what_is_stored_and_two_numbers_a_row(form: str, dtype: torch.dtype, each: int) -> None:
    N, R, D, readers = 4, 300, 64, 3
    query, key_weight, leaves = inputs(N, R, D, dtype=dtype)
    down, up = matrices(D, 16, dtype)

    def run() -> Tensor:
        bank = [kept(2 * x, form, down, up) for x in leaves]  # what is multiplied nobody else keeps
        assert [x.nbytes for x in bank] == [R * each] * N
        return sum(attn_res(query * i, bank, key_weight).sum() for i in range(readers))

    shared = 4 * D * (2 + readers) + 2 * up.nbytes
    numbers = readers * N * R * 2 * 4
    assert N * R * each <= kept_bytes(run) <= N * R * each + numbers + shared + 64


def test_a_two_byte_source_is_not_rounded_to_bfloat16() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        source = torch.randn(3, 8).to(dtype)
        stored = store_source(source, "bfloat16")
        assert stored.kept is None
        assert torch.equal(stored.read(), source)


@pytest.mark.parametrize("form", FORMS)
def test_stored_whole_and_live_sources_mix_with_a_norm_behind(form: str) -> None:
    query, key_weight, sources = inputs(3, 4, 6)
    down, up = matrices(6, 3)
    gain = torch.rand(6, dtype=f64)
    bank = [kept(sources[0], form, down, up), sources[1], store_source(sources[2], "bfloat16")]
    got, expected = (attn_res(query, bank, key_weight, norm_weight=gain, eps=0.1, backend=b) for b in BACKENDS)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_strides_and_an_empty_pack_do_not_matter() -> None:
    loose = torch.randn(5, 4, 12, dtype=torch.float32)[..., ::2].transpose(0, 1)
    for form in ("bfloat16", "float8"):
        assert torch.equal(store_source(loose, form).read(), store_source(loose.contiguous(), form).read())
        empty = store_source(loose[:0], form)
        out = attn_res(torch.randn(6), [empty, loose[:0]], torch.ones(6))
        assert out.shape == (0, 5, 6)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_changes_nothing_inside(form: str) -> None:
    query, key_weight, sources = inputs(2, 5, 16, dtype=torch.float32)
    down, up = matrices(16, 8, torch.float32)

    def run() -> list[Tensor]:
        out = attn_res(query, [kept(sources[0], form, down, up), sources[1]], key_weight)
        return [out, *torch.autograd.grad(out.sum(), [query, *sources])]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    assert all(torch.equal(x, y) for x, y in zip(got, expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_autograd_and_in_inference_mode(backend: str) -> None:
    query, key_weight, sources = inputs(2, 5, 8)
    expected = attn_res(query, [store_source(x, "float8") for x in sources], key_weight, backend=backend).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = attn_res(query, [store_source(x, "float8") for x in sources], key_weight, backend=backend)
        assert torch.equal(got, expected)


def test_a_second_backward_pass_adds_the_same_again() -> None:
    query, key_weight, (source,) = inputs(1, 4, 6)
    out = attn_res(query, [store_source(source, "float8"), 0 * source.detach()], key_weight).sum()
    once = torch.autograd.grad(out, source, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, source)[0], once)


def test_what_does_not_fit_is_refused() -> None:
    x, one = torch.randn(2, 6), torch.ones(6)
    with pytest.raises(ConfigError, match="bank: expected 'bfloat16' or 'float8', got 'int4'"):
        store_source(x, "int4")
    with pytest.raises(ShapeError, match=r"source: expected a floating tensor, got torch.int64 \[2, 6\]"):
        store_source(x.long(), "float8")
    with pytest.raises(ShapeError, match=r"down, up: expected \[6, r\] and \[r, 6\], got \[6, 2\] and \[6, 2\]"):
        project_source(x, torch.randn(6, 2), torch.randn(6, 2))
    with pytest.raises(ShapeError, match="down: expected one that is not learned"):
        project_source(x, torch.randn(6, 2).requires_grad_(), torch.randn(2, 6))
    with pytest.raises(ShapeError, match=r"sources\[1\]: expected torch.float32 \[2, 6\]"):
        attn_res(one, [store_source(x, "float8"), x[:1]], one)
    with pytest.raises(BackendError, match="attn_res_stored"):
        attn_res(one, [store_source(x, "float8")], one, backend="gluon")

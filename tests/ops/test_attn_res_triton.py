"""The kernels of attention residuals against the reference in float64.

What needs them runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU: there in small sizes,
and mostly on float32, for the interpreter cuts bfloat16 off where a GPU rounds.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError
from perilune.ops import attn_res, attn_res_advance, attn_res_bank, attn_res_merge, share_gradient, store_source

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]
ROWS = [0, 1, 5, 700] if GPU else [0, 1, 5]
WIDTHS = [16, 48, 1000, 2048, 7168] if GPU else [16, 48, 1000]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def inputs(N: int, R: int, D: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, key_weight, norm_weight, N sources [R, D] of different sizes; scores of about 1."""
    torch.manual_seed(0)
    vectors = [D**-0.5 * torch.randn(D), 1 + 0.3 * torch.randn(D), 1 + 0.3 * torch.randn(D)]
    sources = [(2.0 ** (i % 3) * torch.randn(R, D)).to(dtype) for i in range(N)]
    return [x.to(DEVICE).requires_grad_() for x in (*vectors, *sources)]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def run(
    backend: str, tensors: list[Tensor], dout: Tensor, norm: bool = False, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The value and the gradients of query, key_weight, norm_weight if there is a norm, and sources."""
    query, key_weight, norm_weight, *sources = tensors
    gain = norm_weight if norm else None
    out = attn_res(query, sources, key_weight, norm_weight=gain, dtype=dtype, backend=backend)
    wanted = [query, key_weight, *([norm_weight] if norm else []), *sources]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout)]


def assert_close(got: list[Tensor], exact: list[Tensor], slack: float = 4.0) -> None:
    """Rounded once, from float32 within `slack` of its own; sums over rows and columns as long as they are."""
    for i, (x, y) in enumerate(zip(got, exact)):
        size = y.abs().max() if y.numel() else 0.0
        bound = torch.finfo(x.dtype).eps * y.abs() + slack * 64 * torch.finfo(torch.float32).eps * size
        assert ((x.double() - y).abs() <= bound).all(), (i, float((x.double() - y).abs().max()), float(size))


@needs_kernels
@pytest.mark.parametrize("bank", ["whole", "float8"])
def test_on_another_device_than_the_current_one(bank: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def mixed(tensors: list[Tensor]) -> list[Tensor]:
        query, key_weight, norm_weight, *sources = tensors
        kept = sources if bank == "whole" else [*(store_source(x, "float8") for x in sources[:-1]), sources[-1]]
        out = attn_res(query, kept, key_weight, norm_weight=norm_weight, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))]

    here = inputs(3, 5, 48)
    got = mixed([x.detach().to("cuda:1").requires_grad_() for x in here])
    assert torch.cuda.current_device() == 0
    for x, y in zip(got, mixed(here)):
        torch.testing.assert_close(x.to("cuda:0"), y)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("N", [1, 2, 9, 16])
@pytest.mark.parametrize("norm", [False, True])
def test_the_kernels_equal_the_reference(norm: bool, N: int, R: int, D: int, dtype: torch.dtype) -> None:
    if INTERPRETED and D == 1000 and (N, norm) not in ((9, False), (2, True), (1, True)):
        pytest.skip("slow to interpret")
    tensors = inputs(N, R, D, dtype)
    dout = torch.randn(R, D, device=DEVICE).to(dtype)
    got = run("triton", tensors, dout, norm)
    assert [x.dtype for x in got] == [dtype, *[torch.float32] * (2 + norm), *[dtype] * N]
    assert_close(got, run("reference", wide(tensors), dout.double(), norm))


@pytest.mark.skipif(not INTERPRETED, reason="a GPU takes all dtypes above")
def test_bfloat16_interpreted() -> None:
    """Within twice the last place, for the interpreter cuts off."""
    tensors, dout = inputs(3, 4, 48, torch.bfloat16), torch.randn(4, 48).bfloat16()
    exact = run("reference", wide(tensors), dout.double(), norm=True)
    for x, y in zip(run("triton", tensors, dout, norm=True), exact):
        assert (x.double() - y).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * y.abs().max()


@needs_kernels
@pytest.mark.parametrize("N", [1, 2, 9])
@pytest.mark.parametrize("D", [48, 1000, 7168] if GPU else [48])
@pytest.mark.parametrize("norm", [False, True])
def test_a_result_and_its_gradient_of_another_dtype(norm: bool, D: int, N: int) -> None:
    """What autocast asks of a stream in float32; and the other way round."""
    for dtype, other in ((torch.float32, torch.float16), (torch.float16, torch.float32)):
        if INTERPRETED and dtype == torch.float16:
            continue  # cuts off
        tensors = inputs(N, 7, D, dtype)
        dout = torch.randn(7, D, device=DEVICE).to(other)
        got = run("triton", tensors, dout, norm, other)
        assert [x.dtype for x in got] == [other, *[torch.float32] * (2 + norm), *[dtype] * N]
        exact = run("reference", wide(tensors), dout.double(), norm)
        slack = 4.0 * (64 if INTERPRETED else 1)  # of float16, which the interpreter cuts off
        assert_close(got, exact, slack)


@needs_kernels
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_source_teaches_the_query_nothing(dtype: torch.dtype, norm: bool) -> None:
    tensors = inputs(1, 6, 48, dtype)
    dout = torch.randn(6, 48, device=DEVICE).to(dtype)
    out, dquery, dkey_weight, *rest = run("triton", tensors, dout, norm)
    assert dquery.eq(0).all()
    assert dkey_weight.eq(0).all()
    if not norm:
        assert torch.equal(out, tensors[3])
        assert torch.equal(rest[0], dout)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_of_zeros_takes_the_plain_mean(dtype: torch.dtype) -> None:
    sources = [torch.full((2, 48), x, dtype=dtype, device=DEVICE) for x in (1.0, 2.0, 6.0)]
    zeros, ones = torch.zeros(48, device=DEVICE), torch.ones(48, device=DEVICE)
    assert attn_res(zeros, sources, ones, backend="triton").eq(3).all()


@needs_kernels
def test_strides_do_not_matter_and_nothing_beside_a_row_is_read() -> None:
    """Rows cut from wider ones, turned ones, one row for all; NaN and infinities lie in between."""
    tensors = inputs(4, 6, 40)
    room = torch.full((6, 3, 64), torch.nan, device=DEVICE)
    room[:, 2] = torch.inf
    views = [room[:, 0, 3:43], room[:, 1, :40], torch.empty(40, 6, device=DEVICE).T]
    for view, x in zip(views, tensors[3:]):
        view.copy_(x.detach())
    one = torch.randn(1, 40, device=DEVICE).expand(6, 40)
    loose = [*tensors[:3], *(x.detach().requires_grad_() for x in (*views, one))]
    tight = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in loose]
    for dout in (torch.randn(40, 6, device=DEVICE).T, torch.randn(40, device=DEVICE).expand(6, 40)):
        for got, expected in zip(run("triton", loose, dout), run("triton", tight, dout.contiguous())):
            assert torch.equal(got, expected)


@needs_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_broken_row_stays_alone() -> None:
    """A program goes through many rows; what it holds of one must not reach the next."""
    tensors = inputs(3, 9, 48)
    dout = torch.randn(9, 48, device=DEVICE)
    expected = run("triton", tensors, dout)
    broken = [x.detach().clone().requires_grad_() for x in tensors]
    with torch.no_grad():
        broken[4][0], broken[3][1] = torch.nan, torch.inf
    got = run("triton", broken, dout)
    for i in (0, 3, 4, 5):
        assert torch.equal(got[i][2:], expected[i][2:])
    assert got[0][0].isnan().all()


@needs_kernels
@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_huge_and_tiny_values(factor: float) -> None:
    tensors = inputs(3, 4, 48)
    tensors = [*tensors[:3], *((factor if i else 1.0) * x.detach() for i, x in enumerate(tensors[3:]))]
    tensors = [x.detach().requires_grad_() for x in tensors]
    dout = torch.randn(4, 48, device=DEVICE)
    got, exact = run("triton", tensors, dout), run("reference", wide(tensors), dout.double())
    assert_close(got, exact)


@needs_kernels
def test_scores_too_far_apart_for_exp() -> None:
    one = torch.ones(2, 16, device=DEVICE)
    sources = [x.requires_grad_() for x in (-one, 0 * one, one)]
    query = torch.full((16,), 1e4, device=DEVICE)
    tensors = [query.requires_grad_(), *(torch.ones(16, device=DEVICE).requires_grad_() for _ in range(2)), *sources]
    got = run("triton", tensors, one)
    assert all(x.isfinite().all() for x in got)
    assert_close(got[:1], run("reference", wide(tensors), one.double())[:1])


@needs_kernels
def test_one_tensor_may_be_several_sources() -> None:
    query, key_weight, _, a, b = inputs(2, 4, 48)
    dout = torch.randn(4, 48, device=DEVICE)

    def gradients(backend: str, tensors: list[Tensor], share: bool) -> list[Tensor]:
        query, key_weight, a, b = tensors
        x = share_gradient(a) if share else a
        out = attn_res(query, [x, b, x], key_weight, backend=backend)
        return list(torch.autograd.grad(out, tensors, dout.to(out.dtype)))

    tensors = [query, key_weight, a, b]
    exact = gradients("reference", wide(tensors), False)
    for share in (False, True):
        assert_close(gradients("triton", tensors, share), exact)


@needs_kernels
def test_only_what_is_asked_for_is_computed() -> None:
    tensors = inputs(3, 4, 48)
    dout = torch.randn(4, 48, device=DEVICE)
    expected = run("triton", tensors, dout)
    for i in (0, 3, 5):
        leaves = [x.detach().requires_grad_(j == i) for j, x in enumerate(tensors)]
        out = attn_res(leaves[0], leaves[3:], leaves[1], backend="triton")
        (got,) = torch.autograd.grad(out, leaves[i], dout)
        assert torch.equal(got, expected[1 if i == 0 else i])
    with torch.no_grad():
        assert torch.equal(attn_res(tensors[0], tensors[3:], tensors[1], backend="triton"), expected[0])


@needs_kernels
def test_repeats_bit_for_bit() -> None:
    R, D = (5000, 2048) if GPU else (9, 48)
    tensors, dout = inputs(5, R, D, DTYPES[0]), torch.randn(R, D, device=DEVICE).to(DTYPES[0])
    expected = run("triton", tensors, dout)
    for _ in range(3 if GPU else 1):
        assert all(torch.equal(x, y) for x, y in zip(run("triton", tensors, dout), expected))


@needs_kernels
def test_what_cannot_be_served_is_refused_by_name_and_passed_on_by_auto() -> None:
    query, key_weight, _, *sources = (x.detach() for x in inputs(2, 3, 16))
    many, broad = [sources[0]] * 17, [torch.zeros(1, 8193, device=DEVICE)]
    vector = torch.zeros(8193, device=DEVICE)
    for message, arguments in (
        ("float64", (query.double(), sources, key_weight)),
        ("up to 16 sources, and there are 17", (query, many, key_weight)),
        ("rows of 1 to 8192 elements, and these have 8193", (vector, broad, vector)),
    ):
        with pytest.raises(BackendError, match=f"cannot run on 'triton'.*{message}"):
            attn_res(*arguments, backend="triton")
        assert torch.equal(attn_res(*arguments), attn_res(*arguments, backend="chunked"))
    assert torch.equal(attn_res(query, sources, key_weight), attn_res(query, sources, key_weight, backend="triton"))


def two_phases(backend: str, tensors: list[Tensor], queries: Tensor, update: Tensor, norm: bool) -> list[Tensor]:
    """m, l, o of a bank for all queries; then the mixtures, and the sums, with the last source as the live one."""
    _, key_weight, norm_weight, *bank, live = tensors
    key_weights = key_weight * torch.linspace(0.5, 1.5, len(queries), device=DEVICE)[:, None].to(key_weight.dtype)
    gain = norm_weight if norm else None
    with torch.no_grad():
        partial = attn_res_bank(queries, bank, key_weights, backend=backend)
        pairs = [
            attn_res_advance(partial.of(i), q, live, update, k, norm_weight=gain, backend=backend)
            for i, (q, k) in enumerate(zip(queries, key_weights))
        ]
        merged = [attn_res_merge(partial.of(0), queries[0], live, key_weights[0], norm_weight=gain, backend=backend)]
    return [*partial, *(x for pair in pairs for x in pair), *merged]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "Q", "R", "D"), [(1, 1, 1, 16), (8, 24, 5, 48), (3, 5, 70, 40), (2, 3, 0, 16)] + GPU * [
    (8, 24, 700, 7168), (9, 17, 33, 1000), (16, 64, 3, 2048)
])  # fmt: skip
@pytest.mark.parametrize("norm", [False, True])
def test_two_phases(norm: bool, N: int, Q: int, R: int, D: int, dtype: torch.dtype) -> None:
    tensors = inputs(N + 1, R, D, dtype)
    queries = D**-0.5 * torch.randn(Q, D, device=DEVICE)
    queries[0] = 0
    update = torch.randn(R, D, device=DEVICE).to(dtype)
    exact_update = (tensors[-1] + update).detach().double() - tensors[-1].detach().double()  # of the rounded sum
    got = two_phases("triton", tensors, queries, update, norm)
    exact = two_phases("reference", wide(tensors), queries.double(), exact_update, norm)
    assert [x.dtype for x in got[:4]] == [torch.float32] * 3 + [dtype]
    assert_close(got, exact)
    learning = (tensors[0].detach().expand(1, D), tensors[3:4], tensors[1].detach().expand(1, D))
    with pytest.raises(BackendError, match="no derivative"):
        attn_res_bank(*learning, backend="triton")


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run here")
def test_a_cpu_is_refused() -> None:
    query, key_weight, _, *sources = inputs(2, 3, 16)
    with pytest.raises(BackendError, match="cannot run on 'triton': its kernels run on a GPU, and the tensors"):
        attn_res(query, sources, key_weight, backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernels_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

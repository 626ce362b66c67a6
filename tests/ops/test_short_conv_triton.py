"""The kernels of the short convolution against the reference in float64.

What needs them runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU: there mostly on
float32, for the interpreter cuts bfloat16 off where a GPU rounds.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from conv_cases import CASES, inputs
from torch import Tensor

from perilune.core.errors import BackendError
from perilune.ops import short_conv
from perilune.ops.short_conv import fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]
pytestmark = [  # the interpreter is numpy
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def made(case: tuple, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x and state in this dtype, the filter in float32, as a model has them."""
    B, T, D, W, cu = case
    N = B if cu is None else len(cu) - 1
    x, weight, state = (t.detach().to(DEVICE) for t in inputs(B, T, D, W, N, torch.float32))
    return [t.requires_grad_() for t in (x.to(dtype), weight, state.to(dtype))]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def all_of(
    backend: str, tensors: list[Tensor], cu: list[int] | None = None, with_state: bool = True, **options: object
) -> dict[str, Tensor]:
    """y, the final state, and what gradients of either, the same in every call, give each input.

    Those are taken one by one: autograd would round their sum once more.
    """
    x, weight, state = tensors
    y, final = short_conv(
        x, weight, initial_state=state if with_state else None, output_final_state=True, cu_seqlens=cu,
        backend=backend, **options,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    dy, dfinal = (torch.randn(t.shape, generator=generator).mul(32).round().div(32).to(t) for t in (y, final))  # exact
    wanted = {"x": x, "weight": weight, "state": state} if with_state else {"x": x, "weight": weight}
    results = {"y": y.detach(), "final": final.detach()}
    for name, of, gradient in (("y", y, dy), ("final", final, dfinal)):
        if of.requires_grad:
            leaves = list(wanted.values())
            grads = torch.autograd.grad(of, leaves, gradient, allow_unused=True, materialize_grads=True)
            results |= {f"d{name}/d{leaf}": grad for leaf, grad in zip(wanted, grads)}
    return results


def assert_close(got: dict[str, Tensor], exact: dict[str, Tensor], places: float = 0.5) -> None:
    """Rounded once (within so many last places), from float32 as good as its sums are long."""
    assert got.keys() == exact.keys()
    for name, x in got.items():
        y = exact[name]
        assert x.shape == y.shape, name
        size = y.abs().max() if y.numel() else 0.0
        bound = places * torch.finfo(x.dtype).eps * y.abs() + 64 * torch.finfo(torch.float32).eps * size
        assert ((x.double() - y).abs() <= bound).all(), (name, float((x.double() - y).abs().max()), float(size))


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert not [name for name in got if not torch.equal(got[name], expected[name])]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


# Numbers


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_equal_the_reference(case: str, activation: str, with_state: bool, dtype: torch.dtype) -> None:
    paired = with_state == (activation is not None) or "short" in case
    if INTERPRETED and (not paired or (case == "long" and with_state)):
        pytest.skip("slow to interpret")
    tensors = made(CASES[case], dtype)
    options = {"cu": CASES[case][4], "with_state": with_state, "activation": activation}
    got = all_of("triton", tensors, **options)
    assert all(t.dtype == (torch.float32 if name.endswith("weight") else dtype) for name, t in got.items())
    assert_close(got, all_of("reference", wide(tensors), **options))


LARGER = {
    "several tiles": (2, 11, 300, 4, None),
    "tiles, packed": (1, 20, 257, 4, [0, 1, 9, 9, 12, 20]),
}
IN_FULL = {  # of a GPU
    "long": (3, 5000, 1024, 4, None),
    "wide": (1, 700, 7168, 4, [0, 699, 700]),
    "long, packed": (1, 20_000, 1000, 4, [0, 1, 3, 500, 500, 4096, 4099, 19_998, 20_000]),
    "many short": (1, 3000, 136, 3, [*range(0, 3000, 5), 3000]),
    "eight taps": (2, 1000, 520, 8, None),
}
LARGER |= IN_FULL if GPU else {}


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGER)
def test_larger(case: str, dtype: torch.dtype) -> None:
    tensors = made(LARGER[case], dtype)
    assert_close(all_of("triton", tensors, LARGER[case][4]), all_of("reference", wide(tensors), LARGER[case][4]))


@needs_kernels
@pytest.mark.parametrize(
    "case", [(2, 23, 3, 4, None), (1, 31, 3, 4, [0, 1, 2, 2, 5, 24, 31]), (1, 19, 2, 7, [0, 3, 19])]
)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_how_rows_are_divided_does_not_matter(monkeypatch: pytest.MonkeyPatch, rows: int, case: tuple) -> None:
    """So that programs, and what is under way in one, begin and end in every place of a document."""
    from perilune.ops.short_conv.kernels import launch

    tensors, cu = made(case), case[4]
    expected = all_of("triton", tensors, cu)
    monkeypatch.setattr(launch, "ROWS", rows)
    monkeypatch.setattr(launch, "LEAST", 1)
    launch.plan.cache_clear()
    try:
        got = all_of("triton", tensors, cu)
    finally:
        launch.plan.cache_clear()
    assert_close(got, all_of("reference", wide(tensors), cu))
    assert_same(*({x: y for x, y in results.items() if x != "dy/dweight"} for results in (got, expected)))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_equals_separate(dtype: torch.dtype) -> None:
    cu = [0, 5, 5, 6, 23, 25]
    tensors = made((1, 25, 7, 4, cu), dtype)
    x, weight, state = tensors
    y, final = short_conv(*tensors[:2], initial_state=state, output_final_state=True, cu_seqlens=cu, backend="triton")
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    dx, dweight, dstate = torch.autograd.grad([y, final], tensors, [dy, dfinal])
    sums = torch.zeros_like(dweight)
    for n, (a, b) in enumerate(pairwise(cu)):
        leaves = [t.detach().requires_grad_() for t in (x[:, a:b], weight, state[n : n + 1])]
        yn, fn = short_conv(*leaves[:2], initial_state=leaves[2], output_final_state=True, backend="triton")
        grads = torch.autograd.grad([yn, fn], leaves, [dy[:, a:b], dfinal[n : n + 1]])
        assert same_bits([yn, fn, grads[0], grads[2]], [y[:, a:b], final[n : n + 1], dx[:, a:b], dstate[n : n + 1]])
        sums += grads[1]
    torch.testing.assert_close(dweight, sums, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("T", [2, 20])
def test_filters_and_states_of_other_dtypes(T: int) -> None:
    """Each gradient in the dtype of what it is of; the final state in that of x."""
    dtypes = {"x": torch.float32, "weight": torch.bfloat16, "state": torch.float16}
    tensors = [t.detach().to(dtype).requires_grad_() for t, dtype in zip(made((2, T, 5, 4, None)), dtypes.values())]
    got = all_of("triton", tensors)
    assert [got["y"].dtype, got["final"].dtype] == [torch.float32] * 2
    assert all(got[f"dy/d{name}"].dtype == dtype for name, dtype in dtypes.items())
    assert_close(got, all_of("reference", wide(tensors)), 2.0 if INTERPRETED else 0.5)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU takes all dtypes above")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_interpreted(dtype: torch.dtype) -> None:
    """Within twice the last place, for the interpreter cuts off."""
    tensors, cu = made((1, 30, 5, 4, [0, 2, 2, 21, 30]), dtype), [0, 2, 2, 21, 30]
    assert_close(all_of("triton", tensors, cu), all_of("reference", wide(tensors), cu), 2.0)


@needs_kernels
def test_where_silu_is_steep_flat_and_at_its_ends() -> None:
    x = torch.tensor([-3e38, -1e4, -90.0, -88, -20, -1e-30, 0, 1e-30, 20, 90, 1e4, 3e38], device=DEVICE).view(1, -1, 1)
    weight = torch.ones(1, 1, device=DEVICE)
    tensors = [x.requires_grad_(), weight, torch.zeros(1, 0, 1, device=DEVICE)]
    y, _ = short_conv(*tensors[:2], backend="triton")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    exact = x.detach().double().requires_grad_()
    silu = torch.nn.functional.silu(exact)
    (dexact,) = torch.autograd.grad(silu, exact, torch.ones_like(exact))
    torch.testing.assert_close(y.double(), silu.detach(), rtol=1e-5, atol=1e-34)
    torch.testing.assert_close(dx.double(), dexact, rtol=1e-5, atol=1e-34)


# What surrounds a document


@needs_kernels
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_nothing_leaks_from_one_document_into_another(odd: float, activation: str | None) -> None:
    cu, middle = [0, 5, 16, 18, 25], slice(5, 16)
    results = []
    for spoilt in (False, True):
        torch.manual_seed(0)
        tensors = made((1, 25, 4, 4, cu))
        dy = torch.randn(1, 25, 4, device=DEVICE)
        with torch.no_grad():
            for t in (tensors[0], dy):
                t[:, :5] = t[:, 16:] = odd if spoilt else 1.0
            tensors[2][[0, 2, 3]] = odd if spoilt else 1.0
        x, weight, state = tensors
        y, final = short_conv(
            x, weight, initial_state=state, output_final_state=True, cu_seqlens=cu, activation=activation,
            backend="triton",
        )  # fmt: skip
        dx, dstate = torch.autograd.grad(y, [x, state], dy)
        results.append([y[:, middle], final[1], dx[:, middle], dstate[1]])
    assert all(t.isfinite().all() for t in results[1])
    assert same_bits(*results)


@needs_kernels
def test_nothing_leaks_from_one_sequence_of_a_batch_into_another() -> None:
    weight = torch.randn(4, 4, device=DEVICE)
    results = []
    for odd in (1.0, torch.nan):
        torch.manual_seed(0)
        x = torch.randn(3, 21, 4, device=DEVICE)
        x[0] = x[2] = odd
        y, final = short_conv(x.requires_grad_(), weight, output_final_state=True, backend="triton")
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        results.append([y[1], final[1], dx[1]])
    assert same_bits(*results)


@needs_kernels
@pytest.mark.parametrize("cu", [None, [0, 4, 5, 17]])
def test_strides_do_not_matter_and_nothing_beside_a_row_is_read(cu: list[int] | None) -> None:
    """Rows cut from wider ones and from longer sequences, turned ones; NaN lies in between."""
    B = 2 if cu is None else 1
    base = torch.randn(B, 17, 5, device=DEVICE)
    room = torch.full((B, 23, 40), torch.nan, device=DEVICE)
    views = [room[:, 3:20, 8:13], room[:, :17, 1:11:2], torch.empty(5, 17, B, device=DEVICE).permute(2, 1, 0)]
    weight = torch.randn(4, 5, device=DEVICE).T
    state = torch.randn(5, 3, B if cu is None else 3, device=DEVICE).permute(2, 1, 0)
    dys = [torch.randn(B, 5, 17, device=DEVICE).transpose(1, 2), torch.ones((), device=DEVICE).expand(B, 17, 5)]
    dys.append(torch.randn(5, device=DEVICE).expand(B, 17, 5))
    for view, dy in zip(views, dys):
        room.fill_(torch.nan)
        view.copy_(base)
        results = []
        for layout in (Tensor.detach, Tensor.contiguous):
            leaves = [layout(t).detach().requires_grad_() for t in (view, weight, state)]
            y, final = short_conv(
                leaves[0], leaves[1], initial_state=leaves[2], output_final_state=True, cu_seqlens=cu,
                backend="triton",
            )  # fmt: skip
            results.append([y, final, *torch.autograd.grad(y, leaves, layout(dy))])
        assert same_bits(*results)


@needs_kernels
def test_the_released_shape_of_the_weight() -> None:
    x, weight, state = made((2, 9, 5, 4, None))
    released = weight.detach().unsqueeze(1).requires_grad_()
    plain, other = (all_of("triton", [x, w, state]) for w in (weight, released))
    assert other["dy/dweight"].shape == (5, 1, 4)
    for name in ("dy/dweight", "dfinal/dweight"):
        other[name] = other[name].squeeze(1)
    assert_same(other, plain)


# What is asked for


@needs_kernels
def test_only_what_is_asked_for_is_computed() -> None:
    cu = [0, 2, 2, 20]
    tensors = made((1, 20, 5, 4, cu))
    dy = torch.randn(1, 20, 5, device=DEVICE)

    def gradients(*wanted: bool) -> list[Tensor]:
        leaves = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted)]
        y, _ = short_conv(*leaves[:2], initial_state=leaves[2], cu_seqlens=cu, backend="triton")
        return list(torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy))

    every = gradients(True, True, True)
    for i in range(3):
        assert same_bits(gradients(*(j == i for j in range(3))), [every[i]])
        assert same_bits(gradients(*(j != i for j in range(3))), [g for j, g in enumerate(every) if j != i])
    with torch.no_grad():
        y, _ = short_conv(*tensors[:2], initial_state=tensors[2], cu_seqlens=cu, backend="triton")
    assert not y.requires_grad
    assert torch.equal(y, all_of("triton", tensors, cu)["y"])


@needs_kernels
def test_a_loss_on_the_final_state_alone_reaches_the_rows_it_holds() -> None:
    x, weight, state = made((2, 6, 3, 4, None))
    _, final = short_conv(x, weight, initial_state=state, output_final_state=True, backend="triton")
    dx, dweight, dstate = torch.autograd.grad(final.sum(), [x, weight, state], allow_unused=True)
    assert dweight is None
    assert dx[:, :3].eq(0).all()
    assert dx[:, 3:].eq(1).all()
    assert dstate.eq(0).all()


@needs_kernels
def test_the_graph_keeps_the_inputs_and_nothing_else() -> None:
    x, weight, state = made((1, 64, 16, 4, [0, 64]))
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, _ = short_conv(x, weight, initial_state=state, cu_seqlens=[0, 64], output_final_state=True, backend="triton")
    assert kept == {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (x, weight, state)}
    y.sum().backward()


@needs_kernels
def test_inference_first_and_training_afterwards() -> None:
    """What is kept of a batch's documents serves both."""
    cu = [0, 3, 19]
    tensors = made((1, 19, 5, 4, cu))
    with torch.inference_mode():
        y, _ = short_conv(*tensors[:2], initial_state=tensors[2], cu_seqlens=cu, backend="triton")
    assert torch.equal(y, all_of("triton", tensors, cu)["y"])


@needs_kernels
def test_autocast_changes_nothing() -> None:
    tensors = made((1, 19, 5, 4, None))
    expected = all_of("triton", tensors)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert_same(all_of("triton", tensors), expected)


@needs_kernels
def test_repeats_bit_for_bit() -> None:
    case = (1, 30_000, 2048, 4, [0, 7, 12_345, 30_000]) if GPU else (1, 70, 9, 4, [0, 7, 70])
    tensors = made(case, DTYPES[0])
    expected = all_of("triton", tensors, case[4])
    for _ in range(3 if GPU else 1):
        assert_same(all_of("triton", tensors, case[4]), expected)


@needs_kernels
def test_a_second_derivative_is_refused() -> None:
    x, weight, _ = made((1, 6, 3, 4, None))
    y, _ = short_conv(x, weight, backend="triton")
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@needs_kernels
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at tensors between its graphs
def test_a_compiler_leaves_the_kernels_alone() -> None:
    """Lengths and documents change nothing in the graphs around them."""
    graphs: list[str] = []

    def looking(module: torch.fx.GraphModule, _: object) -> Callable:
        graphs.append(module.code)
        return module

    def layer(x: Tensor, weight: Tensor, cu: list[int]) -> Tensor:
        return short_conv(2 * x, weight, cu_seqlens=cu, backend="triton")[0].tanh()

    torch.compiler.reset()
    compiled = torch.compile(layer, backend=looking, dynamic=True)
    for T in (12, 31, 32):
        cu = [0, 5, T]
        tensors = made((1, T, 5, 4, cu))[:2]
        for call in (layer, compiled):
            y = call(*tensors, cu)
            results = [y, *torch.autograd.grad(y.sum(), tensors)]
            if call is layer:
                expected = results
        assert same_bits(results, expected)
    assert any("tanh" in code for code in graphs)
    torch.compiler.reset()


@needs_kernels
def test_what_cannot_be_served_is_refused_by_name_and_passed_on_by_auto() -> None:
    x, weight = torch.randn(1, 9, 5, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    for message, arguments in (
        ("float64", (x.double(), weight.double())),
        ("float64", (x, weight.double())),
        ("filters of 1 to 8 taps, and these have 9", (x, torch.randn(5, 9, device=DEVICE))),
    ):
        with pytest.raises(BackendError, match=f"cannot run on 'triton'.*{message}"):
            short_conv(*arguments, backend="triton")
        assert torch.equal(short_conv(*arguments)[0], short_conv(*arguments, backend="chunked")[0])
    assert torch.equal(short_conv(x, weight)[0], short_conv(x, weight, backend="triton")[0])


@needs_kernels
def test_more_rows_than_32_bits_count_are_refused() -> None:
    x, weight = torch.zeros(1, 1, 1, device=DEVICE), torch.zeros(1, 4, device=DEVICE)
    arguments = weight, None, None, "silu", False
    assert fused.refuses(x.expand(2**15, 2**15, 1), *arguments) is None
    assert "too many rows" in fused.refuses(x.expand(2**16, 2**15, 1), *arguments)
    assert fused.refuses(x.expand(1, 2**20, 2**14), weight.expand(2**14, 4), *arguments[1:]) is None
    assert "too many rows" in fused.refuses(x.expand(2**10, 2**15, 2**14), weight.expand(2**14, 4), *arguments[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_nothing_waits_for_the_device() -> None:
    tensors = made((1, 3000, 256, 4, [0, 7, 3000]), torch.bfloat16)
    all_of("triton", tensors, [0, 7, 3000])
    dy, dfinal = torch.randn(1, 3000, 256, device=DEVICE).bfloat16(), torch.randn(3, 3, 256, device=DEVICE).bfloat16()
    tensors = made((1, 3000, 256, 4, [0, 9, 100, 3000]), torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made_ = short_conv(
            *tensors[:2], initial_state=tensors[2], output_final_state=True, cu_seqlens=[0, 9, 100, 3000],
            backend="triton",
        )  # fmt: skip
        torch.autograd.grad(made_, tensors, [dy, dfinal])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
def test_more_elements_than_32_bits_count() -> None:
    """The last rows of a long tensor, and the first of the last program, as if they stood alone."""
    T, D = 2**20 + 100, 2048
    torch.utils.deterministic.fill_uninitialized_memory = False
    x = torch.empty(1, T, D, device=DEVICE, dtype=torch.bfloat16).normal_().requires_grad_()
    weight = torch.randn(D, 4, device=DEVICE)
    y, _ = short_conv(x, weight, backend="triton")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    end = x.detach()[:, -300:].clone().requires_grad_()
    tail, _ = short_conv(end, weight, backend="triton")
    (dtail,) = torch.autograd.grad(tail, end, tail.detach())
    assert torch.equal(y[:, -200:], tail[:, -200:])
    assert torch.equal(dx[:, -200:], dtail[:, -200:])


# Tables and shares, which any machine can look at


def test_tables_of_documents() -> None:
    pytest.importorskip("triton")
    from perilune.ops.short_conv.kernels.launch import documents_of

    for cu in ([0], [0, 0], [0, 0, 4, 4, 5, 9, 9], [0, 1, 2, 3], [0, 70]):
        bounds, number, before = documents_of(cu, torch.device("cpu"))
        rows = [(n, i) for n, (a, b) in enumerate(pairwise(cu)) for i in range(b - a)]
        assert bounds.tolist() == cu
        assert list(zip(number.tolist(), before.tolist())) == rows
        assert {t.dtype for t in (bounds, number, before)} == {torch.int32}
    assert documents_of(None, torch.device("cpu")) is None


@pytest.mark.parametrize("programs", [2, 48, 1320, 3168])
def test_shares_cover_every_row_once(programs: int) -> None:
    pytest.importorskip("triton")
    from perilune.ops.short_conv.kernels.launch import LEAST, ROWS, plan, tiles

    for B in (1, 3, 5000):
        for T in (0, 1, 7, 8, 9, 100, 4097, 65_536):
            for D in (1, 128, 129, 2048):
                length, chunks, groups, number = plan(torch.Size((B, T, D)), programs)
                assert length % ROWS == 0
                assert length * (chunks - 1) < max(T, 1) <= max(length * chunks, 1)
                assert (groups, number) == (B * chunks, B * chunks * tiles(D))
                assert number <= max(programs, B * tiles(D))
                assert chunks == 1 or length >= min(LEAST, T)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="interpreted, there is nothing to compile")
@pytest.mark.parametrize("W", [1, 4])
def test_the_kernels_compile_for_hopper(W: int) -> None:
    """The interpreter takes more than a compiler does; and 16-bit rows are written four elements at a time."""
    pytest.importorskip("triton")
    from sm_90 import BF16, F32, I32, assembly

    from perilune.ops.short_conv.kernels.backward import conv_grads_kernel
    from perilune.ops.short_conv.kernels.forward import conv_kernel
    from perilune.ops.short_conv.kernels.launch import ROWS, WIDTH

    sizes = dict.fromkeys(("T", "length", "chunks", "x_batch", "x_row", "dy_batch", "dy_row"), "i32")
    types = {"x": BF16, "weight": F32, "state": BF16, "number": I32, "before": I32, "y": BF16, "dy": BF16, "dx": BF16}
    types |= {"dtaps": F32, **sizes}
    constants = {"D": 1024, "W": W, "ACTIVATE": True, "ROWS": ROWS, "WIDTH": WIDTH, "state": None}
    for kernel in (conv_kernel.kernel, conv_grads_kernel.kernel):
        names = kernel.arg_names
        own = {name: x for name, x in types.items() if name in names and (name != "state" or W > 1)}
        given = {name: x for name, x in constants.items() if name in names and name not in own}
        ptx = assembly(kernel, own, given, num_warps=1)
        assert "st.global.v2.b32" in ptx


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="interpreted, there is nothing to compile")
def test_no_sum_of_products_is_left_for_a_compiler_to_fuse() -> None:
    """It would take either product of a b + c d, and in another form of the kernel the other one."""
    pytest.importorskip("triton")
    from sm_90 import F32, I32, stages

    from perilune.ops.short_conv.kernels import backward, forward, states

    pointers = dict.fromkeys(("x", "weight", "state", "y", "dy", "dx", "dtaps", "dstate"), F32)
    pointers |= dict.fromkeys(("number", "before", "bounds"), I32)
    sizes = dict.fromkeys(("T", "length", "chunks", "x_batch", "x_row", "dy_batch", "dy_row"), "i32")
    constants = {"D": 256, "W": 4, "ACTIVATE": True, "ROWS": 1, "WIDTH": 128}
    for kernel in (forward.conv_kernel, backward.conv_grads_kernel, states.state_grads_kernel):
        names = kernel.kernel.arg_names
        types = {name: x for name, x in (pointers | sizes).items() if name in names}
        given = {name: x for name, x in constants.items() if name in names}
        ttir = stages(kernel.kernel, types, given, num_warps=1)["ttir"]
        assert "math.fma" in ttir
        products = set(re.findall(r"(%\w+) = arith\.mulf", ttir))
        sums = re.findall(r"arith\.(?:addf|subf) (%\w+), (%\w+)", ttir)
        assert products
        assert sums  # of a sigmoid's denominator, for one
        assert not [pair for pair in sums if products.intersection(pair)]


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run here")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(BackendError, match="'triton': its kernels run on a GPU, and the tensors are on cpu"):
        short_conv(torch.zeros(1, 5, 3), torch.zeros(3, 4), backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernels_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

"""The experts' kernels: their products in threads, the rest in a process whose Triton interprets, all on a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gluon_threads import Descriptor, kernels
from torch import Tensor
from torch.nn.functional import pad

import perilune
from perilune.core.errors import BackendError
from perilune.ops import grouped_experts
from perilune.ops.grouped_experts import fused
from perilune.ops.grouped_experts.activation import GatedActivation
from perilune.ops.grouped_experts.products import grouped_outer, grouped_product

# The interpreter is numpy: run-time loop bounds are arrays, and exponentials overflow where sigmoids end.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
PRODUCTS = Path(perilune.__file__).parent / "ops/grouped_experts/kernels/products.py"
HEIGHT = 192
CASES = ("random", "uneven", "empty slots", "top-1", "one expert")


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="needs a GPU")(test))


def interpreted(test):
    skip = pytest.mark.skipif(not INTERPRETED, reason="runs in test_the_other_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def route(case: str, M: int, E: int, top_k: int) -> Tensor:
    """[M, top_k]; of `empty slots`, token 3 has no other."""
    ids = torch.rand(M, E).topk(top_k).indices
    if case == "uneven":
        ids = torch.where(torch.rand(M, top_k) < 0.6, E // 2, ids % (E - 1))
    if case == "empty slots":
        ids = torch.where(torch.rand(M, top_k) < 0.4, -1, ids)
        ids[3] = -1
    return torch.full_like(ids, E - 2) if case == "one expert" else ids


def make(case: str, M: int, E: int, top_k: int, D: int, F: int, dtype: torch.dtype) -> list[Tensor]:
    """x, w_gate, w_up, w_down, ids, weights."""
    ids = route(case, M, E, 1 if case == "top-1" else top_k)
    x, weights = torch.randn(M, D), torch.rand(ids.shape).masked_fill(ids < 0, 0)
    matrices = [torch.randn(E, *sides) / sides[1] ** 0.5 for sides in ((F, D), (F, D), (D, F))]
    x[3] = torch.nan if case == "empty slots" else x[3]
    return [*(t.to(dtype) for t in (x, *matrices)), ids, weights]


def run(tensors: list[Tensor], backend: str = "gluon", **options) -> tuple[Tensor, ...]:
    """The output and all gradients for a fixed direction, on the CPU."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = grouped_experts(*leaves, backend=backend, **options)
    direction = torch.linspace(-1, 1, out.numel()).mul(99).sin().view(out.shape).to(out)
    return tuple(t.detach().cpu() for t in (out, *torch.autograd.grad(out, leaves[:4] + leaves[5:], direction)))


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-9))


def tiles(counts: Tensor) -> list[Tensor]:
    """Expert, first row and end of the rows of its expert for every tile; how many there are."""
    ends = counts.cumsum(0).tolist()
    found = [
        (e, first, end)
        for e, (end, count) in enumerate(zip(ends, counts.tolist()))
        for first in range(end - count, end, HEIGHT)
    ]
    return [torch.tensor(column) for column in (*zip(*found), [len(found)])]


# Products, in threads


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def blocks(x: Tensor, *sides: int) -> Descriptor:
    return Descriptor.from_tensor(x if x.dtype == torch.bfloat16 else x.bfloat16(), list(sides))


@pytest.mark.parametrize(
    ("counts", "D", "F"), [([50, 0, 200, 64, 1], 256, 128), ([193, 450], 128, 384), ([0, 128, 192, 0], 384, 256)]
)
def test_products_in_threads(counts, D, F):
    """They err by the rounding of what they write, read no row beyond their expert's and write none."""
    module = kernels(PRODUCTS)
    counts = torch.tensor(counts)
    E, n = len(counts), int(counts.sum())
    P, places = n + 70, tiles(counts)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    w_gate, w_up, w_down = (rounded(torch.randn(E, *sides) / sides[1] ** 0.5) for sides in ((F, D), (F, D), (D, F)))
    x, a, dinner = (rounded(torch.randn(P, width)) for width in (D, F, 2 * F))
    for t in (x, a, dinner):
        t[n:] = torch.nan  # rows of empty slots

    def multiply(rows, first, second, width, K, kept=(None, None), **form):
        form = {"GATED": False, "TURNED": False, "DOUBLE": False, "SITU": False, "KEEP": False} | form
        out = torch.full((P, width), torch.nan)
        matrices = [
            m if m is None else blocks(m, *((64, 128) if form["TURNED"] else (128, 64))) for m in (first, second)
        ]
        kernel = module["row_product_kernel"]
        kernel[2,](
            blocks(rows, 64, 64), *matrices, out, *kept, *places, width, K, 4.0, 25.0,
            STAGES=3, **form,
        )  # fmt: skip
        assert out[n:].isnan().all()
        return out[:n]

    gate, up = (grouped_product(x[:n], w.mT, counts) for w in (w_gate, w_up))
    kept = torch.empty(P, F), torch.empty(P, F)
    for situ in (True, False):
        f = GatedActivation("situ" if situ else "swiglu", 4.0, 25.0)
        got = multiply(x, w_gate, w_up, F, D, kept, GATED=True, SITU=situ, KEEP=True)
        assert error(got, f(gate, f.raised(up))) < 2e-3
        assert max(error(kept[0][:n], gate), error(kept[1][:n], up)) < 2e-3
    assert error(multiply(a, w_down, None, D, F), grouped_product(a[:n], w_down.mT, counts)) < 2e-3
    assert error(multiply(x, w_down, None, F, D, TURNED=True), grouped_product(x[:n], w_down, counts)) < 2e-3
    both = grouped_product(dinner[:n], torch.cat([w_gate, w_up], 1), counts)
    assert error(multiply(dinner, w_gate, w_up, D, 2 * F, TURNED=True, DOUBLE=True), both) < 2e-3

    x[n:] = a[n:] = dinner[n:] = 0
    for length in (1, 2, 5):
        for left, right, double in ((x, a, False), (dinner, x, True)):
            M, N = left.shape[1], right.shape[1]
            out = [torch.full((E, M // (1 + double), N), torch.nan).bfloat16() for _ in range(1 + double)]
            module["outer_product_kernel"][2,](
                blocks(left, 64, 64), blocks(right, 64, 256), *([blocks(t, 64, 256) for t in out] + [None])[:2],
                starts, E, M, N, length, STAGES=4, PANEL=3, DOUBLE=double,
            )  # fmt: skip
            got = torch.cat(out, 1)
            assert error(got, grouped_outer(left[:n], right[:n], counts)) < 2e-3
            assert (got[counts == 0] == 0).all()


# The rest, interpreted


@pytest.fixture
def _products_of_torch(monkeypatch):
    """The four products of the kernels, composed of torch's: rows of empty slots are left unwritten."""
    launched = pytest.importorskip("perilune.ops.grouped_experts.kernels.launch")

    def product(rows, matrices, layout):
        out = torch.full((len(rows), matrices.shape[-1]), torch.nan)
        n = int(layout.occupied)
        out[:n] = grouped_product(rows[:n], matrices, layout.starts.diff().long())
        return out

    def activated(rows, w_gate, w_up, f, layout, *, keep):
        gate, up = (product(rows, w.mT, layout) for w in (w_gate, w_up))
        return f(gate, f.raised(up)), gate, up

    def outer(left, right, layout, *, halves=False):
        out = grouped_outer(left, right, torch.cat([layout.starts.diff(), len(left) - layout.occupied]).long())[:-1]
        return tuple(out.chunk(2, 1)) if halves else (out,)

    monkeypatch.setattr(launched, "activated_product", activated)
    monkeypatch.setattr(launched, "product", lambda rows, matrices, layout: product(rows, matrices.mT, layout))
    monkeypatch.setattr(
        launched, "turned_product",
        lambda rows, w, layout, second=None: product(rows, w if second is None else torch.cat([w, second], 1), layout),
    )  # fmt: skip
    monkeypatch.setattr(launched, "outer_product", outer)


@interpreted
@pytest.mark.usefixtures("_products_of_torch")
@pytest.mark.parametrize("activation", ["situ", "swiglu"])
@pytest.mark.parametrize("case", CASES)
def test_all_but_the_products(case, activation, monkeypatch):
    monkeypatch.setattr(fused, "refuses", lambda *arguments, **options: None)
    tensors = make(case, 60, 7, 3, 24, 16, torch.float32)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = fused.grouped_experts_fused(*leaves, activation=activation)
    direction = torch.linspace(-1, 1, out.numel()).mul(99).sin().view(out.shape)
    got = out, *torch.autograd.grad(out, leaves[:4] + leaves[5:], direction)
    for x, exact in zip(got, run(tensors, "chunked", activation=activation)):
        torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("M", "top_k", "E"), [(700, 3, 37), (900, 1, 2), (1, 1, 1), (40, 4, 300)])
def test_the_layout_is_a_stable_sort(M, top_k, E):
    from perilune.ops.grouped_experts.kernels.layout import sort_by_expert

    ids = torch.randint(-2, E + 2, (M, top_k))  # -2 and E are nobody's either
    ids = torch.where(ids == E + 1, 1 << 32, ids)  # nor is what would be 0 in 32 bits
    expert = torch.where((ids < 0) | (ids >= E), E, ids).flatten()
    layout = sort_by_expert(ids, E, HEIGHT)
    counts = expert.bincount(minlength=E + 1)[:E]
    assert torch.equal(layout.slot.long(), expert.argsort(stable=True))
    assert torch.equal(layout.row.flatten()[layout.slot.long()], torch.arange(M * top_k, dtype=torch.int32))
    assert torch.equal(layout.starts.diff().long(), counts)
    number = int(layout.number)
    assert number <= len(layout.expert)
    for got, column in zip(layout[3:6], tiles(counts) if number else ()):
        assert torch.equal(got[:number].long(), column)


@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="needs Triton, once")
def test_the_other_kernels_interpreted():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    chosen = "all_but_the_products or stable_sort"
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", chosen, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# All together


@on_gpu
@pytest.mark.parametrize("activation", ["situ", "swiglu"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("M", "E", "top_k", "D", "F"), [(900, 7, 2, 256, 256), (300, 40, 3, 128, 384), (500, 9, 3, 320, 320)]
)
def test_the_kernels_are_the_reference(M, E, top_k, D, F, case, activation):
    tensors = make(case, M, E, top_k, D, F, torch.bfloat16)
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    exact = run(wide, "reference", activation=activation)
    on_device = [t.cuda() for t in tensors]
    got, again = (run(on_device, activation=activation) for _ in range(2))
    for name, x, y, other in zip(("out", "dx", "dw_gate", "dw_up", "dw_down", "dweights"), got, exact, again):
        assert error(x, y) < 5e-3, name
        assert torch.equal(x, other), name
    idle = torch.where(tensors[4] < 0, E, tensors[4]).flatten().bincount(minlength=E + 1)[:E] == 0
    assert all((gradient[idle] == 0).all() for gradient in got[2:5])
    assert (got[5][tensors[4] < 0] == 0).all()


@on_gpu
def test_inference_is_what_training_returns_and_a_graph_replays_it():
    tensors = [t.cuda() for t in make("empty slots", 900, 7, 2, 256, 256, torch.bfloat16)]
    expected = run(tensors)[0]
    with torch.no_grad():
        assert torch.equal(grouped_experts(*tensors, backend="gluon").cpu(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped_experts(*tensors, backend="gluon")
        tensors[0].copy_(torch.randn_like(tensors[0]))
        tensors[4].copy_(tensors[4].flip(0))
        graph.replay()
        assert torch.equal(out, grouped_experts(*tensors, backend="gluon"))


@on_gpu
def test_an_id_that_is_no_experts_makes_an_empty_slot():
    x, *matrices, ids, weights = (t.cuda() for t in make("empty slots", 900, 7, 2, 256, 256, torch.bfloat16))
    expected = grouped_experts(x, *matrices, ids, weights, backend="gluon")
    wrong = torch.where(ids < 0, 1000, ids)
    assert torch.equal(grouped_experts(x, *matrices, wrong, weights, backend="gluon"), expected)


@pytest.mark.parametrize(("D", "F"), [(320, 320), (128, 200), (130, 256)])
@pytest.mark.parametrize("activation", ["situ", "swiglu"])
def test_zeros_up_to_the_next_tile_change_nothing(D, F, activation):
    x, *matrices, ids, weights = make("random", 30, 5, 2, D, F, torch.float64)
    leaves = [t.requires_grad_() for t in (x, *matrices)]
    wide = fused.widened(*leaves)
    assert {size % fused.WIDTH for t in wide for size in t.shape[1 if t is not wide[0] else -1 :]} == {0}
    both = []
    for tensors in (leaves, wide):
        out = grouped_experts(*tensors, ids, weights, activation=activation, backend="reference")
        assert not out[:, D:].any()
        both.append((out[:, :D], *torch.autograd.grad(out[:, :D].sin().sum(), leaves)))
    for got, exact in zip(*both):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    assert fused.widened(*wide) == wide  # the very same


def test_weights_get_their_zeros_and_lose_those_of_gradients_as_by_padding():
    """To the bit; also in a graph that casts them before."""
    w_gate, w_up, w_down = (w.requires_grad_() for w in make("random", 5, 4, 2, 100, 70, torch.float32)[1:4])
    grads = [torch.randn(4, *shape).bfloat16() for shape in ((128, 128), (128, 128), (128, 128))]
    found = []
    for by_padding in (False, True):
        own = [w.to(torch.bfloat16) for w in (w_gate, w_up, w_down)]
        if by_padding:
            wide = [pad(own[0], (0, 28, 0, 58)), pad(own[1], (0, 28, 0, 58)), pad(own[2], (0, 58, 0, 28))]
        else:
            wide = list(fused.widened(torch.randn(3, 100).bfloat16(), *own)[1:])
            assert all(w.is_contiguous() for w in wide)
        gradients = torch.autograd.grad(wide, (w_gate, w_up, w_down), grads)
        assert all(g.is_contiguous() for g in gradients)
        found.append([*wide, *gradients])
    assert all(map(torch.equal, *found))
    (alone,) = torch.autograd.grad(fused.widened(torch.randn(3, 100), w_gate, w_up, w_down)[2].sum(), w_up)
    assert alone.eq(1).all()


def test_a_cpu_is_refused():
    tensors = make("random", 20, 4, 2, 128, 128, torch.bfloat16)
    with pytest.raises(BackendError, match=r"'gluon': (its kernels run on|it is written for|Triton is not)"):
        grouped_experts(*tensors, backend="gluon")

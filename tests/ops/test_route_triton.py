"""The kernels of routing against a stable sort and the equation in plain torch.

What needs them runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.core.errors import BackendError, ShapeError
from perilune.nn import routing
from perilune.ops.route import route, stable_topk

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = 4000 if GPU else 6
SIZES = [(1, 1), (2, 1), (5, 5), (64, 4), (100, 7), (256, 8), (640, 12), (1024, 32), (33, 32)]  # E, k
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # of the interpreter


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def draw(M: int, E: int) -> tuple[Tensor, Tensor]:
    """scores, bias; a quarter of all biased scores equal another."""
    scores, bias = torch.rand(M, E), 0.3 * torch.randn(E)
    scores[:, ::4], bias[::4] = 0.5, 0.25
    return scores.to(DEVICE).requires_grad_(), bias.to(DEVICE)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("E", "k"), SIZES)
def test_topk_is_a_stable_sort(E: int, k: int, dtype: torch.dtype) -> None:
    scores = torch.randn(ROWS, E, device=DEVICE).to(dtype)
    scores[:, E // 2 :] = scores[:, : E - E // 2]
    got, packed, oracle = (stable_topk(scores, k, backend=name) for name in ("triton", "chunked", "reference"))
    for values, ids in (packed, oracle):
        assert torch.equal(got[1], ids)
        assert torch.equal(got[0], values)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.int64


@needs_kernels
@pytest.mark.parametrize("k", [1, 7, 13])
def test_the_ends_of_the_range_and_what_is_no_number_have_one_place(k: int) -> None:
    """NaN above infinity, below minus infinity with its sign bit set; both zeros are one."""
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32).tolist()
    tiny = torch.finfo(torch.float32).smallest_normal / 8
    row = [0.0, -0.0, torch.inf, 3e38, nan[0], -torch.inf, tiny, -tiny, nan[1], -3e38, torch.inf, -0.0, nan[0]]
    scores = torch.tensor([row, row[::-1]], device=DEVICE)
    scores[0, 8] = torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)
    values, ids = stable_topk(scores, k, backend="triton")
    expected = stable_topk(scores, k, backend="chunked")
    assert torch.equal(ids, expected[1])
    assert torch.equal(values.nan_to_num(7.0), expected[0].nan_to_num(7.0))
    if k == 13 and not GPU:  # a GPU's sums forget the sign of what is no number
        assert ids[0].tolist() == [4, 12, 2, 10, 3, 6, 0, 1, 11, 7, 9, 5, 8]


@needs_kernels
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("E", "k"), SIZES)
def test_routing_equals_the_equation(E: int, k: int, renormalize: bool) -> None:
    scores, bias = draw(ROWS, E)
    dweights = torch.randn(ROWS, k, device=DEVICE)
    options = {"renormalize": renormalize, "scaling": 2.5}

    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        leaf = scores.detach().to(dtype).requires_grad_()
        ids, weights = route(leaf, bias.to(torch.float32), k, backend=backend, **options)
        return ids, weights.detach(), *torch.autograd.grad(weights, leaf, dweights.to(dtype))

    ids, weights, dscores = run("triton", torch.float32)
    packed = run("chunked", torch.float32)
    assert torch.equal(ids, packed[0])
    assert weights.dtype == dscores.dtype == torch.float32
    torch.testing.assert_close(weights, packed[1], rtol=1e-6, atol=1e-7)
    exact = scores.detach().double().requires_grad_()  # of the same choice: sums of float64 may choose otherwise
    w = exact.gather(-1, ids)
    w = 2.5 * (w / (w.sum(-1, keepdim=True) + 1e-20) if renormalize else w)
    (oracle,) = torch.autograd.grad(w, exact, dweights.double())
    torch.testing.assert_close(dscores.double(), oracle, rtol=1e-5, atol=2e-5 / k)
    assert dscores.ne(0).sum(-1).max() <= k


@needs_kernels
def test_scores_of_zero_weigh_nothing_and_stay_finite() -> None:
    scores = torch.zeros(3, 10, device=DEVICE, requires_grad=True)
    ids, weights = route(scores, torch.zeros(10, device=DEVICE), 4, backend="triton")
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.eq(0).all()


@needs_kernels
def test_values_carry_the_gradient_of_scores() -> None:
    scores = torch.randn(2, 3, 20, device=DEVICE, requires_grad=True)
    values, ids = stable_topk(scores, 4, backend="triton")
    assert not ids.requires_grad
    slope = torch.randn_like(values)
    (got,) = torch.autograd.grad(values, scores, slope)
    assert torch.equal(got, torch.zeros_like(scores).scatter(-1, ids, slope))


@needs_kernels
def test_strides_axes_and_empty_batches() -> None:
    scores, bias = draw(24, 20)
    expected = route(scores, bias, 3, backend="triton")
    slope = torch.randn(24, 3, device=DEVICE)
    (dscores,) = torch.autograd.grad(expected[1], scores, slope)
    room = torch.full((24, 50), torch.nan, device=DEVICE)
    room[:, 7:27] = scores.detach()
    for loose in (room[:, 7:27], scores.detach().T.contiguous().T):
        leaf = loose.detach().requires_grad_()
        got = route(leaf, bias.repeat_interleave(2)[::2], 3, backend="triton")
        assert all(torch.equal(x, y) for x, y in zip(got, expected))
        apart = torch.stack([slope, slope * torch.nan], -1)[..., 0]
        assert torch.equal(torch.autograd.grad(got[1], leaf, apart)[0], dscores)
    ids, weights = route(scores.view(2, 3, 4, 20), bias, 3, backend="triton")
    assert torch.equal(ids, expected[0].view(2, 3, 4, 3))
    assert torch.equal(weights, expected[1].view(2, 3, 4, 3))
    empty = torch.zeros(0, 20, device=DEVICE, requires_grad=True)
    ids, weights = route(empty, bias, 3, backend="triton")
    assert ids.shape == weights.shape == (0, 3)
    assert torch.autograd.grad(weights.sum(), empty)[0].shape == (0, 20)


@needs_kernels
def test_groups_go_through_the_kernel_of_the_choice() -> None:
    scores, bias = (x.detach() for x in draw(30, 24))
    grouped = {"num_groups": 4, "topk_group": 2}
    ids, weights = routing.route(scores, bias, 5, **grouped)
    expected = routing.route(scores.double(), bias.double(), 5, **grouped)
    exact_ties = (scores + bias).double().eq(scores.double() + bias.double()).all(-1)
    assert torch.equal(ids[exact_ties], expected[0][exact_ties])
    torch.testing.assert_close(weights.sum(-1), torch.ones(30, device=DEVICE))


@needs_kernels
def test_what_cannot_be_served_is_refused_by_name_and_passed_on_by_auto() -> None:
    scores, bias = (x.detach() for x in draw(3, 2000))
    for message, arguments in (
        ("float64", (scores[:, :9].double(), bias[:9], 2)),
        ("the bias is torch.float64", (scores[:, :9], bias[:9].double(), 2)),
        ("up to 32 of up to 1024, and this is 2 of 2000", (scores, bias, 2)),
        ("this is 33 of 100", (scores[:, :100], bias[:100], 33)),
    ):
        with pytest.raises(BackendError, match=f"cannot run on 'triton'.*{message}"):
            route(*arguments, backend="triton")
        assert all(torch.equal(x, y) for x, y in zip(route(*arguments), route(*arguments, backend="reference")))
    auto, asked = (route(scores[:, :9], bias[:9], 2, backend=name) for name in ("auto", "triton"))
    assert all(torch.equal(x, y) for x, y in zip(auto, asked))


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ShapeError, match=r"bias: expected \[4\], got \[1, 4\]; one for every expert"):
        route(torch.rand(2, 4), torch.zeros(1, 4), 2)
    with pytest.raises(BackendError, match="cannot run on 'chunked': a value of float64 leaves no room for an index"):
        stable_topk(torch.rand(2, 4).double(), 2, backend="chunked")


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run here")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(BackendError, match="'triton': its kernels run on a GPU, and the tensors are on cpu"):
        stable_topk(torch.rand(2, 4), 2, backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernels_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@needs_kernels
@pytest.mark.parametrize("backend", ["triton", "chunked"])
def test_what_is_chosen_already_is_only_weighed(backend):
    """Of ids that the scores would not have chosen: the same weights and gradients from every form."""
    scores = torch.rand(7, 20, device=DEVICE)
    ids = torch.stack([torch.randperm(20, device=DEVICE)[:3] for _ in range(7)])
    found = []
    for name in (backend, "reference"):
        leaf = scores.clone().requires_grad_()
        got, weights = route(leaf, torch.zeros(20, device=DEVICE), 3, ids=ids, scaling=2.5, backend=name)
        assert torch.equal(got, ids)
        found.append((weights, *torch.autograd.grad(weights.square().sum(), leaf)))
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ShapeError, match="ids: expected int64"):
        route(scores, torch.zeros(20, device=DEVICE), 3, ids=ids[:, :2], backend=backend)

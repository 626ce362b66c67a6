import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import BackendError, ShapeError
from perilune.ops import grouped_experts
from perilune.ops.grouped_experts.products import grouped_outer, grouped_product


def weights_of(E, D, F, dtype=torch.float64):
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    return [(torch.randn(s, dtype=torch.float64) / s[-1] ** 0.5).to(dtype).requires_grad_() for s in shapes]


def ids_with_counts(counts):
    """One slot a token, in mixed order, so that expert e gets counts[e] of them."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids))].unsqueeze(-1)


def run(x, matrices, ids, weights, backend, **options):
    """Output and the gradients of x, three matrices and the routing weights, for a fixed direction."""
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    out = grouped_experts(x, *matrices, ids, weights, backend=backend, **options)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)
    return (out, *torch.autograd.grad(out, [x, *matrices, weights], direction))


def assert_same(got, expected, tolerance):
    for name, a, b in zip(("out", "x", "w_gate", "w_up", "w_down", "weights"), got, expected):
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
        error = (a - b).abs().max().item() if a.numel() else 0.0
        assert error <= tolerance * max(1.0, b.abs().max().item() if b.numel() else 0.0), (name, error)


@pytest.mark.parametrize("activation", ["situ", "swiglu"])
@pytest.mark.parametrize(
    ("M", "E", "top_k", "D", "F"),
    [(50, 6, 2, 7, 5), (33, 16, 4, 16, 8), (1, 1, 1, 3, 2), (40, 64, 32, 8, 4), (12, 1024, 3, 4, 4), (0, 4, 2, 8, 4)],
)
def test_chunked_is_the_reference_in_float64(M, E, top_k, D, F, activation):
    x, weights = 3 * torch.randn(M, D, dtype=torch.float64), torch.rand(M, top_k, dtype=torch.float64)
    matrices = weights_of(E, D, F)
    ids = torch.rand(M, E).topk(top_k).indices
    args = (x, matrices, ids, weights)
    options = {"activation": activation, "beta_gate": 2.0, "beta_up": 5.0}
    assert_same(run(*args, "chunked", **options), run(*args, "reference", **options), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[162, 0, 257, 44, 0, 83], [0, 0, 500, 0], [1, 2, 4, 8, 16, 300, 1], [3, 3, 3, 3]])
def test_uneven_loads(counts, dtype):
    ids = ids_with_counts(counts)
    x, weights = torch.randn(len(ids), 16, dtype=dtype), torch.rand(len(ids), 1, dtype=dtype)
    busy = ids_with_counts([5] * len(counts))
    matrices = weights_of(len(counts), 16, 8, dtype)
    # A step with every expert busy, freed at once, leaves its values where empty experts might find them.
    run(torch.randn(len(busy), 16, dtype=dtype), matrices, busy, torch.rand(len(busy), 1), "chunked")
    got = run(x, matrices, ids, weights, "chunked")
    assert_same(got, run(x, matrices, ids, weights, "reference"), 1e-12 if dtype == torch.float64 else 1e-5)
    for gradient in got[2:5]:
        for expert, count in enumerate(counts):
            assert bool((gradient[expert] == 0).all()) == (count == 0), expert


@pytest.mark.parametrize(("D", "F"), [(7, 3), (1, 1), (1, 4), (4, 1), (8, 2)])
def test_float32_widths_that_no_grouped_kernel_takes(D, F):
    x, weights, ids = torch.randn(60, D), torch.rand(60, 2), torch.rand(60, 5).topk(2).indices
    matrices = weights_of(5, D, F, torch.float32)
    assert_same(run(x, matrices, ids, weights, "chunked"), run(x, matrices, ids, weights, "reference"), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_err_no_more_than_the_reference(dtype):
    x, weights = torch.randn(64, 32).to(dtype), torch.rand(64, 4)
    matrices = weights_of(8, 32, 16, dtype)
    ids = torch.rand(64, 8).topk(4).indices
    exact = run(x.double(), [w.detach().double().requires_grad_() for w in matrices], ids, weights, "reference")
    got, plain = (run(x, matrices, ids, weights, backend) for backend in ("chunked", "reference"))
    for a, b, c in zip(got, plain, exact):
        assert a.dtype == b.dtype
        floor = torch.finfo(a.dtype).eps * c.abs().max()
        assert (a.double() - c).abs().max() <= (b.double() - c).abs().max() + floor


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_strided_inputs(dtype, tolerance):
    matrices = [w.detach().mT.contiguous().mT.requires_grad_() for w in weights_of(6, 16, 8, dtype)]
    x, weights = torch.randn(16, 80, dtype=dtype).T[::2], torch.rand(2, 40, dtype=dtype).T
    ids = torch.randint(0, 6, (40, 4))[:, ::2]
    assert not any(t.is_contiguous() for t in (x, weights, ids, *matrices))
    args = (ids, weights)
    assert_same(run(x, matrices, *args, "chunked"), run(x, matrices, *args, "reference"), tolerance)


def test_empty_slots_are_never_read():
    """Slots of other ranks' experts: id -1, weight 0; tokens with nothing but such slots may even be NaN."""
    x, weights = torch.randn(20, 8, dtype=torch.float64), torch.rand(20, 3, dtype=torch.float64)
    ids = torch.rand(20, 6).topk(3).indices
    ids[:, 1] = torch.where(torch.arange(20) % 2 == 0, -1, ids[:, 1])
    ids[7] = -1
    x[7] = torch.nan
    weights[ids < 0] = 0
    matrices = weights_of(6, 8, 4)
    got = run(x, matrices, ids, weights, "chunked")
    assert all(t.isfinite().all() for t in got)
    assert_same(got, run(x, matrices, ids, weights, "reference"), 1e-12)
    assert (got[0][7] == 0).all()
    assert (got[5][ids < 0] == 0).all()


def test_nothing_but_empty_slots_gives_zero_gradients():
    x, matrices = torch.full((3, 8), torch.nan), weights_of(4, 8, 4, torch.float32)
    got = run(x, matrices, torch.full((3, 2), -1), torch.zeros(3, 2), "chunked")
    assert all((t == 0).all() for t in got)


def test_frozen_matrices_get_no_gradient_and_the_others_keep_theirs():
    x, ids, weights = torch.randn(10, 8), torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)
    matrices = weights_of(4, 8, 4, torch.float32)
    for learned in range(3):
        given_ = [w if i == learned else w.detach() for i, w in enumerate(matrices)]
        (gradient,) = torch.autograd.grad(grouped_experts(x, *given_, ids, weights).sum(), [matrices[learned]])
        (whole,) = torch.autograd.grad(grouped_experts(x, *matrices, ids, weights).sum(), [matrices[learned]])
        assert torch.equal(gradient, whole)


def test_router_weight_gradient_is_that_of_the_expert_output():
    x, p = torch.randn(30, 8, dtype=torch.float64), torch.rand(30, 1, dtype=torch.float64)
    ids, matrices = torch.randint(0, 4, (30, 1)), weights_of(4, 8, 4)
    unweighted = grouped_experts(x, *matrices, ids, torch.ones_like(p))
    gradient = run(x, matrices, ids, p, "chunked")[5]
    direction = torch.linspace(-1, 1, 240, dtype=torch.float64).sin().view(30, 8)
    torch.testing.assert_close(gradient[:, 0], (unweighted * direction).sum(-1), rtol=0, atol=1e-14)


def test_gradcheck():
    x, weights = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 2, dtype=torch.float64)
    ids = torch.tensor([[0, 1], [2, -1], [1, 0], [0, 2], [-1, 1], [2, 0]])
    inputs = (x.requires_grad_(), *weights_of(4, 4, 3), weights.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, a, b, c, p: grouped_experts(x, a, b, c, ids, p), inputs)


def test_a_token_does_not_depend_on_its_neighbours():
    x, ids, weights = torch.randn(40, 8), torch.rand(40, 6).topk(2).indices, torch.rand(40, 2)
    matrices = weights_of(6, 8, 4, torch.float32)
    whole = grouped_experts(x, *matrices, ids, weights)
    torch.testing.assert_close(grouped_experts(x[3:9], *matrices, ids[3:9], weights[3:9]), whole[3:9])


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.booleans())
def test_grouped_products_are_products_of_the_groups(counts, aligned):
    K, N = (8, 4) if aligned else (3, 5)
    dtype = torch.float32 if aligned else torch.float64
    rows, right = torch.randn(sum(counts), K, dtype=dtype), torch.randn(sum(counts), N, dtype=dtype)
    matrices = torch.randn(len(counts), K, N, dtype=dtype)
    product, outer = (f.clone() for f in (rows.new_zeros(sum(counts), N), matrices))
    start = 0
    for e, count in enumerate(counts):
        mine = slice(start, start + count)
        product[mine], outer[e] = rows[mine] @ matrices[e], rows[mine].T @ right[mine]
        start += count
    sizes = torch.tensor(counts)
    torch.testing.assert_close(grouped_product(rows, matrices, sizes), product, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grouped_outer(rows, right, sizes), outer, rtol=1e-5, atol=1e-5)


def test_autocast_casts_as_a_linear_layer_would():
    x, ids, weights = torch.randn(10, 8), torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)
    matrices = weights_of(4, 8, 4, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_experts(x, *matrices, ids, weights)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(w.grad.dtype == torch.float32 for w in matrices)
    expected = grouped_experts(x.bfloat16(), *(w.bfloat16() for w in matrices), ids, weights)
    assert torch.equal(out, expected)


def test_errors_name_what_is_wrong():
    x, ids, weights = torch.randn(10, 8), torch.rand(10, 4).topk(2).indices, torch.rand(10, 2)
    w_gate, w_up, w_down = weights_of(4, 8, 4, torch.float32)
    with pytest.raises(ShapeError, match=r"w_down: expected \[4, 8, 4\], got \[4, 4, 8\]"):
        grouped_experts(x, w_gate, w_up, w_gate, ids, weights)
    with pytest.raises(ShapeError, match=r"w_up: expected x's dtype torch.float32, got torch.float64"):
        grouped_experts(x, w_gate, w_up.double(), w_down, ids, weights)
    for backend in ("chunked", "reference"):
        for wrong, number in ((ids.clamp(min=3) + 1, 4), (ids.clamp(max=0) - 2, -2)):
            with pytest.raises(ShapeError, match=rf"ids: expected expert numbers from 0 to 3, or -1, got {number}"):
                grouped_experts(x, w_gate, w_up, w_down, wrong, weights, backend=backend)
    with pytest.raises(ShapeError, match=r"weights: expected \[10, 2\], got \[10, 1\]"):
        grouped_experts(x, w_gate, w_up, w_down, ids, weights[:, :1])
    with pytest.raises(ShapeError, match=r"activation: .*swigl.*do you mean 'swiglu'"):
        grouped_experts(x, w_gate, w_up, w_down, ids, weights, activation="swigl")
    with pytest.raises(BackendError, match="grouped_experts"):
        grouped_experts(x, w_gate, w_up, w_down, ids, weights, backend="triton")

"""KDA: every form against the float64 recurrence, and the recurrence against numbers worked out by hand."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from perilune.core.errors import BackendError, ShapeError
from perilune.ops.kda import BoundedGate, SoftplusGate, kda, kda_step, layout
from perilune.ops.kda.blocks import cover
from perilune.ops.kda.chunked import chunked
from perilune.ops.kda.layout import lay_out
from perilune.ops.kda.reference import recurrence

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
CASES = ("random", "floor", "ceiling", "halves", "alternate", "same_key", "converged", "jumps")
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def make(case: str, lengths: list[int], H: int = 2, K: int = 12, V: int = 20, batch: int = 1) -> list[Tensor]:
    """q, k, v, g, beta and initial states, in float64, of documents laid end to end."""
    T = sum(lengths)
    q, k = (normalize(torch.randn(batch, T, H, K, dtype=f64), dim=-1) for _ in range(2))
    v, z = torch.randn(batch, T, H, V, dtype=f64), torch.randn(batch, T, H, K, dtype=f64)
    beta = torch.randn(batch, T, H, dtype=f64).sigmoid()
    state = 0.5 * torch.randn(batch * len(lengths), H, K, V, dtype=f64)
    channel, token = torch.arange(K), torch.arange(T)[:, None, None]
    low, high = torch.tensor(-5.0, dtype=f64), torch.tensor(-1e-6, dtype=f64)
    g = {
        "floor": low,
        "ceiling": high,
        "halves": torch.where(channel % 2 == 0, low, high),
        "alternate": torch.where(token % 2 == 0, low, high),
        "same_key": -1e-3 * z.abs(),
        "converged": high,
        "jumps": -50 * torch.rand(z.shape, dtype=f64) ** 8,
    }.get(case, -5 * z.sigmoid())
    if case == "same_key":
        k = normalize(k[:, :1] + 1e-3 * torch.randn_like(k), dim=-1)
        beta = (8 + torch.randn_like(beta)).sigmoid()
    if case == "converged" and batch == 1:  # the state predicts v already, but for a part in two hundred
        state = 100 * state
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        v = torch.einsum("thk,thkv->thv", k[0], state[rows])[None] + 0.5 * v
    return [q, k, v, g.expand_as(z).clone(), beta, state]


def run(
    fn: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], do: Tensor | None, dstate: Tensor | None, **options
) -> list[Tensor]:
    """Outputs, then the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, state = fn(*leaves[:5], initial_state=leaves[5], **{"scale": 0.3, **options})
    torch.autograd.backward(
        [x for x, d in ((o, do), (state, dstate)) if d is not None], [d for d in (do, dstate) if d is not None]
    )
    return [o.detach(), state.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm."""
    assert got.shape == want.shape
    assert got.isfinite().all()
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-200))


def assert_same(
    got: list[Tensor], want: list[Tensor], tolerance: float = 1e-12, names: tuple[str, ...] = NAMES
) -> None:
    errors = {name: error(a, b) for name, a, b in zip(names, got, want, strict=True)}
    assert max(errors.values()) < tolerance, {name: f"{e:.1e}" for name, e in errors.items()}


def upstream(inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.randn_like(inputs[2]), 0.3 * torch.randn_like(inputs[5])


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one step, so that their seams are many."""
    monkeypatch.setattr(layout, "PART", 1)
    monkeypatch.setattr(layout, "MIN_STEPS", 1)


# The recurrence itself


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_hand_example(backend: str) -> None:
    q = torch.tensor([[1, 0], [0.6, 0.8]], dtype=f64).view(1, 2, 1, 2)
    v = torch.tensor([[2, -1], [1, 3]], dtype=f64).view(1, 2, 1, 2)
    g = torch.tensor([[0.5, 0.25], [0.5, 0.8]], dtype=f64).log().view(1, 2, 1, 2)
    beta = torch.tensor([0.5, 0.25], dtype=f64).view(1, 2, 1)
    o, state = kda(q, q, v, g, beta, scale=1.0, output_final_state=True, backend=backend)
    torch.testing.assert_close(o[0, :, 0], torch.tensor([[1, -0.5], [0.475, 0.6375]], dtype=f64), rtol=0, atol=1e-15)
    torch.testing.assert_close(
        state[0, 0], torch.tensor([[0.605, 0.2225], [0.14, 0.63]], dtype=f64), rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("T", [64, 130])
def test_one_key_and_full_writes_replace_the_value(T: int) -> None:
    """Every write replaces what lies under the key: o_t = scale (q_t . k) v_t, S = k v_T^T."""
    k = normalize(torch.randn(16), dim=-1)
    q, v = torch.randn(1, T, 1, 16), torch.randn(1, T, 1, 24)
    o, state = kda(
        q, k.expand_as(q), v, torch.zeros_like(q), torch.ones(1, T, 1), output_final_state=True, backend="chunked"
    )
    assert error(o, 0.25 * (q @ k)[..., None] * v) < 1e-5
    assert error(state[0, 0], torch.outer(k, v[0, -1, 0])) < 1e-5


def test_no_write_and_exact_write() -> None:
    q, k, v, g, beta, state = make("same_key", [70])
    _, kept = chunked(q, k, v, g, 0 * beta, scale=1.0, initial_state=state)
    assert error(kept, g[0].sum(0)[None, ..., None].exp() * state) < 1e-14
    _, written = chunked(q, k, v, 0 * g, torch.ones_like(beta), scale=1.0, initial_state=state)
    assert error(torch.einsum("hk,hkv->hv", k[0, -1], written[0]), v[0, -1]) < 1e-13


def test_small_residual_on_a_large_state_survives() -> None:
    """State 4098, value 4096, beta 0.7: the write is -1.4, though float32 has no digits for it beside 4096 * 0.7."""
    one = torch.ones(1, 1, 1, 1)
    o, state = kda(
        one, one, 4096 * one, 0 * one, 0.7 * one[..., 0], scale=1.0, initial_state=4098 * one, output_final_state=True
    )
    assert o.item() == state.item() == torch.tensor(4098.0 + 0.7 * (4096 - 4098)).item()
    beta = torch.full((1, 1, 1), 0.7, requires_grad=True)
    kda(one, one, 4096 * one, 0 * one, beta, scale=1.0, initial_state=4098 * one, backend="chunked")[0].sum().backward()
    assert beta.grad.item() == -2.0


def test_infinite_decay_forgets_everything() -> None:
    inputs = make("random", [70])
    inputs[3][:, 37] = -math.inf
    do, dstate = upstream(inputs)
    do[:, :37] = 0
    got = run(chunked, inputs, do, dstate)
    assert_same(got, run(recurrence, inputs, do, dstate))
    assert not got[7].any()


# The chunks against the recurrence


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("chunk", "floor"), [(16, None), (64, None), (32, -5.0)])
def test_chunked_equals_the_recurrence(case: str, chunk: int, floor: float | None) -> None:
    if case == "jumps":
        floor = None  # it goes down to -50
    lengths = [0, 1, 15, 64, 50]
    inputs = make(case, lengths)
    do, dstate = upstream(inputs)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    got = run(chunked, inputs, do, dstate, cu=cu, chunk=chunk, floor=floor)
    assert_same(got, run(recurrence, inputs, do, dstate, cu=cu))


@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("floor", [None, -5.0])
def test_every_length(T: int, floor: float | None) -> None:
    inputs = make("random", [T], batch=2)
    do, dstate = upstream(inputs)
    assert_same(run(chunked, inputs, do, dstate, floor=floor), run(recurrence, inputs, do, dstate))


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("lengths", [[100], [33, 0, 70, 5]])
def test_the_chunk_size_is_not_part_of_the_mathematics(lengths: list[int]) -> None:
    inputs = make("halves", lengths)
    do, dstate = upstream(inputs)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    want = run(recurrence, inputs, do, dstate, cu=cu)
    for chunk in (1, 2, 16, 32, 64, 128):
        for floor in (None, -5.0):
            assert_same(run(chunked, inputs, do, dstate, cu=cu, chunk=chunk, floor=floor), want)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("floor", [None, -5.0])
def test_float32_stays_near_float64(case: str, floor: float | None) -> None:
    """The inputs are rounded first, so that the error is the computation's alone."""
    inputs = [x.float().double() for x in make(case, [130], K=16, V=24)]
    do, dstate = (x.float().double() for x in upstream(inputs))
    want = run(recurrence, inputs, do, dstate)
    floor = None if case == "jumps" else floor
    got = run(chunked, [x.float() for x in inputs], do.float(), dstate.float(), floor=floor)
    if case == "converged":  # what is left after the prediction is half a percent: dbeta loses those digits
        assert error(got[6], want[6]) < 2e-4
        got[6] = want[6]
    assert_same(got, want, 3e-6)


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 130])
def test_float32_at_the_floor_is_finite_at_every_length(T: int) -> None:
    inputs = make("floor", [T])
    do, dstate = upstream(inputs)
    want = run(recurrence, inputs, do, dstate)
    for floor in (None, -5.0):
        got = run(chunked, [x.float() for x in inputs], do.float(), dstate.float(), floor=floor)
        assert_same(got, want, 3e-6)


def test_large_queries_and_keys_overflow_above_the_diagonal_alone() -> None:
    """A tile's upper half reaches e^75 |q| |k|, beyond float32 here; it must be cut off, not multiplied by zero."""
    inputs = make("floor", [40])
    inputs[0] *= 1e4
    inputs[1] *= 1e4
    inputs[4] *= 1e-8
    do, dstate = upstream(inputs)
    got = run(chunked, [x.float() for x in inputs], do.float(), dstate.float(), floor=-5.0)
    assert_same(got, run(recurrence, inputs, do, dstate), 3e-6)


@pytest.mark.parametrize(("floor", "tiles"), [(None, 0), (-5.0, 1), (-5.25, 1), (-5.3, 0)])
def test_tiles_are_for_bounds_that_float32_holds(floor: float | None, tiles: int) -> None:
    retention = torch.full((1, 32, 3), floor or -50.0).exp()
    pairs = torch.zeros(1, 32, 2, 32)
    blocks = 0
    for block in cover(retention, torch.ones_like(retention), floor):
        blocks += block.tile
        target = block.of(pairs)
        target += block.cut(torch.ones_like(target))
        assert block.to.isfinite().all()
        assert block.since.isfinite().all()
    assert blocks == tiles
    assert torch.equal(pairs, torch.ones(32, 32).tril(-1)[:, None].expand(1, 32, 2, 32))


def test_gradients_by_finite_differences() -> None:
    inputs = [x.requires_grad_() for x in make("random", [5], H=1, K=2, V=3)]
    assert torch.autograd.gradcheck(
        lambda *x: chunked(*x[:5], scale=0.7, initial_state=x[5], chunk=4), inputs, raise_exception=True
    )


def test_chunked_is_differentiable_once() -> None:
    q, k, v, g, beta, _ = (x.requires_grad_() for x in make("random", [5]))
    (dq,) = torch.autograd.grad(kda(q, k, v, g, beta)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_repeats_bit_for_bit() -> None:
    inputs = [x.float() for x in make("random", [40, 30])]
    do, dstate = (x.float() for x in upstream(inputs))
    runs = [run(chunked, inputs, do, dstate, cu=[0, 40, 70]) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_keeps_its_inputs_and_few_states() -> None:
    inputs = [x.requires_grad_() for x in make("random", [1024])]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        chunked(*inputs[:5], scale=1.0, initial_state=inputs[5])
    state = inputs[5].numel()
    assert sum(x.numel() for x in kept) <= sum(x.numel() for x in inputs[:5]) + state * (1024 // (32 * 8))


# Gates, norms, logits


@pytest.mark.parametrize(
    ("A_log", "z", "g"),
    [(0, 0, -2.5), (0, 3, -4.762870634), (math.log(16), 0.5, -4.998323249), (math.log(16), -0.5, -0.001676751)],
)
def test_bounded_gate_numbers(A_log: float, z: float, g: float) -> None:
    gate = BoundedGate(torch.tensor([A_log], dtype=f64), torch.zeros(1, 1, dtype=f64))
    assert gate(torch.full((1, 1), z, dtype=f64)).item() == pytest.approx(g, abs=1e-9)


@pytest.mark.parametrize(
    ("dt", "g", "retention"),
    [(0.001, -0.0049975, 0.995015), (0.01, -0.0497508, 0.951466), (0.1, -0.4758129, 0.621380)],
)
def test_gates_at_their_initial_bias(dt: float, g: float, retention: float) -> None:
    """With A = 0 and no data the bounded gate gives -5 (1 - e^-dt), the softplus gate -dt."""
    bias = torch.tensor([[dt + math.log(-math.expm1(-dt))]], dtype=f64)
    zero = torch.zeros(1, dtype=f64)
    got = BoundedGate(zero, bias)(torch.zeros(1, 1, dtype=f64))
    assert got.item() == pytest.approx(g, abs=1e-7)
    assert got.exp().item() == pytest.approx(retention, abs=1e-6)
    assert SoftplusGate(zero, bias)(torch.zeros(1, 1, dtype=f64)).item() == pytest.approx(-dt, rel=1e-13)


def test_the_bias_is_added_before_the_rate() -> None:
    A_log, one = torch.tensor([math.log(2)], dtype=f64), torch.ones(1, 1, dtype=f64)
    assert BoundedGate(A_log, one)(0 * one).item() == pytest.approx(-4.403985, abs=1e-6)  # not -5 sigmoid(1)
    assert SoftplusGate(A_log, one)(0 * one).item() == pytest.approx(-2 * math.log1p(math.e), rel=1e-14)


def test_the_rate_belongs_to_the_head_and_the_bias_to_the_channel() -> None:
    A_log, bias, z = torch.randn(3, dtype=f64), torch.randn(3, 4, dtype=f64), torch.randn(2, 5, 3, 4, dtype=f64)
    for gate, formula in (
        (BoundedGate(A_log, bias, -4.0), lambda a, y: -4 / (1 + math.exp(-a * y))),
        (SoftplusGate(A_log, bias), lambda a, y: -a * math.log1p(math.exp(y))),
    ):
        g = gate(z)
        for h in range(3):
            for c in range(4):
                want = formula(math.exp(A_log[h]), (z[1, 2, h, c] + bias[h, c]).item())
                assert g[1, 2, h, c].item() == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("dtype", [f32, f64])
def test_gates_hold_in_the_tails(dtype: torch.dtype) -> None:
    """Values stay in range, and derivatives keep their digits where s (1 - s) and log(1 + e^x) would lose them."""
    x = torch.tensor([-1e4, -80.0, -30.0, -1.0, 0.0, 1.0, 30.0, 80.0, 1e4], dtype=dtype)
    zero, bias, exact = torch.zeros(1, dtype=dtype), torch.zeros(1, len(x), dtype=dtype), x.double()
    small = torch.exp(-exact.abs())
    slope = {"bounded": -5 * small / (1 + small) ** 2, "softplus": -torch.exp(exact.clamp(max=0)) / (1 + small)}
    value = {"bounded": 5 * slope["softplus"], "softplus": -(exact.clamp(min=0) + small.log1p())}
    for name, gate in (("bounded", BoundedGate(zero, bias)), ("softplus", SoftplusGate(zero, bias))):
        z = x[None].clone().requires_grad_()
        g = gate(z)
        g.sum().backward()
        tolerance = 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(g[0].double(), value[name], rtol=tolerance, atol=1e-37)
        torch.testing.assert_close(z.grad[0].double(), slope[name], rtol=tolerance, atol=1e-37)
        assert (g <= 0).all()
        assert name != "bounded" or (g >= -5).all()


@pytest.mark.parametrize("gate_class", [BoundedGate, SoftplusGate])
@pytest.mark.parametrize("spread", [0.3, 10.0])
def test_gate_norm_and_logits_reach_every_parameter(gate_class: type, spread: float) -> None:
    q, k, v, z, beta, state = make("random", [0, 33, 40])
    q, k, z, beta = 3 * q, 2 * k, spread * torch.randn_like(z), torch.randn_like(beta)
    A_log, bias = 0.5 * torch.randn(2, dtype=f64), torch.randn(2, 12, dtype=f64)
    do, dstate = upstream([q, k, v, z, beta, state])
    results = []
    for backend in ("reference", "chunked"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, z, beta, state, A_log, bias)]
        o, final = kda(
            *leaves[:5],
            initial_state=leaves[5],
            output_final_state=True,
            cu_seqlens=[0, 0, 33, 73],
            gate=gate_class(*leaves[6:]),
            normalize_qk=True,
            beta_logits=True,
            backend=backend,
        )
        torch.autograd.backward([o, final], [do, dstate])
        results.append([o.detach(), final.detach(), *(x.grad for x in leaves)])
    assert_same(results[1], results[0], 1e-12, (*NAMES, "dA_log", "ddt_bias"))


@pytest.mark.parametrize("A_log", [-10.0, 10.0])
def test_extreme_rates_stay_finite_in_float32(A_log: float) -> None:
    q, k, v, z, beta, state = make("random", [70])
    leaves = [x.float().requires_grad_() for x in (q, k, v, 4 * z, beta, state)]
    for gate_class in (BoundedGate, SoftplusGate):
        parameters = torch.full((2,), A_log, requires_grad=True), torch.zeros(2, 12, requires_grad=True)
        o, _ = kda(*leaves[:5], initial_state=leaves[5], gate=gate_class(*parameters))
        o.sum().backward()
        want, _ = kda(*leaves[:5], initial_state=leaves[5], gate=gate_class(*parameters), backend="reference")
        assert error(o, want) < 1e-5
        assert all(x.grad.isfinite().all() for x in (*leaves, *parameters))


def test_norm_adds_its_epsilon_to_the_sum_of_squares() -> None:
    """Entries of 1e-4 in 128 channels: 1e-4 / sqrt(128e-8 + 1e-6) = 0.066226618."""
    small, one = torch.full((1, 1, 1, 128), 1e-4, dtype=f64), torch.ones(1, 1, 1, 1, dtype=f64)
    _, state = kda(
        small, small, one, 0 * small, one[..., 0], normalize_qk=True, output_final_state=True, backend="chunked"
    )
    torch.testing.assert_close(state[0, 0, :, 0], torch.full((128,), 0.066226618, dtype=f64), rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [f32, f64, bf16])
def test_norm_of_zero_has_a_finite_gradient(dtype: torch.dtype) -> None:
    """d/dx of x / sqrt(x^2 + eps) at 0 is eps^-1/2 = 1000."""
    q = torch.zeros(1, 1, 1, 4, dtype=dtype, requires_grad=True)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    state = torch.ones(1, 1, 4, 1, dtype=dtype)
    o, _ = kda(q, q.detach(), one, 0 * q.detach(), 0 * one[..., 0], scale=1.0, initial_state=state, normalize_qk=True)
    o.sum().backward()
    torch.testing.assert_close(q.grad.double(), torch.full((1, 1, 1, 4), 1000.0, dtype=f64), rtol=4e-3, atol=0)


# Packed documents


@pytest.mark.parametrize(
    "lengths", [[0, 1, 15, 64, 123], [0, 0, 5, 0, 7], [5, 3, 4], [64, 64], [0, 0], [1, 1, 68, 1], [130]]
)
@pytest.mark.parametrize("with_state", [True, False])
def test_packed_equals_separate(lengths: list[int], with_state: bool) -> None:
    inputs = make("random", lengths)
    inputs[3] *= 1e-3  # slow decay, so that a leak would show
    do, dstate = upstream(inputs)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    if not with_state:
        inputs[5].zero_()
        got, _ = chunked(*inputs[:5], scale=0.3, cu=cu)
        assert error(got, run(chunked, inputs, do, dstate, cu=cu)[0]) < 1e-15
    got = run(chunked, inputs, do, dstate, cu=cu)
    pieces = []
    for n, (start, stop) in enumerate(pairwise(cu)):
        alone = [*(x[:, start:stop] for x in inputs[:5]), inputs[5][n : n + 1]]
        pieces.append(run(recurrence, alone, do[:, start:stop], dstate[n : n + 1]))
    want = [torch.cat(x, 0 if name in ("state", "dinitial") else 1) for name, x in zip(NAMES, zip(*pieces))]
    assert_same(got, want)
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(got[1][n], inputs[5][n])
            assert torch.equal(got[7][n], dstate[n])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_no_documents_at_all(backend: str) -> None:
    inputs = make("random", [], batch=1)
    o, state = kda(*inputs[:5], cu_seqlens=[0], output_final_state=True, backend=backend)
    assert o.shape == (1, 0, 2, 20)
    assert state.shape == (0, 2, 12, 20)


def test_a_document_does_not_see_the_others() -> None:
    inputs = [x.float() for x in make("ceiling", [20, 33, 40])]
    cu = torch.tensor([0, 20, 53, 93])
    o, states = kda(*inputs[:5], cu_seqlens=cu, output_final_state=True)
    inputs[2][:, :20] = torch.randn(1, 20, 2, 20)
    changed, changed_states = kda(*inputs[:5], cu_seqlens=cu, output_final_state=True)
    assert torch.equal(o[:, 20:], changed[:, 20:])
    assert torch.equal(states[1:], changed_states[1:])
    assert not torch.equal(o[:, :20], changed[:, :20])


def test_one_token_documents_beside_a_long_one() -> None:
    inputs = make("random", [1, 1, 68, 1])
    want = recurrence(*inputs[:5], scale=0.3, initial_state=inputs[5], cu=[0, 1, 2, 70, 71])
    got = kda(*inputs[:5], scale=0.3, initial_state=inputs[5], cu_seqlens=[0, 1, 2, 70, 71], output_final_state=True)
    assert_same(list(got), list(want), names=NAMES[:2])


@pytest.mark.parametrize(("cu", "size", "chunks"), [([0, 781, 2048], 32, 65), ([0, 20, 40], 16, 4), ([0, 0, 0], 16, 0)])
def test_chunks_are_counted_by_document(cu: list[int], size: int, chunks: int) -> None:
    q = torch.zeros(1, cu[-1], 1, 1)
    assert sum(sum(part.live) for part in lay_out(q, cu, size).parts) == chunks


# States, decoding, streams


@pytest.mark.parametrize("V", [24, 16])
def test_prefill_then_decode_equals_one_pass(V: int) -> None:
    q, k, v, g, beta, state = make("random", [25], K=16, V=V)
    whole, final = kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    inputs = (q, k, v, g, beta)
    o, state = kda(*(x[:, :20] for x in inputs), initial_state=state, output_final_state=True)
    outputs = [o]
    for t in range(20, 25):
        before = state.clone()
        o, after = kda_step(*(x[:, t] for x in inputs), state)
        assert torch.equal(state, before)
        outputs.append(o[:, None])
        state = after
    assert_same([torch.cat(outputs, 1), state], [whole, final], names=NAMES[:2])


@settings(derandomize=True, deadline=None, max_examples=12)
@given(st.integers(0, 97), st.integers(0, 97), st.sampled_from(CASES))
def test_a_split_sequence_is_the_whole(first: int, second: int, case: str) -> None:
    *inputs, state = make(case, [97])
    whole = chunked(*inputs, scale=0.3, initial_state=state)
    outputs = []
    for start, stop in pairwise([0, *sorted((first, second)), 97]):
        o, state = chunked(*(x[:, start:stop] for x in inputs), scale=0.3, initial_state=state)
        outputs.append(o)
    assert_same([torch.cat(outputs, 1), state], list(whole), names=NAMES[:2])


def test_several_tokens_on_a_state_equal_one_by_one() -> None:
    *inputs, state = make("random", [17])
    _, state = kda(*(x[:, :12] for x in inputs), initial_state=state, output_final_state=True)
    together = kda(*(x[:, 12:] for x in inputs), initial_state=state, output_final_state=True)
    outputs = []
    for t in range(12, 17):
        o, state = kda(*(x[:, t : t + 1] for x in inputs), initial_state=state, output_final_state=True)
        outputs.append(o)
    assert_same([torch.cat(outputs, 1), state], list(together), names=NAMES[:2])


def test_write_strength_is_not_rounded() -> None:
    """sigmoid(0.5) is 0.622459352; in bfloat16 it would be 0.62109375."""
    one = torch.ones(1, 1, 1, dtype=bf16)
    half = torch.full((1, 1), 0.5, dtype=bf16)
    _, state = kda_step(one, one, one, 0 * one, half, torch.zeros(1, 1, 1, 1), scale=1.0, beta_logits=True)
    _, chunk = kda(
        *(x[None] for x in (one, one, one, 0 * one, half)), scale=1.0, beta_logits=True, output_final_state=True
    )
    assert state.dtype == chunk.dtype == f32
    assert state.item() == chunk.item() == pytest.approx(0.622459352, abs=1e-7)


def test_chunks_and_steps_agree_over_two_thousand_tokens() -> None:
    *inputs, state = (x.float() for x in make("random", [2000], H=1, K=8, V=8))
    inputs[3] *= 0.01
    o, final = kda(*inputs, initial_state=state, output_final_state=True)
    with torch.no_grad():
        for t in range(2000):
            last, state = kda_step(*(x[:, t] for x in inputs), state)
    assert error(last, o[:, -1]) < 1e-6
    assert error(state, final) < 1e-6


# Gradients


@pytest.mark.parametrize("T", [1, 64, 130])
def test_gradient_of_the_initial_state_alone(T: int) -> None:
    """beta = 0, g = -0.01: o_t = scale (q_t e^{G_t}) S_0, so d sum(o) / d S_0 = scale sum_t q_t e^{G_t}."""
    q, k, v, g, beta, state = make("random", [T])
    g = torch.full_like(g, -0.01)
    state.requires_grad_()
    o, final = kda(q, k, v, g, 0 * beta, initial_state=state, output_final_state=True)
    o.sum().backward()
    decayed = 12**-0.5 * q * g.cumsum(1).exp()
    assert error(o, torch.einsum("bthk,bhkv->bthv", decayed, state)) < 1e-13
    assert error(final, g.sum(1).exp()[..., None] * state) < 1e-13
    assert error(state.grad, decayed.sum(1)[..., None].expand_as(state)) < 1e-13


def test_either_output_alone_can_carry_the_loss() -> None:
    inputs = make("random", [70])
    do, dstate = upstream(inputs)
    for outer in ((do, None), (None, dstate)):
        got = run(chunked, inputs, *outer)
        assert_same(got, run(recurrence, inputs, *outer))
    assert not got[2].any()  # q is read by o alone
    assert all(x.any() for x in got[3:])


def test_no_gradient_from_the_future_and_no_effect_on_the_past() -> None:
    for cut in (1, 31, 32, 50):
        inputs = [x.requires_grad_() for x in make("random", [70])]
        o, _ = chunked(*inputs[:5], scale=0.3, initial_state=inputs[5])
        o[:, :cut].square().sum().backward()
        assert not any(x.grad[:, cut:].any() for x in inputs[:5])
        assert all(x.grad[:, :cut].any() for x in inputs[:5])
        with torch.no_grad():
            for x, y in zip(inputs[:5], make("jumps", [70])):
                x[:, cut:] = y[:, cut:]
            later, _ = chunked(*inputs[:5], scale=0.3, initial_state=inputs[5])
        assert torch.equal(o[:, :cut], later[:, :cut])


def test_strides_do_not_matter() -> None:
    K, V, T = 12, 20, 70
    inputs = make("random", [T], batch=2)
    do, dstate = upstream(inputs)
    want = run(recurrence, inputs, do, dstate)
    whole = torch.cat([*inputs[:4], inputs[4][..., None]], -1)
    slices = [*whole.split([K, K, V, K, 1], -1)]
    slices[4] = slices[4][..., 0]
    assert_same(run(chunked, [*slices, inputs[5]], do, dstate), want)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    turned_do = do.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert_same(run(chunked, turned, turned_do, dstate.mT.contiguous().mT), want)
    flat, flat_state = do[:, :1, :1].expand_as(do), dstate[:, :, :, :1].expand_as(dstate)
    assert_same(run(chunked, inputs, flat, flat_state), run(recurrence, inputs, flat.clone(), flat_state.clone()))


@pytest.mark.parametrize(("K", "V"), [(60, 100), (24, 40)])
def test_memory_beyond_the_inputs_is_not_read(K: int, V: int) -> None:
    def inside(x: Tensor) -> Tensor:
        buffer = torch.full((x.numel() + 4096,), 1e30, dtype=x.dtype)
        buffer[: x.numel()] = x.flatten()
        return buffer[: x.numel()].view_as(x)

    inputs = make("random", [37], K=K, V=V)
    do, dstate = upstream(inputs)
    got = run(chunked, [inside(x) for x in inputs], inside(do), inside(dstate))
    assert_same(got, run(recurrence, inputs, do, dstate))


@pytest.mark.parametrize("gates_by", ["key head", "value head"])
def test_value_heads_share_their_key_head(gates_by: str) -> None:
    """Two key heads serve six value heads in the order h0, h0, h0, h1, h1, h1."""
    q, k, _, g, beta, _ = make("random", [40])
    v, state = torch.randn(1, 40, 6, 20, dtype=f64), torch.randn(1, 6, 12, 20, dtype=f64)
    if gates_by == "value head":
        g, beta = -torch.rand(1, 40, 6, 12, dtype=f64), torch.rand(1, 40, 6, dtype=f64)
    do, dstate = torch.randn_like(v), torch.randn_like(state)

    def repeated(x: Tensor, dim: int) -> Tensor:
        return x if x.shape[dim] == 6 else torch.stack([x.select(dim, h // 3) for h in range(6)], dim)

    def grouped(*x: Tensor, scale: float, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        return kda(*x, scale=scale, initial_state=initial_state, output_final_state=True)

    inputs = [q, k, v, g, beta, state]
    want = run(recurrence, [repeated(x, 1 if x is state else 2) for x in inputs], do, dstate)
    for i, x in enumerate(inputs):
        if x.shape != want[2 + i].shape:
            want[2 + i] = want[2 + i].unflatten(2, (2, 3)).sum(3)
    assert_same(run(grouped, inputs, do, dstate), want)
    o, final = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state, scale=0.3)
    assert error(o, want[0][:, 0]) < 1e-13
    assert final.shape == state.shape


# Types


def test_bfloat16_in_and_out_with_float32_inside() -> None:
    inputs = [x.to(bf16) for x in make("random", [70])]
    do, dstate = (x.to(bf16) for x in upstream(inputs))
    wide = run(recurrence, [x.double() for x in inputs], do.double(), dstate.double())
    leaves = [x.requires_grad_() for x in inputs]
    o, state = kda(*leaves[:5], scale=0.3, initial_state=leaves[5], output_final_state=True)
    assert (o.dtype, state.dtype) == (bf16, f32)
    torch.autograd.backward([o, state], [do, dstate.float()])
    assert all(x.grad.dtype == bf16 for x in leaves)
    assert_same([o.detach(), state.detach(), *(x.grad for x in leaves)], wide, 4e-3)
    assert error(state, wide[1]) < 1e-5


def test_autocast_changes_nothing_inside() -> None:
    inputs = [x.float().requires_grad_() for x in make("random", [40])]
    gate = BoundedGate(torch.zeros(2), torch.zeros(2, 12))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o, state = kda(*inputs[:5], gate=gate, normalize_qk=True, beta_logits=True, output_final_state=True)
            (grad,) = torch.autograd.grad(o.sum(), inputs[1])
            step, _ = kda_step(*(x[:, 0] for x in inputs[:5]), inputs[5], gate=gate)
        results.append([o, state, grad, step])
    assert all(a.dtype == f32 and torch.equal(a, b) for a, b in zip(*results))


# An implementation from outside


def test_agrees_with_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    inputs = [x.float() for x in make("random", [130], K=16, V=24, batch=2)]
    inputs[3] = -5 * torch.rand_like(inputs[3])
    do, dstate = upstream(inputs)

    def ours(*x: Tensor, scale: float, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        return kda(*x, initial_state=initial_state, normalize_qk=True, output_final_state=True)

    def theirs(*x: Tensor, scale: float, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        return modeling.chunk_kimi_delta_attention(
            *x, initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    assert_same(run(ours, inputs, do, dstate), run(theirs, inputs, do, dstate), 2e-5)


# Under a compiler


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at tensors between its graphs
def test_a_compiler_leaves_the_chunks_alone() -> None:
    """Their steps would be unrolled for every length."""
    graphs = []

    def looking(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph

    def ours(*x: Tensor, scale: float, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        options = {"normalize_qk": True, "output_final_state": True, "backend": "chunked"}
        return kda(*x, initial_state=initial_state, cu_seqlens=[0, x[0].shape[1]], **options)

    torch.compiler.reset()
    compiled = torch.compile(ours, backend=looking)
    for T in (37, 41, 5):
        inputs = make("random", [T])
        do, dstate = upstream(inputs)
        assert_same(run(compiled, inputs, do, dstate), run(ours, inputs, do, dstate), 1e-12)
    assert any("rsqrt" in code for code in graphs)  # the norm is compiled
    assert not any("bmm" in code for code in graphs)
    torch.compiler.reset()


# Mistakes of callers


def test_wrong_shapes_are_named_in_one_line() -> None:
    q, k, v, g, beta, state = make("random", [6], batch=2)
    gate = BoundedGate(torch.zeros(3), torch.zeros(3, 12))
    calls = {
        "q: expected \\[B, T, H, K\\]": lambda: kda(q[0], k, v, g, beta),
        "k: expected the shape of q": lambda: kda(q, k[..., :5], v, g, beta),
        "v: expected .*, got \\[2, 3, 2, 20\\]": lambda: kda(q, k, v[:, :3], g, beta),
        "v: expected \\[2, 6, n\\*2, V\\]": lambda: kda(q, k, v[:, :, :1], g, beta),
        "g: expected": lambda: kda(q, k, v, g[..., :1], beta),
        "beta: expected": lambda: kda(q, k, v, g, beta[..., :1]),
        "initial_state: expected \\[2, 2, 12, 20\\]": lambda: kda(q, k, v, g, beta, initial_state=state.mT),
        "state: expected": lambda: kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state[:1]),
        "cu_seqlens: expected batch size 1": lambda: kda(q, k, v, g, beta, cu_seqlens=[0, 6]),
        "gate: expected": lambda: kda(q, k, v, g, beta, gate=gate),
        "dt_bias: expected": lambda: BoundedGate(torch.zeros(2), torch.zeros(24)),
        "A_log: expected": lambda: SoftplusGate(torch.zeros(1, 1, 2, 1), torch.zeros(2, 12)),
        "g_min: expected": lambda: BoundedGate(torch.zeros(2), torch.zeros(2, 12), 5.0),
        "q: expected a head": lambda: kda(q[..., :0], k[..., :0], v, g[..., :0], beta),
        "q: expected a head and": lambda: kda(*(x[:, :, :0] for x in (q, k, v, g, beta))),
        "scale: expected a number": lambda: kda(q, k, v, g, beta, scale=torch.tensor(0.5, requires_grad=True)),
    }
    for text, call in calls.items():
        with pytest.raises(ShapeError, match=f"^{text}.*; ") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_tensors_of_another_kind_or_device_are_named() -> None:
    """Kernels would read addresses of another device, and round what goes into whole numbers."""
    *inputs, state = make("random", [6])
    inputs = dict(zip(("q", "k", "v", "g", "beta"), inputs))
    A_log, dt_bias = torch.zeros(2), torch.zeros(2, 12)
    for name in inputs:
        for change in (torch.Tensor.long, lambda x: x.to(torch.complex64)):
            with pytest.raises(ShapeError, match=f"^{name}: expected real numbers in floating point, got torch"):
                kda(**inputs | {name: change(inputs[name])})
    for name in ("k", "v", "g", "beta"):
        with pytest.raises(ShapeError, match=f"^{name}: expected a tensor on cpu, got meta; move"):
            kda(**inputs | {name: inputs[name].to("meta")})
    with pytest.raises(ShapeError, match=r"^initial_state: expected a tensor on cpu, got meta"):
        kda(**inputs, initial_state=state.to("meta"))
    with pytest.raises(ShapeError, match=r"^state: expected a tensor on cpu, got meta"):
        kda_step(*(x[:, 0] for x in inputs.values()), state.to("meta"))
    for gate in (BoundedGate(A_log.to("meta"), dt_bias), SoftplusGate(A_log, dt_bias.to("meta"))):
        with pytest.raises(ShapeError, match=r"^gate.*: expected a tensor on cpu, got meta"):
            kda(**inputs, gate=gate)


@pytest.mark.parametrize("cu", [[0, 2.5, 6], [0.0, 6.0], [[0, 6]], "06", 6, [0, None, 6], torch.tensor([0, 6 + 0j])])
def test_boundaries_are_whole_numbers(cu: object) -> None:
    with pytest.raises(ShapeError, match=r"^cu_seqlens: expected integers, got .*; give the"):
        kda(*make("random", [6])[:5], cu_seqlens=cu)


def test_boundaries_may_be_any_integers() -> None:
    inputs = make("random", [2, 4])[:5]
    want = kda(*inputs, cu_seqlens=[0, 2, 6])[0]
    of_numpy = torch.tensor([0, 2, 6]).numpy()
    for cu in (torch.tensor([0, 2, 6], dtype=torch.int32), of_numpy, list(torch.tensor([0, 2, 6])), (0, 2, 6)):
        assert torch.equal(kda(*inputs, cu_seqlens=cu)[0], want)


def test_unknown_backend_names_the_nearest() -> None:
    inputs = make("random", [6])[:5]
    with pytest.raises(BackendError, match="chunked"):
        kda(*inputs, backend="chunky")

"""The short convolution: the fast path against the reference, the reference against torch's own convolution."""

from itertools import pairwise

import pytest
import torch
from conv_cases import CASES, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.core.errors import BackendError, ShapeError
from perilune.ops import blocks, short_conv

DOUBLE = {"dtype": torch.float64}


def outputs_and_gradients(x: Tensor, weight: Tensor, state: Tensor | None, **options: object) -> list[Tensor]:
    """y, the final state, and the gradients of a loss in which both weigh in at random, the same in every call."""
    y, final = short_conv(x, weight, initial_state=state, output_final_state=True, **options)
    assert final is not None
    generator = torch.Generator().manual_seed(1)
    dy, dfinal = (torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (y, final))
    wanted = [x, weight] if state is None else [x, weight, state]
    loss = (y * dy).sum() + (final * dfinal).sum()
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [y.detach(), final.detach(), *gradients]


def assert_equal_to(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_the_reference_is_torchs_depthwise_convolution() -> None:
    x, weight, _ = inputs(2, 11, 5, 4)
    y, _ = short_conv(x, weight, activation=None, backend="reference")
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=5).transpose(1, 2)
    assert_equal_to([y], [expected])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_the_last_tap_meets_the_current_row(backend: str) -> None:
    x = torch.tensor([1.0, 10, 100, 1000, 0], **DOUBLE).view(1, 5, 1)
    y, state = short_conv(
        x, torch.tensor([[1.0, 2, 3, 4]], **DOUBLE), output_final_state=True, activation=None, backend=backend
    )
    assert y.flatten().tolist() == [4, 43, 432, 4321, 3210]
    assert state is not None
    assert state.flatten().tolist() == [100, 1000, 0]


@pytest.mark.parametrize("block", [7, 40, 2**18], ids=lambda block: f"block{block}")
@pytest.mark.parametrize("with_state", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("case", CASES)
def test_fast_equals_reference(
    monkeypatch: pytest.MonkeyPatch, case: str, activation: str | None, with_state: bool, block: int
) -> None:
    monkeypatch.setattr(blocks, "CPU_BLOCK", block)  # so that blocks end in every place of a document
    B, T, D, W, cu = CASES[case]
    x, weight, state = inputs(B, T, D, W, B if cu is None else len(cu) - 1)
    options = {"cu_seqlens": cu, "activation": activation}
    got, expected = (
        outputs_and_gradients(x, weight, state if with_state else None, backend=backend, **options)
        for backend in ("chunked", "reference")
    )
    assert_equal_to(got, expected)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_packed_equals_separate(backend: str) -> None:
    cu = [0, 5, 5, 6, 40, 42]
    x, weight, state = inputs(1, 42, 3, 4, len(cu) - 1)
    y, final = short_conv(
        x, weight, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(cu), backend=backend
    )
    dy = torch.randn_like(y)
    packed = torch.autograd.grad(y, [x, weight, state], dy)
    ys, finals, sums = [], [], [torch.zeros_like(t) for t in (x, weight, state)]
    for n, (a, b) in enumerate(pairwise(cu)):
        yn, fn = short_conv(x[:, a:b], weight, initial_state=state[n : n + 1], output_final_state=True, backend=backend)
        ys.append(yn)
        finals.append(fn)
        gradients = torch.autograd.grad(yn, [x, weight, state], dy[:, a:b], allow_unused=True, materialize_grads=True)
        sums = [s + g for s, g in zip(sums, gradients)]
    assert_equal_to([y, final, *packed], [torch.cat(ys, 1), torch.cat(finals), *sums])


def test_nothing_leaks_from_one_document_into_another() -> None:
    weight = torch.randn(4, 4)
    clean = torch.randn(1, 30, 4)
    spoilt = clean.clone()
    spoilt[:, :11] = torch.nan
    cu = [0, 11, 13, 30]
    results = []
    for x in (clean.requires_grad_(), spoilt.requires_grad_()):
        y, final = short_conv(x, weight, output_final_state=True, cu_seqlens=cu)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        results.append((y[:, 11:], final[1:], dx[:, 11:]))
    for a, b in zip(*results):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_empty_documents_hand_their_state_through(backend: str) -> None:
    cu = [0, 0, 5, 5, 12, 12]
    x, weight, state = inputs(1, 12, 3, 4, 5)
    _, final = short_conv(x, weight, initial_state=state, output_final_state=True, cu_seqlens=cu, backend=backend)
    empty = [0, 2, 4]
    assert torch.equal(final[empty], state[empty])
    dfinal = torch.randn_like(final)
    (dstate,) = torch.autograd.grad(final, state, dfinal)
    assert torch.equal(dstate[empty], dfinal[empty])
    assert dstate[[1, 3]].eq(0).all()  # documents longer than the reach have forgotten it


@pytest.mark.parametrize("cu", [None, [0, 2]])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_short_document_keeps_the_end_of_its_old_state(backend: str, cu: list[int] | None) -> None:
    state = torch.tensor([1.0, 2, 3], **DOUBLE).view(1, 3, 1)
    x = torch.tensor([4.0, 5], **DOUBLE).view(1, 2, 1)
    _, final = short_conv(
        x,
        torch.ones(1, 4, **DOUBLE),
        initial_state=state,
        output_final_state=True,
        cu_seqlens=cu,
        backend=backend,
    )
    assert final is not None
    assert final.flatten().tolist() == [3, 4, 5]


def test_the_final_state_does_not_hold_on_to_the_rows() -> None:
    for x, cu in (
        (torch.randn(2, 500, 3), None),
        (torch.randn(1, 500, 3), [0, 200, 500]),
        (torch.randn(2, 2, 3), None),
    ):
        _, final = short_conv(x, torch.randn(3, 4), output_final_state=True, cu_seqlens=cu)
        assert final is not None
        assert final.untyped_storage().nbytes() == final.numel() * 4


def test_the_state_gets_its_gradient_when_no_final_state_is_asked_for() -> None:
    x, weight, state = inputs(2, 6, 3, 4)
    y, final = short_conv(x, weight, initial_state=state, activation=None)
    assert final is None
    (dstate,) = torch.autograd.grad(y.sum(), state)
    # State row j is read by taps 0..j: at time t by tap j - t.
    expected = weight.cumsum(1)[:, :3].T.expand(2, 3, 3)
    assert_equal_to([dstate], [expected])


def test_a_loss_on_the_final_state_alone_reaches_the_rows_it_holds() -> None:
    x, weight, _ = inputs(2, 6, 3, 4)
    _, final = short_conv(x, weight, output_final_state=True)
    dx, dweight = torch.autograd.grad(final.sum(), [x, weight], allow_unused=True)
    assert dweight is None
    assert dx[:, :3].eq(0).all()
    assert dx[:, 3:].eq(1).all()


@pytest.mark.parametrize("cu", [None, [0, 4, 5, 17]])
def test_strides_of_input_and_gradient_do_not_matter(cu: list[int] | None) -> None:
    B = 2 if cu is None else 1
    wide = torch.randn(B, 17, 15, **DOUBLE)
    weight = torch.randn(4, 5, **DOUBLE).T
    state = torch.randn(5, 3, B if cu is None else 3, **DOUBLE).permute(2, 1, 0)
    dy = torch.randn(B, 5, 17, **DOUBLE).transpose(1, 2)
    transposed = torch.randn(5, 17, B, **DOUBLE).permute(2, 1, 0)
    for x in (wide[..., 5:10], wide[..., ::3], transposed):
        for gradient in (dy, torch.randn(5, **DOUBLE).expand(B, 17, 5), torch.ones((), **DOUBLE).expand(B, 17, 5)):
            results = []
            for layout in (Tensor.detach, Tensor.contiguous):
                leaves = [layout(t).detach().requires_grad_() for t in (x, weight, state)]
                y, _ = short_conv(leaves[0], leaves[1], initial_state=leaves[2], cu_seqlens=cu)
                results.append([y, *torch.autograd.grad(y, leaves, layout(gradient))])
            assert_equal_to(*results)


def test_the_released_shape_of_the_weight() -> None:
    x, weight, state = inputs(2, 9, 5, 4)
    released = weight.detach().unsqueeze(1).requires_grad_()
    plain, other = (outputs_and_gradients(x, w, state) for w in (weight, released))
    assert other[3].shape == (5, 1, 4)
    other[3] = other[3].squeeze(1)
    assert_equal_to(other, plain, 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(T=st.integers(0, 20), W=st.integers(1, 5), cuts=st.lists(st.integers(0, 20), max_size=4), packed=st.booleans())
def test_splitting_and_carrying_the_state_changes_nothing(T: int, W: int, cuts: list[int], packed: bool) -> None:
    x, weight, state = inputs(1, T, 3, W)
    whole = outputs_and_gradients(x, weight, state)
    ys, carried = [], state
    for a, b in pairwise([0, *sorted(min(c, T) for c in cuts), T]):
        y, carried = short_conv(
            x[:, a:b],
            weight,
            initial_state=carried,
            output_final_state=True,
            cu_seqlens=[0, b - a] if packed else None,
        )
        ys.append(y)
    assert_equal_to([torch.cat(ys, 1), carried], whole[:2])


def test_no_gradient_comes_from_the_future() -> None:
    x, weight, state = inputs(2, 20, 3, 4)
    y, _ = short_conv(x, weight, initial_state=state)
    (dx,) = torch.autograd.grad(y[:, 9].sum(), x)
    assert dx[:, 10:].eq(0).all()
    assert dx[:, :6].eq(0).all()
    assert dx[:, 6:10].ne(0).all()


def test_sequences_decoded_together_are_those_decoded_alone() -> None:
    weight, pool = torch.randn(6, 4), torch.randn(7, 3, 6)
    tokens = torch.randn(10, 3, 1, 6)
    slots = [2, 0, 5]
    together = pool.clone()
    for x in tokens:
        y, together[slots] = short_conv(x, weight, initial_state=together[slots], output_final_state=True)
    for i, slot in enumerate(slots):
        state = pool[slot : slot + 1]
        for x in tokens:
            alone, state = short_conv(x[i : i + 1], weight, initial_state=state, output_final_state=True)
        assert torch.equal(alone[0], y[i])
        assert torch.equal(state[0], together[slot])
    untouched = [1, 3, 4, 6]
    assert torch.equal(together[untouched], pool[untouched])


@pytest.mark.parametrize("T", [2, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulates_in_float32_and_rounds_once(dtype: torch.dtype, T: int) -> None:
    x, weight, state = (t.detach() for t in inputs(2, T, 8, 4, dtype=torch.float32))
    x, state = x.to(dtype).requires_grad_(), state.to(dtype).requires_grad_()
    got = outputs_and_gradients(x, weight.requires_grad_(), state)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, state)]
    y, _ = short_conv(*exact[:2], initial_state=exact[2], activation="silu")
    assert [t.dtype for t in got] == [dtype, dtype, dtype, torch.float32, dtype]
    rounding = torch.finfo(dtype).eps / 2 * y.abs()
    float32 = 8 * torch.finfo(torch.float32).eps * (4 * exact[0].abs().max() * exact[1].abs().max())
    assert ((got[0].double() - y).abs() <= rounding + float32).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_in_low_precision_are_rounded_once(dtype: torch.dtype) -> None:
    cu = [0, 3, 3, 200, 201, 300]
    x, weight, state = (t.detach() for t in inputs(1, 300, 8, 4, N=5, dtype=torch.float32))
    dy = torch.randn(1, 300, 8).to(dtype)
    leaves = [x.to(dtype).requires_grad_(), weight.requires_grad_(), state.to(dtype).requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    got, expected = (
        torch.autograd.grad(
            short_conv(t[0], t[1], initial_state=t[2], cu_seqlens=cu, backend=backend)[0], t, dy.to(t[0].dtype)
        )
        for t, backend in ((leaves, "chunked"), (exact, "reference"))
    )
    for name, g, e, leaf in zip(("x", "weight", "state"), got, expected, leaves):
        assert g.dtype == leaf.dtype
        bound = torch.finfo(g.dtype).eps / 2 * e.abs() + 64 * torch.finfo(torch.float32).eps * e.abs().max()
        assert ((g.double() - e).abs() <= bound).all(), name


@pytest.mark.parametrize("T", [1, 50])
def test_inference_mode_changes_nothing(T: int) -> None:
    x, weight, state = inputs(2, T, 3, 4)
    expected = [t.detach() for t in short_conv(x, weight, initial_state=state, output_final_state=True)]
    with torch.inference_mode():
        got = list(short_conv(x, weight, initial_state=state, output_final_state=True))
    assert_equal_to(got, expected, 0)


def test_the_meta_device_gives_shapes() -> None:
    x, weight = torch.empty(1, 9, 5, device="meta", requires_grad=True), torch.empty(5, 4, device="meta")
    for cu in (None, [0, 4, 9]):
        y, final = short_conv(x, weight, output_final_state=True, cu_seqlens=cu)
        assert (y.shape, y.device.type) == (x.shape, "meta")
        assert final is not None
        assert final.shape == (1 if cu is None else 2, 3, 5)
        y.sum().backward()


def test_the_graph_keeps_the_inputs_and_nothing_else() -> None:
    x, weight, state = inputs(1, 64, 16, 4, dtype=torch.float32)
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y, _ = short_conv(x, weight, initial_state=state, cu_seqlens=[0, 64])
    assert kept == {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (x, weight, state)}
    y.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at tensors between its graphs
def test_a_compiler_leaves_the_rows_alone() -> None:
    """What it compiles is what stands around, whatever the length and the documents."""
    graphs: list[str] = []

    def looking(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(module.code)
        return module

    def layer(x: Tensor, weight: Tensor, cu: list[int] | None) -> Tensor:
        return short_conv(2 * x, weight, cu_seqlens=cu)[0].tanh()

    torch.compiler.reset()
    compiled = torch.compile(layer, backend=looking, dynamic=True)
    for T, cu in ((50, [0, 5, 50]), (61, [0, 9, 61]), (62, [0, 2, 62]), (80, None)):
        x, weight, _ = inputs(1, T, 8, 4)
        results = []
        for call in (layer, compiled):
            y = call(x, weight, cu)
            results.append([y, *torch.autograd.grad(y.sum(), [x, weight])])
        assert_equal_to(*results, 0)
    assert any("tanh" in code for code in graphs)
    assert not any("addcmul" in code for code in graphs)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("x: expected a floating tensor", {"x": torch.zeros(5, 3)}),
        ("x: expected a floating tensor", {"x": torch.zeros(1, 5, 3, dtype=torch.long)}),
        (r"weight: expected \[3, W\]", {"weight": torch.zeros(4, 3)}),
        (r"weight: expected \[3, W\]", {"weight": torch.zeros(3, 2, 4)}),
        (r"weight: expected \[3, W\]", {"weight": torch.zeros(3, 0)}),
        ("activation: expected 'silu' or None, got 'gelu'", {"activation": "gelu"}),
        (r"initial_state: expected \[1, 3, 3\]", {"initial_state": torch.zeros(1, 4, 3)}),
        (r"initial_state: expected \[2, 3, 3\]", {"cu_seqlens": [0, 2, 5], "initial_state": torch.zeros(1, 3, 3)}),
        ("cu_seqlens: expected batch size 1", {"x": torch.zeros(2, 5, 3), "cu_seqlens": [0, 5]}),
        ("cu_seqlens: expected last entry 5", {"cu_seqlens": [0, 4]}),
    ],
)
def test_what_does_not_fit_is_refused(message: str, changes: dict[str, object]) -> None:
    arguments = {"x": torch.zeros(1, 5, 3), "weight": torch.zeros(3, 4), **changes}
    with pytest.raises(ShapeError, match=message):
        short_conv(**arguments)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendError, match="backend: expected one of this operation"):
        short_conv(torch.zeros(1, 5, 3), torch.zeros(3, 4), backend="chunky")

"""KDA's kernels against the float64 recurrence.

What needs them runs on a GPU, and, in a process of its own whose Triton interprets, on the CPU: there in small sizes,
mostly on float32, for the interpreter cuts bfloat16 off where a GPU rounds, and multiplies float32 in full where a GPU
may not.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch
from kda_cases import (
    CASES,
    DEVICE,
    FORMS,
    GPU,
    INTERPRETED,
    Call,
    Form,
    all_same_bits,
    bf16,
    error,
    f16,
    f32,
    make,
    same_bits,
    tolerance,
)  # fmt: skip
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from perilune.core.errors import BackendError
from perilune.ops.kda import BoundedGate, kda, kda_step
from perilune.ops.kda.kernels import chunks

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the recurrence's products, with fixed orders of sums
pytestmark = [  # the interpreter is numpy: run-time loop bounds are arrays, and exp2 overflows where sigmoids end
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]
ALL_CASES = [(gate, case) for gate, cases in CASES.items() for case in cases]
FEW = FORMS[:1] if INTERPRETED else FORMS  # where the interpreter has nothing to add in 16 bits
FEW_CASES = {  # of the interpreter
    bf16: [("bounded", "random"), ("bounded", "floor"), ("softplus", "fast"), ("softplus", "steep")],
    f32: [
        *[("bounded", case) for case in CASES["bounded"] if case not in ("fast", "mixed", "halves", "ceiling", "slow")],
        ("deep", "floor"),
        *[("softplus", case) for case in ("random", "fast", "steep", "flat")],
        *[("none", case) for case in ("jumps", "cliffs")],
    ],
}
LONG = [33] if INTERPRETED else [300, 130]  # more than a chunk
H = 1 if INTERPRETED else 4


def needs_kernels(test: Callable) -> Callable:
    skip = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernels_interpreted")
    return pytest.mark.gpu(skip(test))


def on_each(forms: Iterable[Form], gate: str = "bounded") -> Callable:
    """A test of the kernels, in these forms as far as they serve the gate."""
    each = pytest.mark.parametrize("form", [form for form in forms if form.serves(gate)], ids=str)
    return lambda test: needs_kernels(each(test))


# Numbers


def hard_cases() -> list:
    """Of the interpreter in 16 bits, a few."""
    return [
        pytest.param(form, gate, case, id=f"{form}-{gate}-{case}")
        for form, (gate, case) in product(FORMS, ALL_CASES)
        if form.serves(gate)
        if not INTERPRETED or (gate, case) in FEW_CASES[form.dtype]
    ]


@needs_kernels
@pytest.mark.parametrize(("form", "gate", "case"), hard_cases())
def test_hard_cases(form: Form, gate: str, case: str) -> None:
    make(form, LONG, case, gate, H=H).check(form)


@on_each(FEW)
@pytest.mark.parametrize(("normalize_qk", "beta_logits"), [(False, True), (True, False), (False, False)])
def test_transforms_are_optional(form: Form, normalize_qk: bool, beta_logits: bool) -> None:
    make(form, [17] if INTERPRETED else LONG, H=H, normalize_qk=normalize_qk, beta_logits=beta_logits, scale=0.3).check(
        form
    )


@on_each(FEW, "none")
def test_no_transforms_at_all(form: Form) -> None:
    make(form, LONG, gate="none", H=H, normalize_qk=False, beta_logits=False, scale=3.0).check(form)


@on_each(FEW)
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 63, 64, 65])
def test_every_length(form: Form, T: int) -> None:
    make(form, [T], "floor", H=H, batch=2 if T < 32 or GPU else 1, packed=False).check(form)


@needs_kernels
@pytest.mark.parametrize("dtype", [f16, bf16, f32] if GPU else [f32])
@pytest.mark.parametrize(("K", "V"), [(16, 64), (128, 16), (20, 80)] + [(64, 512), (128, 256), (1, 3), (96, 100)] * GPU)
def test_widths(K: int, V: int, dtype: torch.dtype) -> None:
    """Kernels that go through K and V in slices, and widths that are none of theirs."""
    form = Form("triton", dtype, K, V)
    make(form, [20] if INTERPRETED else LONG, H=H).check(form)


@on_each(FEW, "none")
def test_decay_of_any_size(form: Form) -> None:
    """Infinite decay forgets everything before it; none keeps everything."""
    call = make(form, LONG, "cliffs", "none", H=H)
    g = call.inputs["g"].clone()
    g[:, 7] = -torch.inf
    g[:, 9] = 0
    call.do[:, :7] = 0
    assert not call.changed(g=g).check(form)["dinitial"][0].any()


@on_each(FEW, "none")
@pytest.mark.parametrize("T", [64, 130])
def test_one_key_and_full_writes_replace_the_value(form: Form, T: int) -> None:
    """Every write replaces what lies under the key: o_t = scale (q_t . k) v_t, S = k v_T^T."""
    call = make(form, [T], gate="none", beta_logits=False)
    x = call.inputs
    k = x["k"][:, :1].expand_as(x["k"])
    call = call.changed(k=k, g=0 * x["g"], beta=1 + 0 * x["beta"], initial=0 * x["initial"])
    o, state = call.forward(form.backend)
    q, k = (normalize(x.double(), dim=-1) for x in (x["q"], k))
    accurate = 1e-5 if form.dtype == f32 else 3 * tolerance("o", form, "same_key")
    assert error(o, form.K**-0.5 * (q * k).sum(-1, keepdim=True) * x["v"]) < accurate
    assert error(state[0, 0], torch.outer(k[0, 0, 0], x["v"][0, -1, 0].double())) < accurate


@on_each(FORMS)
def test_write_strength_is_not_rounded(form: Form) -> None:
    """sigmoid(0.5) is 0.622459352; in bfloat16 it would be 0.62109375, and 64 keys of 1/8 write it 64 times alike."""
    call = make(form, [1])
    x = {name: torch.zeros_like(x) for name, x in call.inputs.items()}
    _, state = call.changed(**x | {"k": x["k"] + 1, "v": x["v"] + 1, "beta": x["beta"] + 0.5}).forward(form.backend)
    key = form.K**-0.5  # exact for 16 and 64
    assert state.dtype == f32
    if key in (0.25, 0.125) and form.dtype == f32:  # what is written is a product's operand, in 16 bits if inputs are
        assert error(state, torch.full_like(state, 0.622459352 * key)) < 1e-6


@on_each(FEW)
def test_norm_adds_its_epsilon_to_the_sum_of_squares(form: Form) -> None:
    """A key of entries of 1e-4: S = v k / sqrt(K 1e-8 + 1e-6)."""
    call = make(form, [1], beta_logits=False)
    x = call.inputs
    ones = {name: torch.ones_like(x[name]) for name in ("v", "beta")}
    call = call.changed(k=torch.full_like(x["k"], 1e-4), initial=0 * x["initial"], **ones)
    got, entry = call.check(form)["state"], float(call.inputs["k"].flatten()[0])
    want = torch.full_like(got, entry / (form.K * entry**2 + 1e-6) ** 0.5)
    assert error(got, want) < tolerance("state", form)


@on_each(FEW)
def test_norm_of_zero_has_a_finite_gradient(form: Form) -> None:
    call = make(form, [20], H=H)
    zeros = {name: call.inputs[name].clone() for name in ("q", "k")}
    for x in zeros.values():
        x[:, 3:9] = 0
    call.changed(**zeros).check(form)


@on_each(FEW)
def test_inputs_of_several_dtypes(form: Form) -> None:
    """As layers give them: wide gates and strengths beside narrow rows, states as they were stored."""
    call = make(form, [20], H=H)
    x, other = call.inputs, bf16 if form.dtype == f32 else f32
    narrow = form._replace(dtype=bf16)
    for names in (("g", "beta"), ("v",), ("initial", "A_log", "dt_bias")):
        changed = {name: x[name].to(other if x[name].dtype == form.dtype else bf16) for name in names}
        backend = "triton" if names == ("v",) else form.backend  # Hopper's kernels take values in 16 bits
        got = call.changed(**changed).check(narrow._replace(backend=backend))
        assert got["o"].dtype == changed.get("v", x["v"]).dtype
        assert got["state"].dtype == f32


# Documents, heads


@on_each(FEW)
@pytest.mark.parametrize("lengths", [[0, 33, 0, 5, 1], [0, 0, 0], []])
def test_packed_documents(form: Form, lengths: list[int]) -> None:
    call = make(form, lengths, "slow", H=2)  # so that a leak would show
    got = call.check(form)
    for n, length in enumerate(lengths):
        if length == 0:
            assert same_bits(got["state"][n], call.inputs["initial"][n])
            assert same_bits(got["dinitial"][n], call.dstate[n])


@on_each(FEW)
def test_no_rows_at_all(form: Form) -> None:
    make(form, [5], batch=0, packed=False).check(form)


@on_each(FEW)
def test_a_document_does_not_see_the_others(form: Form) -> None:
    """Nor what is NaN in them."""
    lengths = [2, 9, 3] if INTERPRETED else [100, 130, 70]
    call = make(form, lengths, "slow", H=H)
    a, b = lengths[0], sum(lengths[:2])
    clean = call.run(form.backend)
    poisoned = {}
    for name, x in (call.inputs | {"do": call.do, "dstate": call.dstate}).items():
        poisoned[name] = x
        if name in ("initial", "dstate"):
            poisoned[name] = torch.where(torch.arange(3, device=DEVICE).view(3, 1, 1, 1) == 1, x, torch.nan)
        elif name not in ("A_log", "dt_bias"):
            poisoned[name] = x.clone()
            poisoned[name][:, :a] = poisoned[name][:, b:] = torch.nan
    do, dstate = poisoned.pop("do"), poisoned.pop("dstate")
    got = Call(poisoned, do, dstate, call.gate, options=call.options).run(form.backend)
    for name in got.keys() - {"dA_log", "ddt_bias"}:
        own = 1 if name in ("state", "dinitial") else (slice(None), slice(a, b))
        assert same_bits(got[name][own], clean[name][own]), name


@on_each(FEW)
def test_packed_is_separate_bit_for_bit(form: Form) -> None:
    call = make(form, [5, 40])
    got, alone = call.run(form.backend), call.part(5, 45, slice(1, 2)).run(form.backend)
    for name in alone.keys() - {"dA_log", "ddt_bias"}:
        own = slice(1, 2) if name in ("state", "dinitial") else (slice(None), slice(5, 45))
        assert same_bits(got[name][own], alone[name]), name


@on_each(FEW)
@pytest.mark.parametrize("gates_by", ["key head", "value head"])
def test_value_heads_share_their_key_head(form: Form, gates_by: str) -> None:
    few, many = (make(form, [5], "slow", H=heads) for heads in (2, 4))
    rows = ("q", "k") if gates_by == "value head" else ("q", "k", "g", "beta", "A_log", "dt_bias")
    many.changed(**{name: few.inputs[name] for name in rows}).check(form)


@on_each(FEW)
@pytest.mark.parametrize("lengths", [[1], [40, 0, 3]])
def test_heads_in_turns_give_the_same_bits(form: Form, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from perilune.ops.kda.kernels import launch

    call = make(form, lengths, H=3)
    monkeypatch.setattr(launch, "turns", lambda H, *_: [slice(0, H)])
    want = call.run(form.backend)
    monkeypatch.setattr(launch, "turns", lambda H, *_: [slice(0, 2), slice(2, H)])
    assert all_same_bits(call.run(form.backend), want)


@on_each(FEW)
def test_stretches_give_the_same_bits(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    from perilune.ops.kda.kernels import launch

    call = make(form, [70] if INTERPRETED else [300])
    want = call.run(form.backend)
    monkeypatch.setattr(launch, "kept", lambda *_: 1 << 31)
    monkeypatch.setattr(chunks, "LEAST", 1)
    assert all_same_bits(call.run(form.backend), want)


def test_stretches_hold_every_chunk_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, device = [640, 0, 63, 1000, 64], torch.device("cpu")
    edges = (0, *accumulate(lengths))
    monkeypatch.setattr(chunks, "LEAST", 1)
    whole = chunks._chunks(edges, 64, 1, 1, device, 1 << 31)
    assert len(whole.stretches) == 4
    for n, length in enumerate(lengths):
        found = []
        for part in whole.stretches:
            own = slice(*part.segments[n : n + 2].tolist())
            found += zip(part.starts[own].tolist(), part.lengths[own].tolist())
        assert found == [(edges[n] + i, min(64, length - i)) for i in range(0, length, 64)]
    assert all(part.number == part.segments[-1] for part in whole.stretches)
    monkeypatch.undo()
    assert not chunks._chunks(edges, 64, 1, 1, device, 0).parts  # small
    assert not chunks._chunks(edges, 64, 1, 1, device, 1 << 40).parts  # short
    assert not chunks._chunks((0, 4096), 64, 1, 1 << 20, device, 1 << 40).parts  # in segments already


def test_turns_are_for_large_calls_and_leave_processors_busy() -> None:
    chunk, processors = 64 * (3 * 128 + 2 * 64 + 2 * 128) * 2 + 2 * 128 * 128 * 2, 132
    for tokens, H, segments, number in ((8192, 96, 1, 2), (65536, 32, 4, 2), (8192, 16, 8, 1), (2048, 16, 1, 1)):
        parts = chunks.turns(H, tokens // 64 * H * chunk, segments * H * 2, processors)
        assert len(parts) == number
        assert [head for part in parts for head in range(H)[part]] == list(range(H))
    assert len(chunks.turns(64, 1 << 40, 1 << 20, processors)) == chunks.TURNS
    assert chunks.turns(0, 0, 0, 1) == [slice(0, 0)]
    assert len(chunks.turns(2, 1 << 40, 1 << 20, 1)) == 2


# Segments


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one chunk."""
    monkeypatch.setattr(chunks, "processors", lambda device: 1 << 20)
    monkeypatch.setattr(chunks, "segment_length", lambda *_: 1)


@on_each(FEW)
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("case", ["slow"] if INTERPRETED else CASES["bounded"])
def test_segments_are_not_part_of_the_mathematics(form: Form, case: str) -> None:
    lengths = [70, 0, 3] if INTERPRETED else [300, 0, 1, 1000, 64, 130]
    call = make(form, lengths, case, H=2)
    got = call.check(form)
    assert same_bits(got["state"][1], call.inputs["initial"][1])
    assert same_bits(got["dinitial"][1], call.dstate[1])


@on_each(FEW, "none")
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("case", ["cliffs"] if INTERPRETED else CASES["none"])
def test_segments_under_any_decay(form: Form, case: str) -> None:
    make(form, [70] if INTERPRETED else [300, 1000], case, "none", H=H, normalize_qk=False).check(form)


@pytest.mark.parametrize("lengths", [[0], [5000], [0, 700, 0, 64, 3000, 1], [1] * 40])
@pytest.mark.parametrize("programs", [1, 7, 200])
def test_segments_are_runs_of_the_chunks_of_one_sequence(lengths: list[int], programs: int) -> None:
    device = torch.device("cpu")
    edges = (0, *accumulate(lengths))
    for processors in (1, 13, 132, 1 << 20):
        table = chunks._chunks(edges, 64, programs, processors, device)
        starts, sizes, segments, sequences, firsts, lasts = (x.tolist() for x in table[1:7])
        assert firsts == sequences[:-1]
        assert lasts == [n - 1 for n in sequences[1:]]
        found = []
        for n, length in enumerate(lengths):
            own = segments[sequences[n] : sequences[n + 1] + 1]
            assert own == sorted(own)
            assert len(own) > 1
            rows = [(starts[c], sizes[c]) for c in range(own[0], own[-1])]
            assert rows == [(edges[n] + t, min(64, length - t)) for t in range(0, length, 64)]
            found += own[:-1]
        assert found == segments[:-1]
        assert table.split == (len(segments) > len(lengths) + 1)
        assert not table.split or table.segment_count * programs <= max(processors, programs * len(lengths))


# States


@on_each(FEW)
def test_a_split_sequence_is_the_whole(form: Form) -> None:
    """And the last token is a step of decoding."""
    T = 24 if INTERPRETED else 200
    whole = make(form, [T], "slow", H=H, packed=False)
    want = whole.forward("reference", {name: x.double() for name, x in whole.inputs.items()})
    state, outputs = whole.inputs["initial"], []
    for start, stop in ((0, 7), (7, T // 2), (T // 2, T - 1)):
        o, state = whole.part(start, stop).changed(initial=state).forward(form.backend)
        outputs.append(o)
    x = whole.part(T - 1, T).inputs
    o, state = kda_step(
        *(x[name][:, 0] for name in ("q", "k", "v", "g", "beta")), state,
        gate=BoundedGate(x["A_log"], x["dt_bias"]), normalize_qk=True, beta_logits=True,
    )  # fmt: skip
    assert error(torch.cat([*outputs, o[:, None]], 1), want[0]) < tolerance("o", form)
    assert error(state, want[1]) < tolerance("state", form)


@on_each(FEW)
def test_states_may_be_left_out(form: Form) -> None:
    call = make(form, [20, 3], H=H)
    call = call.changed(initial=0 * call.inputs["initial"])
    x = call.inputs
    o, state = kda(
        *(x[name] for name in ("q", "k", "v", "g", "beta")), gate=BoundedGate(x["A_log"], x["dt_bias"]),
        backend=form.backend, **call.options,
    )  # fmt: skip
    assert state is None
    assert same_bits(o, call.forward(form.backend)[0])


# Gradients


@on_each(FEW)
def test_either_output_alone_can_carry_the_loss(form: Form) -> None:
    call = make(form, LONG, "slow", H=H)
    for do, dstate in ((call.do, None), (None, call.dstate)):
        got = Call(call.inputs, do, dstate, call.gate, options=call.options).check(form)
    assert not got["dq"].any()  # q is read by o alone
    assert all(got[name].any() for name in got if name != "dq")


@on_each(FEW)
@pytest.mark.parametrize("wanted", [["beta"], ["initial"], ["A_log", "v"]])
def test_gradients_of_some_inputs_alone(form: Form, wanted: list[str]) -> None:
    call = make(form, [5])
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in call.inputs.items()}
    o, state = call.forward(form.backend, leaves)
    torch.autograd.backward([o, state], [call.do, call.dstate])
    want = call.run(form.backend)
    for name, x in leaves.items():
        assert x.grad is None if name not in wanted else same_bits(x.grad, want[f"d{name}"])


@on_each(FEW)
def test_no_gradient_from_the_future_and_no_effect_on_the_past(form: Form) -> None:
    T = 40 if INTERPRETED else 200
    call, other = make(form, [T], H=H), make(form, [T], "fast", H=H)
    o, _ = call.forward(form.backend)
    for cut in (1, 17, 38) if INTERPRETED else (1, 17, 64, 100, 190):
        later = {name: x.clone() for name, x in call.inputs.items()}
        for name in ("q", "k", "v", "g", "beta"):
            later[name][:, cut:] = other.inputs[name][:, cut:]
        assert same_bits(call.forward(form.backend, later)[0][:, :cut], o[:, :cut])
    do = call.do.clone()
    do[:, 17:] = 0
    got = Call(call.inputs, do, None, call.gate, options=call.options).run(form.backend)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, 17:].any()
        assert got[name][:, :17].any()


@on_each(FEW)
def test_strides_do_not_matter(form: Form) -> None:
    """Slices of one projection that start anywhere, gradients turned or expanded; other numbers lie in between."""
    call = make(form, [20], H=H)
    want = call.run(form.backend)
    x, tokens = call.inputs, ("q", "k", "v", "g", "beta")
    sizes = [x[name][0, 0].numel() for name in tokens]
    row = torch.full((1, 21, sum(sizes) + 18), 1e30, dtype=form.dtype, device=DEVICE).clamp(max=3e4)
    views, at = {}, 3
    for name, size in zip(tokens, sizes):
        views[name] = row[:, :20, at : at + size].view(x[name].shape)
        views[name].copy_(x[name])
        at += size + 3
    initial = torch.full((x["initial"].numel() + 1,), 1e30, device=DEVICE)[1:].view(x["initial"].shape)
    views["initial"] = initial.copy_(x["initial"])
    for name in ("A_log", "dt_bias"):
        views[name] = torch.stack([x[name], torch.full_like(x[name], 9.0)], -1)[..., 0]
    do = call.do.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    dstate = call.dstate.mT.contiguous().mT
    strided = Call(x | views, do, dstate, call.gate, options=call.options)
    assert all_same_bits(strided.run(form.backend), want)
    flat = Call(x, call.do[:, :1].expand_as(do), dstate[..., :1].expand_as(dstate), call.gate, options=call.options)
    dense = Call(x, flat.do.contiguous(), flat.dstate.contiguous(), call.gate, options=call.options)
    assert all_same_bits(flat.run(form.backend), dense.run(form.backend))


@on_each(FORMS)
def test_repeats_bit_for_bit(form: Form) -> None:
    call = make(form, [17] if INTERPRETED else [3000, 1000, 77], H=H)
    want = call.run(form.backend)
    for _ in range(1 if INTERPRETED else 10):
        assert all_same_bits(call.run(form.backend), want)
    with torch.no_grad():
        assert same_bits(call.forward(form.backend)[0], want["o"])


@on_each(FEW)
def test_checkpointing_changes_nothing(form: Form) -> None:
    call = make(form, [9], H=H)
    leaves = {name: x.detach().requires_grad_() for name, x in call.inputs.items()}

    def body(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return call.forward(form.backend, dict(zip(leaves, inputs)))

    outputs = checkpoint(body, *leaves.values(), use_reentrant=False)
    grads = torch.autograd.grad(outputs, list(leaves.values()), [call.do, call.dstate])
    want = call.run(form.backend)
    assert all(same_bits(grad, want[f"d{name}"]) for name, grad in zip(leaves, grads))


@on_each(FEW)
def test_autocast_changes_nothing(form: Form) -> None:
    call = make(form, [9], H=H)
    want = call.run(form.backend)
    with torch.autocast(DEVICE, bf16):
        assert all_same_bits(call.run(form.backend), want)


@on_each(FEW)
def test_differentiable_once(form: Form) -> None:
    call = make(form, [5])
    leaves = {name: x.detach().requires_grad_() for name, x in call.inputs.items()}
    for loss in (Tensor.sum, lambda o: o.square().sum()):
        o, _ = call.forward(form.backend, leaves)
        (dq,) = torch.autograd.grad(loss(o), leaves["q"], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dq.sum().backward()


# Refusals


@on_each(FEW)
def test_what_cannot_be_served_is_refused_by_name_and_passed_on_by_auto(form: Form) -> None:
    served, odd = make(form, [5]), make(form._replace(K=144), [5])
    wide = {name: x.double() for name, x in served.inputs.items()}
    with pytest.raises(BackendError, match=f"cannot run on '{form.backend}'.*float64"):
        served.forward(form.backend, wide)
    with pytest.raises(BackendError, match=f"cannot run on '{form.backend}'.*K is 144"):
        odd.forward(form.backend)
    assert same_bits(odd.forward("auto")[0], odd.forward("chunked")[0])
    assert same_bits(served.forward("auto", wide)[0], served.forward("chunked", wide)[0])
    if form is FEW[0]:
        assert same_bits(served.forward("auto")[0], served.forward(form.backend)[0])


@pytest.mark.skipif(GPU, reason="Gluon may serve it here")
def test_gluon_needs_hopper_and_a_bound() -> None:
    for gate in CASES:
        with pytest.raises(BackendError, match="kda cannot run on 'gluon'"):
            make(Form("gluon", bf16, 128, 128), [5], gate=gate).forward("gluon")


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernels run here")
def test_a_cpu_is_refused() -> None:
    with pytest.raises(BackendError, match="'triton': its kernels run on a GPU, and the tensors are on cpu"):
        make(Form("triton", bf16, 128, 128), [5]).forward("triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernels_interpreted() -> None:
    """All of the above on the CPU, in a process in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# A GPU's own


def on_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(pytest.mark.skipif(not GPU, reason="needs a GPU")(test))


WIDEST = [form for form in FORMS if (form.dtype, form.K, form.V) == (bf16, 128, 128)]


def errors_do_not_grow(form: Form, case: str, T: int, H: int) -> None:
    """Those of outputs forward, those of gradients backward; and none is too large over all T tokens."""
    call = make(form, [T], case, H=H)
    want = call.oracle("chunked")  # which is the recurrence, to the last digits
    got = call.check(form, want)

    def begin_and_end(name: str) -> tuple[float, float]:
        return tuple(error(got[name][:, rows], want[name][:, rows]) for rows in (slice(2000), slice(T - 2000, T)))

    begin, end = begin_and_end("o")
    assert end < 1.5 * begin
    for name in ("dk", "dv", "dg"):
        begin, end = begin_and_end(name)
        assert begin < 1.5 * end, name


@on_gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("case", ["fast", "mixed", "slow"])
def test_errors_do_not_grow_along_the_sequence(form: Form, case: str) -> None:
    errors_do_not_grow(form, case, 20_000, H=2)


@on_gpu
@pytest.mark.parametrize("form", WIDEST, ids=str)
@pytest.mark.parametrize("case", ["fast", "mixed", "slow"])
def test_errors_do_not_grow_over_a_million_tokens(form: Form, case: str) -> None:
    errors_do_not_grow(form, case, 1 << 20, H=1)


@on_gpu
@pytest.mark.parametrize("form", WIDEST, ids=str)
def test_on_another_device_than_the_current_one(form: Form) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = make(form, LONG, H=H)
    want = call.run(form.backend)
    there = {name: x.to("cuda:1") for name, x in call.inputs.items()}
    got = Call(there, call.do.to("cuda:1"), call.dstate.to("cuda:1"), call.gate, options=call.options).run(form.backend)
    assert torch.cuda.current_device() == 0
    assert all_same_bits({name: x.to("cuda:0") for name, x in got.items()}, want)


@on_gpu
@pytest.mark.parametrize("form", WIDEST, ids=str)
def test_compiled_is_eager(form: Form) -> None:
    call = make(form, LONG, H=H)
    want = call.run(form.backend)

    @torch.compile
    def twice(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        o, state = call.forward(form.backend, inputs)
        return 2 * o, 2 * state

    for _ in range(2):
        leaves = {name: x.detach().requires_grad_() for name, x in call.inputs.items()}
        outputs = twice(leaves)
        grads = torch.autograd.grad(outputs, list(leaves.values()), [call.do / 2, call.dstate / 2])
        assert same_bits(outputs[0], 2 * want["o"])
        assert same_bits(outputs[1], 2 * want["state"])
        assert all(same_bits(grad, want[f"d{name}"]) for name, grad in zip(leaves, grads))


FIRST_CALLS = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
from kda_cases import Form, make
form = Form(sys.argv[2], torch.bfloat16, 128, 128)
torch.zeros(1, device="cuda").item()
for lengths, H in (([1000], 4), ([77, 0, 1300], 3), ([4096], 16), ([5], 1)):
    call = make(form, lengths, H=H)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call.run(form.backend)
    torch.cuda.synchronize()
    print(time.perf_counter() - start)
"""


@on_gpu
@pytest.mark.parametrize("form", WIDEST, ids=str)
def test_a_first_call_compiles_in_seconds(form: Form, tmp_path: Path) -> None:
    """Fifteen at most, forward and backward, for each new shape."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", FIRST_CALLS, str(Path(__file__).parent), form.backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    seconds = [float(line) for line in done.stdout.split()]
    assert len(seconds) == 4
    assert max(seconds) < 15, seconds


@on_gpu
@pytest.mark.parametrize("form", [Form("triton", bf16, 16, 16), *WIDEST], ids=str)
@pytest.mark.parametrize(("N", "H"), [(66_000, 1), (2049, 32)])
def test_more_documents_than_a_grid_axis(form: Form, N: int, H: int) -> None:
    """Of one token each: a step of decoding, and the same as in two halves."""
    call = make(form, [1] * N, H=H)
    got = call.run(form.backend)
    for part in (slice(0, N // 2), slice(N // 2, N)):
        half = call.part(part.start, part.stop, part, [*range(part.stop - part.start + 1)]).run(form.backend)
        for name in half.keys() - {"dA_log", "ddt_bias"}:
            own = part if name in ("state", "dinitial") else (slice(None), part)
            assert same_bits(got[name][own], half[name]), name
    few = torch.tensor([0, 1, N // 2, N - 1], device=DEVICE)
    x = {name: y if name in ("A_log", "dt_bias", "initial") else y[0] for name, y in call.inputs.items()}
    x = {name: (y if name in ("A_log", "dt_bias") else y[few]).double() for name, y in x.items()}
    o, state = kda_step(
        *(x[name] for name in ("q", "k", "v", "g", "beta", "initial")),
        gate=BoundedGate(x["A_log"], x["dt_bias"]), normalize_qk=True, beta_logits=True,
    )  # fmt: skip
    assert error(got["o"][0, few], o) < tolerance("o", form)
    assert error(got["state"][few], state) < tolerance("state", form)


@on_gpu
@pytest.mark.parametrize("form", WIDEST, ids=str)
def test_more_elements_than_32_bits_count(form: Form) -> None:
    """A million tokens, 2^31 elements and more: what stands at both ends is what it is alone.  Takes 100 GiB."""
    if torch.cuda.mem_get_info()[0] < 110 << 30:
        pytest.skip("needs 110 GiB of memory")
    T, H, end = 1 << 20, 17, 200
    small = make(form, [end], H=H)
    rows = torch.randn(1, T, H, 128, dtype=bf16, device=DEVICE)  # stands for q, k, v, g and do
    inputs = small.inputs | dict.fromkeys(("q", "k", "v", "g"), rows)
    inputs["beta"] = torch.randn(1, T, H, dtype=bf16, device=DEVICE)
    inputs["initial"], dstate = (torch.randn(2, H, 128, 128, device=DEVICE) for _ in range(2))
    call = Call(inputs, rows, dstate, "bounded", options=small.options | {"cu_seqlens": [0, T - end, T]})
    got = call.run(form.backend)
    last = call.part(T - end, T, slice(1, 2)).run(form.backend)
    first = call.part(0, 640, slice(0, 1)).forward(form.backend)[0]
    assert same_bits(got["o"][:, :640], first)
    for name in last.keys() - {"dA_log", "ddt_bias"}:
        own = slice(1, 2) if name in ("state", "dinitial") else (slice(None), slice(T - end, T))
        assert same_bits(got[name][own], last[name]), name
    assert all(x.isfinite().all() for x in got.values())

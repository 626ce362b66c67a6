"""Decoding steps of KDA: against the composition of the operations they fuse, and against themselves without drafts.

Everything here runs on the plain form, and, in a process of its own whose Triton interprets, on the kernel.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from sm_90 import BF16, F32, I64, assembly
from torch import Tensor

from perilune.core.errors import BackendError, ShapeError
from perilune.nn import KimiDeltaAttention
from perilune.nn.norm import GatedHeadNorm
from perilune.ops import BoundedGate, KdaPool, KdaWeights, SoftplusGate, kda, kda_accept, kda_decode, short_conv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
BACKENDS = ["triton"] if INTERPRETED else ["reference", "triton"] if GPU else ["reference"]
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
pytestmark = [  # the interpreter is numpy: run-time loop bounds are arrays, and exp2 warns where it saturates
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def make_weights(H: int, K: int, V: int, gate: str = "bounded", W: int = 4) -> KdaWeights:
    A_log, dt_bias = torch.randn(H, device=DEVICE), torch.randn(H, K, device=DEVICE)
    return KdaWeights(
        torch.randn(H * (2 * K + V), W, device=DEVICE) / 2,
        BoundedGate(A_log, dt_bias) if gate == "bounded" else SoftplusGate(A_log, dt_bias),
        torch.randn(V, device=DEVICE),
    )


def make_inputs(N: int, T: int, H: int, K: int, V: int, dtype: torch.dtype = f32) -> list[Tensor]:
    """qkv, z, beta, out_gate."""
    shapes = (N, T, H * (2 * K + V)), (N, T, H, K), (N, T, H), (N, T, H, V)
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def make_pool(slots: int, H: int, K: int, V: int, drafts: int = 0, dtype: torch.dtype = f32, W: int = 4) -> KdaPool:
    """States and windows at random, room for drafts full of 0x3e."""
    pool = KdaPool.zeros(slots, H, K, V, width=W, drafts=drafts, dtype=dtype, device=DEVICE)
    pool.state.normal_()
    pool.window.normal_()
    for x in (pool.draft_qkv, pool.draft_z, pool.draft_beta):
        x.view(torch.uint8).fill_(0x3E)
    return pool


def copy_of(pool: KdaPool) -> KdaPool:
    return KdaPool(*(getattr(pool, field.name).clone() for field in fields(pool)))


def slots_of(*slots: int) -> Tensor:
    return torch.tensor(slots, device=DEVICE)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def composed(inputs: list[Tensor], weights: KdaWeights, state: Tensor, window: Tensor, **options) -> list[Tensor]:
    """The operations one by one, in the dtype of the state: outputs [N, T, H, V], states and windows after them."""
    qkv, z, beta, out_gate = (x.to(state.dtype) for x in inputs)
    N, T, H, K = z.shape
    V = out_gate.shape[-1]
    u, window = short_conv(qkv, weights.conv, initial_state=window.to(state.dtype), output_final_state=True)
    q, k, v = (x.view(N, T, H, -1) for x in u.split((H * K, H * K, H * V), -1))
    options |= {"gate": weights.gate, "normalize_qk": True, "beta_logits": True, "output_final_state": True}
    o, state = kda(q, k, v, z, beta, scale=weights.scale, initial_state=state, **options)
    norm = GatedHeadNorm(V, weights.norm_eps).to(DEVICE, state.dtype)
    norm.weight.data.copy_(weights.norm)
    return [norm(o, out_gate).detach(), state, window]


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert got.isfinite().all()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-200))


@pytest.mark.parametrize(
    ("backend", "dtype", "gate", "H", "K", "V", "W"),
    [
        (backend, dtype, *shape)
        for backend in BACKENDS
        for dtype in (f32, bf16)
        for shape in (("bounded", 2, 12, 20, 4), ("softplus", 1, 24, 7, 3), ("bounded", 1, 1, 1, 1))
    ]
    + [("gluon", bf16, "bounded", 3, 128, 128, 4)] * HOPPER,
)
def test_a_step_is_its_parts(gate: str, H: int, K: int, V: int, W: int, dtype: torch.dtype, backend: str) -> None:
    weights = replace(make_weights(H, K, V, gate, W), scale=None if H > 1 else 0.7, norm_eps=1e-3)
    pool = make_pool(4, H, K, V, dtype=dtype, W=W)
    slots, inputs = slots_of(2, 0), make_inputs(2, 3, H, K, V, dtype)
    want = composed(inputs, weights, pool.state[slots].double(), pool.window[slots], backend="reference")
    o = kda_decode(*inputs, pool, slots, weights, backend=backend)
    assert o.dtype == dtype
    assert error(o, want[0]) < (5e-6 if dtype == f32 else 4e-3)  # rounded once; the interpreter cuts off
    assert error(pool.state[slots], want[1]) < 2e-6
    assert same_bits(pool.window[slots], want[2].to(dtype))


def test_a_step_is_its_parts_to_the_last_digits() -> None:
    weights, inputs = make_weights(2, 12, 20), [x.double() for x in make_inputs(2, 5, 2, 12, 20)]
    pool = make_pool(3, 2, 12, 20, dtype=f64)
    slots = slots_of(1, 2)
    want = composed(inputs, weights, pool.state[slots], pool.window[slots], backend="reference")
    got = [kda_decode(*inputs, pool, slots, weights, backend="reference"), pool.state[slots], pool.window[slots]]
    assert max(error(a, b) for a, b in zip(got, want)) < 1e-12


@on_each_backend
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_the_ends_of_the_range(gate: str, backend: str) -> None:
    """Decay of nothing and of everything, strengths 0 and 1, rows of zeros, gates shut and open."""
    weights = make_weights(1, 8, 8, gate)
    pool = make_pool(2, 1, 8, 8)
    pool.window[1] = 0
    inputs = make_inputs(2, 2, 1, 8, 8)
    inputs[0][1] = 0
    for x in inputs[1:]:
        x.copy_(200 * x.sign())
    want = composed(inputs, weights, pool.state.double(), pool.window, backend="reference")
    o = kda_decode(*inputs, pool, slots_of(0, 1), weights, backend=backend)
    assert error(o, want[0]) < 5e-6
    assert error(pool.state, want[1]) < 2e-6


@on_each_backend
def test_a_layer_goes_on_from_its_prompt(backend: str) -> None:
    layer = KimiDeltaAttention(24, num_heads=2, head_dim=8).to(DEVICE)
    x = torch.randn(2, 9, 24, device=DEVICE)
    cache = layer.new_cache(2)
    with torch.no_grad():
        want = layer(x)[:, 7:]
        layer(x[:, :7], cache=cache)
        x = x[:, 7:]
        heads = (2, 2, 2, 8)
        conv = torch.cat([layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight])
        weights = KdaWeights(conv, layer.gate, layer.o_norm.weight, layer.o_norm.eps)
        pool, slots = KdaPool.zeros(3, 2, 8, 8, device=DEVICE), slots_of(2, 0)
        pool.state[slots], pool.window[slots] = cache.state, cache.conv
        qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
        z, gates = layer.f_b_proj(layer.f_a_proj(x)).view(heads), layer.g_proj(x).view(heads)
        o = kda_decode(qkv, z, layer.b_proj(x), gates, pool, slots, weights, backend=backend)
        assert error(layer.o_proj(o.flatten(2)), want) < 5e-6


@on_each_backend
def test_write_strength_is_not_rounded(backend: str) -> None:
    """sigmoid(0.5) = 0.622459352, which bf16 would make 0.62109375; key 1, no decay, value 1."""
    gate = BoundedGate(torch.zeros(1, device=DEVICE), torch.full((1, 1), -200.0, device=DEVICE))
    weights = KdaWeights(torch.tensor([[1.0], [1.0], [1.0]], device=DEVICE), gate, torch.ones(1, device=DEVICE))
    pool = KdaPool.zeros(1, 1, 1, 1, width=1, dtype=bf16, device=DEVICE)
    qkv = torch.full((1, 1, 3), 64.0, device=DEVICE, dtype=bf16)
    half, zero = torch.full((1, 1, 1), 0.5, device=DEVICE, dtype=bf16), torch.zeros(1, 1, 1, 1, device=DEVICE)
    kda_decode(qkv, zero.to(bf16), half, zero, pool, slots_of(0), weights, backend=backend)
    assert abs(pool.state.item() / 64 - 0.622459352) < 1e-7


@pytest.mark.parametrize(
    ("backend", "dtype", "H", "K", "V"),
    [(backend, f32, 1, 5, 9) for backend in BACKENDS] + [("gluon", bf16, 150, 128, 128)] * HOPPER,
)
def test_sequences_have_nothing_to_do_with_each_other(backend: str, dtype: torch.dtype, H: int, K: int, V: int) -> None:
    """Slots out of order, padding in between, and everything that is not theirs poisoned."""
    weights, pool = make_weights(H, K, V), make_pool(6, H, K, V, drafts=2, dtype=dtype)
    slots, own = slots_of(2, -1, 0, 5, -7), [2, 0, 5]
    for x in (pool.state, pool.window):
        x[[1, 3, 4]] = torch.nan
    alone = [copy_of(pool) for _ in own]
    before = copy_of(pool)
    for _ in range(2 if INTERPRETED else 10):
        inputs = make_inputs(5, 1, H, K, V, dtype)
        for x in inputs:
            x[[1, 4]] = torch.nan
        o = kda_decode(*inputs, pool, slots, weights, backend=backend)
        assert (o[[1, 4]] == 0).all()
        for n, slot, single in zip((0, 2, 3), own, alone):
            want = kda_decode(*(x[n : n + 1] for x in inputs), single, slots_of(slot), weights, backend=backend)
            assert same_bits(o[n : n + 1], want)
    for slot, single in zip(own, alone):
        assert same_bits(pool.state[slot], single.state[slot])
        assert same_bits(pool.window[slot], single.window[slot])
    for field in fields(pool):
        assert same_bits(getattr(pool, field.name)[[1, 3, 4]], getattr(before, field.name)[[1, 3, 4]])


@pytest.mark.parametrize(
    ("backend", "dtype", "K", "V", "W"),
    [
        (backend, dtype, 4, 6, W)
        for backend in BACKENDS
        for dtype, W in ([(bf16, 2)] if INTERPRETED else [(bf16, 2), (f32, 4), (f32, 7)])
    ]
    + [("gluon", bf16, 128, 128, 4)] * HOPPER,
)
def test_rejected_drafts_leave_no_trace(backend: str, dtype: torch.dtype, K: int, V: int, W: int) -> None:
    """Five sequences draft four tokens and accept 0, 1, 2, 3 and 4 of them: bit for bit what a run gives that never
    saw the others, whether they are accepted on their own or along with the next tokens."""
    H, counts = 1, [3, 0, 4, 1, 2]
    weights, pool = make_weights(H, K, V, W=W), make_pool(6, H, K, V, drafts=5, dtype=dtype, W=W)
    slots = slots_of(3, 0, 5, 2, 1)
    drafted, following = (make_inputs(5, T, H, K, V, dtype) for T in (4, 1))

    plain, want = copy_of(pool), []
    for n, count in enumerate(counts):
        steps = [[x[n : n + 1, t : t + 1] for x in drafted] for t in range(count)]
        steps.append([x[n : n + 1] for x in following])
        want.append([kda_decode(*step, plain, slots[n : n + 1], weights, backend=backend) for step in steps])

    before = copy_of(pool)
    guesses = kda_decode(*drafted, pool, slots, weights, draft=True, backend=backend)
    assert same_bits(pool.state, before.state)
    assert same_bits(pool.window, before.window)
    apart, chained = copy_of(pool), copy_of(pool)
    accepted = torch.tensor(counts, device=DEVICE, dtype=torch.int32)
    o = kda_decode(*following, pool, slots, weights, accepted=accepted, backend=backend)
    kda_accept(apart, slots, accepted, weights, backend=backend)
    committed = copy_of(apart)
    assert same_bits(kda_decode(*following, apart, slots, weights, backend=backend), o)
    for n, count in enumerate(counts):
        assert same_bits(torch.cat([guesses[n, :count], o[n]]), torch.cat(want[n])[:, 0])
    for got in (pool, apart):
        assert same_bits(got.state, plain.state)
        assert same_bits(got.window, plain.window)

    # Drafts upon accepted drafts: the state moves by the accepted ones alone, and the new ones are kept instead.
    assert same_bits(kda_decode(*following, chained, slots, weights, draft=True, accepted=accepted, backend=backend), o)
    assert same_bits(chained.state, committed.state)
    assert same_bits(chained.window, committed.window)
    assert same_bits(chained.draft_qkv[slots, :1], following[0])
    kda_accept(chained, slots, torch.zeros_like(accepted), weights, backend=backend)
    assert same_bits(chained.state, committed.state)
    kda_accept(chained, slots, torch.ones_like(accepted), weights, backend=backend)
    assert same_bits(chained.state, plain.state)
    assert same_bits(chained.window, plain.window)


@on_each_backend
def test_padding_beside_drafts(backend: str) -> None:
    """Sequences of which each accepts another number, with padding among them: to the bit as if each were alone."""
    H, K, V = 1, 5, 9
    weights, pool = make_weights(H, K, V), make_pool(5, H, K, V, drafts=3)
    slots, accepted = slots_of(4, -1, 0, -2, 1), slots_of(2, 1, 0, 3, 3)
    before, alone = copy_of(pool), copy_of(pool)
    drafted, following = make_inputs(5, 3, H, K, V), make_inputs(5, 2, H, K, V)
    kda_decode(*drafted, pool, slots, weights, draft=True, backend=backend)
    o = kda_decode(*following, pool, slots, weights, accepted=accepted, backend=backend)
    assert (o[[1, 3]] == 0).all()
    for n in (0, 2, 4):
        single = [x[n : n + 1] for x in drafted]
        kda_decode(*single, alone, slots[n : n + 1], weights, draft=True, backend=backend)
        single = [x[n : n + 1] for x in following]
        options = {"accepted": accepted[n : n + 1], "backend": backend}
        assert same_bits(o[n : n + 1], kda_decode(*single, alone, slots[n : n + 1], weights, **options))
    for field in fields(pool):
        assert same_bits(getattr(pool, field.name), getattr(alone, field.name))
        assert same_bits(getattr(pool, field.name)[[2, 3]], getattr(before, field.name)[[2, 3]])


@on_each_backend
def test_tokens_may_lie_anywhere(backend: str) -> None:
    """In one projection's output, with what must not be read around them; all at once or one by one."""
    N, T, H, K, V = 2, 2, 1, 6, 10
    weights, pool = make_weights(H, K, V), make_pool(2, H, K, V)
    inputs, slots = make_inputs(N, T, H, K, V), slots_of(1, 0)
    sizes = [x[0, 0].numel() for x in inputs]
    row = torch.full((N, T + 1, sum(sizes) + 12), 1e30, device=DEVICE)
    views, at = [], 3
    for x, size in zip(inputs, sizes):
        views.append(row[:, :T, at : at + size].view(x.shape))
        views[-1].copy_(x)
        at += size + 3
    strided, single = copy_of(pool), copy_of(pool)
    want = kda_decode(*inputs, pool, slots, weights, backend=backend)
    assert same_bits(kda_decode(*views, strided, slots.int(), weights, backend=backend), want)
    steps = [kda_decode(*(x[:, t : t + 1] for x in inputs), single, slots, weights, backend=backend) for t in range(T)]
    assert same_bits(torch.cat(steps, 1), want)
    for other in (strided, single):
        assert same_bits(other.state, pool.state)
        assert same_bits(other.window, pool.window)


@on_each_backend
def test_nothing_to_do(backend: str) -> None:
    weights, pool = make_weights(2, 4, 4), make_pool(2, 2, 4, 4)
    before = copy_of(pool)
    for N, T in ((0, 1), (2, 0)):
        o = kda_decode(*make_inputs(N, T, 2, 4, 4), pool, slots_of(*range(N)).long(), weights, backend=backend)
        assert o.shape == (N, T, 2, 4)
    assert same_bits(pool.state, before.state)
    assert same_bits(pool.window, before.window)


@on_each_backend
def test_two_thousand_steps_and_chunks_agree(backend: str) -> None:
    T = 10 if INTERPRETED else 2000
    weights, pool, inputs = make_weights(1, 8, 8), make_pool(1, 1, 8, 8), make_inputs(1, T, 1, 8, 8)
    want = composed(inputs, weights, pool.state.clone(), pool.window.clone())
    steps = [
        kda_decode(*(x[:, t : t + 1] for x in inputs), pool, slots_of(0), weights, backend=backend) for t in range(T)
    ]
    assert error(torch.cat(steps, 1), want[0]) < 1e-6
    assert error(pool.state, want[1]) < 1e-6


def test_gradients_are_not_asked_for() -> None:
    """Parameters as they are in a layer, autocast on: no graph, and no say for autocast."""
    weights, pool, inputs = make_weights(1, 4, 4), make_pool(1, 1, 4, 4), make_inputs(1, 1, 1, 4, 4)
    weights.conv.requires_grad_()
    other = copy_of(pool)
    want = kda_decode(*inputs, pool, slots_of(0), weights)
    with torch.autocast(DEVICE, bf16):
        assert same_bits(kda_decode(*inputs, other, slots_of(0), weights), want)
    assert not want.requires_grad
    assert not pool.state.requires_grad


def test_what_does_not_fit_is_named() -> None:
    weights, pool, inputs = make_weights(2, 4, 6), make_pool(3, 2, 4, 6, drafts=1), make_inputs(2, 2, 2, 4, 6)
    qkv, z, beta, gates = inputs
    slots = slots_of(0, 1)
    calls = {
        "qkv: expected": lambda: kda_decode(qkv[..., 1:], z, beta, gates, pool, slots, weights),
        "z: expected": lambda: kda_decode(qkv, z[..., 1:], beta, gates, pool, slots, weights),
        "z: expected the pool's": lambda: kda_decode(qkv, z.to(bf16), beta, gates, pool, slots, weights),
        "beta: expected": lambda: kda_decode(qkv, z, beta[..., None], gates, pool, slots, weights),
        "out_gate: expected": lambda: kda_decode(qkv, z, beta, gates[..., :4], pool, slots, weights),
        "slots: expected .2.": lambda: kda_decode(*inputs, pool, slots_of(0), weights),
        "slots: expected int32": lambda: kda_decode(*inputs, pool, slots.float(), weights),
        "pool.window: expected": lambda: kda_decode(*inputs, make_pool(3, 2, 4, 6, W=3), slots, weights),
        "weights.norm": lambda: kda_decode(*inputs, pool, slots, replace(weights, norm=weights.norm[:4])),
        "pool, qkv: expected": lambda: kda_decode(qkv[0], z, beta, gates, pool, slots, weights),
        "at most 1 drafted": lambda: kda_decode(*inputs, pool, slots, weights, draft=True),
        "pool.state: expected float32": lambda: kda_decode(
            *inputs, replace(pool, state=pool.state.to(bf16)), slots, weights
        ),
        "out_gate: expected real numbers": lambda: kda_decode(qkv, z, beta, gates.long(), pool, slots, weights),
        "weights.gate.A_log: expected a tensor on": lambda: kda_decode(
            *inputs, pool, slots, replace(weights, gate=replace(weights.gate, A_log=weights.gate.A_log.to("meta")))
        ),
    }
    if DEVICE == "cpu":
        calls |= {
            "slots: expected different": lambda: kda_decode(*inputs, pool, slots_of(1, 1), weights),
            "slots: expected different ones below 3": lambda: kda_decode(*inputs, pool, slots_of(1, 3), weights),
            "accepted: expected 0 to 1": lambda: kda_accept(pool, slots, slots_of(0, 2), weights),
            "accepted: expected 0 to 1, got .-1": lambda: kda_accept(pool, slots, slots_of(-1, 0), weights),
        }
    for message, call in calls.items():
        with pytest.raises(ShapeError, match=message):
            call()
    kda_accept(pool, slots_of(-1, 0), slots_of(9, 0), weights)  # of padding nothing is read


@pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs with the others in test_the_kernel_interpreted")
@pytest.mark.parametrize(("hopper", "K", "dtype"), [(False, 4, f32)] + [(True, 128, bf16)] * HOPPER)
def test_triton_stays_within_the_pool(hopper: bool, K: int, dtype: torch.dtype) -> None:
    """What cannot be checked without waiting for the device: a slot past the pool, more accepted than there is room."""
    from perilune.ops.kda.kernels import decode as kernels

    decode = partial(kernels.decode, hopper=hopper)
    weights, pool = make_weights(1, K, K), make_pool(2, 1, K, K, drafts=1, dtype=dtype)
    inputs, before = make_inputs(2, 1, 1, K, K, dtype), copy_of(pool)
    o = decode(*inputs, pool, slots_of(2, 1 << 20), weights, True, slots_of(1, 1))
    assert o.isnan().all()
    assert all(same_bits(getattr(pool, field.name), getattr(before, field.name)) for field in fields(pool))
    slots = slots_of(0, 1)
    for x in (pool, before):
        decode(*inputs, x, slots, weights, True, None)
    decode(*inputs, pool, slots, weights, False, slots_of(9, -3))
    decode(*inputs, before, slots, weights, False, slots_of(1, 0))
    assert same_bits(pool.state, before.state)


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernel runs here")
def test_the_kernel_refuses_what_it_cannot_do() -> None:
    with pytest.raises(BackendError, match="'triton': its kernels run on a GPU, and the tensors are on cpu"):
        kda_decode(
            *make_inputs(1, 1, 1, 4, 4), make_pool(1, 1, 4, 4), slots_of(0), make_weights(1, 4, 4), backend="triton"
        )


@pytest.mark.skipif(INTERPRETED, reason="an interpreter compiles nothing")
def test_copies_of_states_are_waited_for() -> None:
    """A wait is for groups of copies: those that belong to none it passes by."""
    pytest.importorskip("triton")
    from perilune.ops.kda.kernels.decode_hopper import decode_hopper_kernel

    inputs = dict.fromkeys(("qkv", "z", "beta", "out_gate", "o", "window", "draft_qkv", "draft_z", "draft_beta"), BF16)
    wide = dict.fromkeys(("state", "conv", "A_log", "dt_bias", "norm"), F32)
    places = dict.fromkeys(("slots", "accepted"), I64)
    numbers = dict.fromkeys(("qkv_row", "z_row", "beta_row", "gate_row", "N", "S", "T", "D", "held", "draft"), "i32")
    types = inputs | wide | places | numbers | dict.fromkeys(("scale", "g_min", "eps"), "fp32")
    constants = {"H": 2, "K": 128, "V": 128, "W": 4, "GATE": 1, "BW": 4}
    ptx = assembly(decode_hopper_kernel.kernel, types, constants, num_warps=4)
    steps = re.findall(r"cp\.async\.(cg|commit_group|wait_group)", ptx)
    assert {"cg", "commit_group", "wait_group"} <= {*steps}
    assert ("cg", "wait_group") not in pairwise(steps)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernel_interpreted() -> None:
    """All of the above with backend 'triton', in a process in which Triton interprets its kernels on the CPU."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "triton", "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("backend", ["triton"] + ["gluon"] * HOPPER)
def test_a_graph_replays_on_new_values(backend: str) -> None:
    H, K, V = 4, 128, 128
    weights, pool = make_weights(H, K, V), make_pool(8, H, K, V, drafts=4, dtype=bf16)
    inputs, slots, accepted = make_inputs(3, 4, H, K, V, bf16), slots_of(2, 0, 5), slots_of(0, 0, 0)
    before = copy_of(pool)
    kda_decode(*inputs, copy_of(pool), slots, weights, draft=True, accepted=accepted, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kda_decode(*inputs, pool, slots, weights, draft=True, accepted=accepted, backend=backend)
    for numbers in ((0, 0, 0), (1, 4, 2), (3, 0, 4)):
        slots.copy_(slots_of(7, -1, 4) if numbers[0] == 3 else slots_of(2, 0, 5))
        accepted.copy_(slots_of(*numbers))
        for x, fresh in zip(inputs, make_inputs(3, 4, H, K, V, bf16)):
            x.copy_(fresh)
        want = kda_decode(*inputs, before, slots, weights, draft=True, accepted=accepted, backend=backend)
        graph.replay()
        assert same_bits(o, want)
        assert same_bits(pool.state, before.state)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_more_sequences_than_a_grid_axis() -> None:
    N, H, K, V = 2049, 32, 16, 16
    weights, pool, inputs = make_weights(H, K, V), make_pool(N, H, K, V), make_inputs(N, 1, H, K, V)
    halves, slots = copy_of(pool), torch.randperm(N, device=DEVICE)
    want = [
        kda_decode(*(x[part] for x in inputs), halves, slots[part], weights, backend="triton")
        for part in (slice(0, 1000), slice(1000, N))
    ]
    assert same_bits(kda_decode(*inputs, pool, slots, weights, backend="triton"), torch.cat(want))
    assert same_bits(pool.state, halves.state)
    exact = composed(inputs, weights, halves.state.double(), halves.window)
    assert exact[0].isfinite().all()

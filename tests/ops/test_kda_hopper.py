"""KDA's kernels in Gluon, and those in Triton that work along with them, in threads of Python: see `gluon_threads`."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import test_kda_decode as steps
import torch
from gluon_threads import simulated
from kda_cases import CASES, INTERPRETED, Form, all_same_bits, bf16, error, f16, f32, make, same_bits

from perilune.core.backends import never
from perilune.ops.kda import api, decode

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs no Triton, not even an interpreted one")
GLUON = Form("gluon", bf16, 128, 128)
KERNELS = "perilune.ops.kda.kernels"


@pytest.fixture(autouse=True, scope="module")
def _in_threads() -> Iterator[None]:
    """Nothing is refused, and kernels that are imported are for threads."""
    with simulated(KERNELS), pytest.MonkeyPatch.context() as patch:
        for backends in (api.BACKENDS, decode.BACKENDS):
            patch.setitem(backends._backends, "gluon", replace(backends._backends["gluon"], refuses=never))
        yield


@pytest.fixture
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one chunk."""
    monkeypatch.setattr(sys.modules[f"{KERNELS}.chunks"], "segment_length", lambda *_: 1)


# Whole calls, forward and backward


def test_documents() -> None:
    """None of which reads or writes another's."""
    make(GLUON, [64, 63], "slow").check(GLUON)
    call = make(GLUON, [0, 65, 1], "slow", H=2)
    got = call.check(GLUON)
    assert same_bits(got["state"][0], call.inputs["initial"][0])
    assert same_bits(got["dinitial"][0], call.dstate[0])


def test_no_document_sees_what_is_next_to_it() -> None:
    call = make(GLUON, [65, 3])
    want = call.part(0, 65, slice(0, 1), [0, 65]).run("gluon")
    for x in (*(call.inputs[name] for name in ("q", "k", "v", "g", "beta")), call.do):
        x[:, 65:] = torch.nan
    got = call.run("gluon")
    for name in got.keys() - {"dA_log", "ddt_bias"}:
        own = slice(1) if name in ("state", "dinitial") else (slice(None), slice(65))
        assert same_bits(got[name][own], want[name]), name


@pytest.mark.parametrize("split", [False, True])
def test_heads_in_turns_give_the_same_bits(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if split:
        monkeypatch.setattr(sys.modules[f"{KERNELS}.chunks"], "segment_length", lambda *_: 1)
    call = make(GLUON, [65] if split else [3, 2], H=3, packed=not split)
    want = call.run("gluon")
    monkeypatch.setattr(sys.modules[f"{KERNELS}.launch"], "turns", lambda H, *_: [slice(0, 2), slice(2, H)])
    assert all_same_bits(call.run("gluon"), want)


def test_stretches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(GLUON, [129, 65])
    want = call.run("gluon")
    monkeypatch.setattr(sys.modules[f"{KERNELS}.launch"], "kept", lambda *_: 1 << 31)
    monkeypatch.setattr(sys.modules[f"{KERNELS}.chunks"], "LEAST", 1)
    table = sys.modules[f"{KERNELS}.chunks"].chunks_of(1, 194, [0, 129, 194], 64, 1, call.do.device, 1 << 31)
    assert len(table.parts) == 2
    got = call.run("gluon")
    sums = ("dA_log", "ddt_bias")  # over chunks, in another order where there are several documents
    assert all_same_bits(*({name: y for name, y in x.items() if name not in sums} for x in (got, want)))
    assert max(error(got[name], want[name]) for name in sums) < 1e-5


@pytest.mark.parametrize("processors", [1, 100])  # then a program of the scans has half of V
def test_more_chunks_than_there_is_room_for(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[f"{KERNELS}.launch_hopper"], "processors", lambda device: processors)
    make(GLUON, [5 * 64 + 1], "mixed", packed=False).check(GLUON)


@pytest.mark.usefixtures("_short_segments")
def test_segments() -> None:
    make(GLUON, [130, 0, 3], "slow").check(GLUON)


@pytest.mark.parametrize("case", ["random", "large_values"])
def test_transforms_are_optional(case: str) -> None:
    make(GLUON, [80], case, H=3, normalize_qk=False, beta_logits=False, scale=0.3).check(GLUON)


@pytest.mark.parametrize("names", [("g", "beta"), ("v",), ("initial", "A_log", "dt_bias")])
def test_inputs_of_several_dtypes(names: tuple[str, ...]) -> None:
    call = make(GLUON, [70], H=2)
    x = call.inputs
    call.changed(**{name: x[name].to(f32 if x[name].dtype == bf16 else bf16) for name in names}).check(GLUON)


@pytest.mark.parametrize("case", ["floor", "same_key", "checkered"])
def test_hard_cases(case: str) -> None:
    make(GLUON, [70], case).check(GLUON)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES["bounded"])
def test_all_hard_cases(case: str) -> None:
    make(GLUON, [300, 130], case, H=2).check(GLUON)


def test_half_precision() -> None:
    make(GLUON._replace(dtype=f16), [70]).check(GLUON)


def test_repeats_bit_for_bit() -> None:
    """However threads and programs take turns."""
    call = make(GLUON, [200])
    want = call.run("gluon")
    for _ in range(2):
        assert all_same_bits(call.run("gluon"), want)


# Decoding


@pytest.fixture(params=[1, 2])
def _few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every head, of several sequences each."""
    monkeypatch.setattr(sys.modules[f"{KERNELS}.decode"], "turns", lambda N, *_: min(N, request.param))


@pytest.mark.usefixtures("_few_programs")
def test_decoding_steps_are_their_parts() -> None:
    steps.test_a_step_is_its_parts("bounded", 2, 128, 128, 4, bf16, "gluon")


@pytest.mark.slow
@pytest.mark.usefixtures("_few_programs")
def test_rejected_drafts_leave_no_trace() -> None:
    steps.test_rejected_drafts_leave_no_trace("gluon", bf16, 128, 128, 4)


@pytest.mark.usefixtures("_few_programs")
def test_decoding_stays_within_the_pool() -> None:
    steps.test_triton_stays_within_the_pool(True, 128, bf16)

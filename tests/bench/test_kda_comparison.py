"""The comparison of KDA on a GPU, run on the CPU: small shapes, a clock that is told the time, peers made of ours."""

import json
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from perilune.bench import meter, runner
from perilune.bench.kda import decode
from perilune.bench.kda.check import ALLOWED, SHAPES, Verdict, check
from perilune.bench.kda.comparison import Comparison
from perilune.bench.kda.contenders import CONTENDERS, Contender
from perilune.bench.kda.drift import ALONG, drift, worst
from perilune.bench.kda.problem import REGIMES, Shape, forward_backward, make, ours
from perilune.bench.meter import Meter, TooSlow
from perilune.ops import BoundedGate, kda

CPU = torch.device("cpu")
CHECKED = (Shape(2, 20, 2, 16), Shape(1, 20, 2, 16, documents=(3, 17)))
WITH_GRAPH, CUDNN, FLA, TORCH = CONTENDERS
PERILUNE = replace(WITH_GRAPH, graph=False)


class Clock(Meter):
    """Every call takes as many milliseconds as calls were measured before it, and holds a MiB."""

    def __init__(self):
        self.measured = 0

    def median_ms(self, call):
        call()
        self.measured += 1
        return float(self.measured)

    def held(self):
        return 5

    def peak(self, call):
        call()
        return 5 + 2**20

    def captured(self, call):
        return call


def comparison(*contenders, clock=None):
    return Comparison(
        shapes=(Shape(1, 10, 2, 16), Shape(2, 5, 1, 16)), checked=CHECKED, sizes=(decode.Size(3, 2, 16),),
        contenders=contenders, device=CPU, meter=clock or Clock(), long=Shape(1, 128, 1, 16),
    )  # fmt: skip


def stranger(label, run, package="json", activated=True):
    """A contender from a package that is installed, or is not."""
    return Contender(label, run, activated, package)


def main(case, tmp_path, capsys, **options):
    code = runner.main(["kda"], json_path=tmp_path / "result.json", cases={"kda": case}, **options)
    (result,) = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)["cases"]
    return code, result, capsys.readouterr().out


# figures


def test_all_gates_of_all_shapes_are_checked_timed_and_written(tmp_path, capsys):
    code, result, printed = main(comparison(PERILUNE, TORCH), tmp_path, capsys)
    assert code == 0
    assert result["check"] == "passed"
    assert result["backend"] == "chunked"
    assert [(row["B"], row["T"], row["H"], row["label"]) for row in result["times"]] == [
        (1, 10, 2, "perilune"), (1, 10, 2, "torch"), (2, 5, 1, "perilune"), (2, 5, 1, "torch"),
    ]  # fmt: skip
    first = result["times"][0]
    assert first["forward_ms"] == {"fast": 1.0, "mixed": 3.0, "slow": 5.0}
    assert first["both_ms"] == {"fast": 2.0, "mixed": 4.0, "slow": 6.0}
    assert first["peak_bytes"] == dict.fromkeys(REGIMES, 2**20)
    assert result["decode"] == [
        {"N": 3, "H": 2, "state_bytes": 2 * 4 * 3 * 2 * 16 * 16, "ms": {"fast": 25.0, "mixed": 26.0, "slow": 27.0}}
    ]
    for row in result["contenders"]:
        assert set(row["errors"]) == set(ALLOWED)
        assert all(0 < row["errors"][name] <= allowed for name, allowed in ALLOWED.items())
    assert set(result["drift"]["errors"]) == set(REGIMES)
    assert {len(windows) for along in result["drift"]["errors"].values() for windows in along.values()} == {8}
    assert "largest errors along 128 tokens" in printed
    for text in ("1, 10, 2", "2, 5, 1", "perilune on chunked", "TB/s of states", "27000.0", "allowed"):
        assert text in printed


def test_markdown_is_whole_lines(tmp_path, capsys):
    _, _, printed = main(
        comparison(PERILUNE, stranger("missing", ours, "no_such_package")), tmp_path, capsys, markdown=True
    )
    lines = [line.rstrip() for line in printed.splitlines()]
    assert "| B, T, H  | fwd fast | fwd mixed | fwd slow | f+b fast | f+b mixed | f+b slow | MiB |" in lines
    assert "| perilune |     1.00 |      3.00 |     5.00 |     2.00 |      4.00 |     6.00 |   1 |" in [
        line.replace("perilune  ", "perilune ") for line in lines
    ]
    assert "missing is not timed: no_such_package is not installed" in lines
    assert {line[0] for line in lines if "fast" in line} == {"|"}


def test_a_call_that_is_too_slow_or_too_large_leaves_a_line(tmp_path, capsys):
    class Impatient(Clock):
        def median_ms(self, call):
            if self.measured == 3:
                self.measured += 1
                raise TooSlow("2.5 s a call, over 1 s")
            if self.measured == 5:
                self.measured += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")
            return super().median_ms(call)

    code, result, printed = main(comparison(PERILUNE, TORCH, clock=Impatient()), tmp_path, capsys)
    assert code == 0
    slow, large = result["times"][:2]
    assert slow["forward_ms"] == {"fast": 1.0, "mixed": 3.0}
    assert slow["both_ms"] == {"fast": 2.0}
    assert slow["skipped"] == "TooSlow: 2.5 s a call, over 1 s"
    assert large["both_ms"] == large["peak_bytes"] == {}
    assert "perilune at 1, 10, 2: TooSlow: 2.5 s a call" in printed
    assert "torch at 1, 10, 2: OutOfMemoryError: CUDA out of memory. Tried" in printed


# checks


def halved(problem):
    return ours(problem) / 2


def not_finite(problem):
    return ours(problem) * torch.tensor(float("nan"))


def raising(problem):
    raise RuntimeError("no kernel for this\nand more")


@pytest.mark.parametrize("wrong", [halved, not_finite])
def test_one_of_ours_that_is_wrong_refuses_to_time_anything(wrong, tmp_path, capsys):
    clock = Clock()
    code, result, printed = main(comparison(PERILUNE, Contender("torch", wrong), clock=clock), tmp_path, capsys)
    assert code == 1
    assert result["check"].startswith("failed: torch: o is off by ")
    assert result["times"] == result["decode"] == []
    assert clock.measured == 0
    assert printed.splitlines()[-1] == "not timed"
    assert "perilune:" not in printed


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(halved, "o is off by 5.0e-01 of its size, allowed 4.0e-03 (fast gates, rows)"), (not_finite, "o is off by inf"),
     (raising, "RuntimeError: no kernel for this (fast gates, rows)")],
)  # fmt: skip
def test_a_stranger_that_is_wrong_is_said_to_be_and_not_timed(wrong, why, tmp_path, capsys):
    code, result, printed = main(comparison(PERILUNE, stranger("theirs", wrong)), tmp_path, capsys)
    assert code == 0
    assert result["contenders"][1]["failed"].startswith(why)
    assert {row["label"] for row in result["times"]} == {"perilune"}
    assert f"theirs is not timed: {why}"[:70] in printed


def test_a_stranger_that_is_less_exact_is_said_to_be_and_timed(tmp_path, capsys):
    code, result, printed = main(
        comparison(PERILUNE, stranger("theirs", lambda problem: ours(problem) * 1.02)), tmp_path, capsys
    )
    assert code == 0
    assert result["contenders"][1]["failed"].startswith("o is off by 2.0e-02 of its size")
    assert {row["label"] for row in result["times"]} == {"perilune", "theirs"}
    assert "theirs is timed although o is off by 2.0e-02" in printed


def test_what_can_be_a_graph_is_timed_as_one_too(tmp_path, capsys):
    _, result, printed = main(comparison(WITH_GRAPH, TORCH), tmp_path, capsys, markdown=True)
    first, second = result["times"][:2]
    assert first["graph_forward_ms"] == {"fast": 2.0, "mixed": 6.0, "slow": 10.0}
    assert first["graph_both_ms"] == {"fast": 4.0, "mixed": 8.0, "slow": 12.0}
    assert first["forward_ms"] == {"fast": 1.0, "mixed": 5.0, "slow": 9.0}
    assert "graph_both_ms" not in second
    (line,) = (line for line in printed.splitlines() if "as a CUDA graph" in line and " 10.00 " in line)
    assert [float(cell) for cell in line.split("|")[2:8]] == [2, 6, 10, 4, 8, 12]


def test_ours_may_not_raise():
    with pytest.raises(RuntimeError, match="no kernel"):
        comparison(Contender("perilune", raising)).run()


def test_a_stranger_that_raises_when_it_is_timed_is_skipped_there(tmp_path, capsys):
    def short_only(problem):
        return ours(problem) if problem.do.shape[1] != 10 else raising(problem)

    _, result, _ = main(comparison(PERILUNE, stranger("theirs", short_only)), tmp_path, capsys)
    assert [row.get("skipped") for row in result["times"]] == [None, "RuntimeError: no kernel for this", None, None]


def test_wrong_decoding_refuses_to_time_anything(monkeypatch, tmp_path, capsys):
    right = decode.kda_decode
    monkeypatch.setattr(
        decode, "kda_decode", lambda *args, backend: right(*args, backend=backend) + (backend == "auto")
    )
    code, result, _ = main(comparison(PERILUNE), tmp_path, capsys)
    assert code == 1
    assert result["check"].startswith("failed: decoding: y is off by")


def test_every_quantity_is_looked_at():
    for i, name in enumerate(ALLOWED):
        exact = tuple(torch.ones(4, dtype=torch.float64) for _ in ALLOWED)
        got = tuple(x * (1 + 1.01 * ALLOWED[name] * (i == j)) for j, x in enumerate(exact))
        verdict = Verdict()
        verdict.add(got, exact, "here")
        assert verdict.failed.startswith(f"{name} is off by")


def test_errors_that_grow_along_the_sequence_are_found(monkeypatch):
    def drifting(problem, backend="auto"):
        o = ours(problem, backend)
        return o if backend == "chunked" else o * (1 + 3e-2 * torch.linspace(0, 1, o.shape[1])[:, None, None])

    exact = drift(Shape(1, 64, 2, 16), CPU)
    assert not worst(exact)
    monkeypatch.setattr("perilune.bench.kda.drift.ours", drifting)
    errors = drift(Shape(1, 64, 2, 16), CPU)
    assert all(set(along) == set(ALONG) for along in errors.values())
    assert all(along["o"] == sorted(along["o"]) for along in errors.values())
    assert worst(errors).startswith("o is off by 3.1e-02")
    assert "in window 8 (fast gates)" in worst(errors)


def test_what_is_checked_is_packed_as_well():
    assert [sum(shape.documents) for shape in SHAPES] == [0, 300]


# inputs


@pytest.mark.parametrize(("regime", "low", "high"), [("fast", -2.7, -2.3), ("mixed", -2, -0.5), ("slow", -0.01, 0)])
def test_gates_forget_as_their_names_say(regime, low, high):
    problem = make(Shape(1, 200, 2), regime, CPU)
    g = problem.activate().leaves[3]
    assert low < g.mean() < high
    if regime == "mixed":
        assert g.mean((0, 1, 2))[:32].min() > -2e-3
        assert g.mean((0, 1, 2))[-8:].max() < -4


@pytest.mark.parametrize("shape", CHECKED)
def test_activated_inputs_are_the_same_problem(shape):
    problem = make(shape, "mixed", CPU).map(torch.Tensor.double)
    o, *_, dv, _, _, _, _ = forward_backward(ours, problem)
    other, *_, other_dv, _, _ = forward_backward(ours, problem.activate())
    torch.testing.assert_close(other, o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other_dv, dv, rtol=1e-4, atol=1e-4)


def test_inputs_are_the_same_at_every_call():
    one, other = (make(CHECKED[0], "slow", CPU) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip((*one.leaves, one.do), (*other.leaves, other.do)))


# peers


def install(monkeypatch, name, **contents):
    for i in range(len(parts := name.split("."))):
        whole = ".".join(parts[: i + 1])
        module = ModuleType(whole)
        module.__spec__ = ModuleSpec(whole, None)
        monkeypatch.setitem(sys.modules, whole, module)
    vars(module).update(contents)


def test_peers_are_called_as_they_are_meant_to_be(monkeypatch):
    def chunk_kda(
        q, k, v, g, beta, *, A_log, dt_bias, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        safe_gate, lower_bound, cu_seqlens,
    ):  # fmt: skip
        assert use_qk_l2norm_in_kernel is use_gate_in_kernel is use_beta_sigmoid_in_kernel is safe_gate is True
        assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
        gate = BoundedGate(A_log, dt_bias.view(g.shape[-2:]), lower_bound)
        return kda(q, k, v, g, beta, gate=gate, normalize_qk=True, beta_logits=True, cu_seqlens=cu_seqlens)

    def kimi_delta_attention(q, k, v, g, beta, cu_seqlens):
        assert q.dim() == 3
        assert g.dtype == beta.dtype == torch.float32
        assert cu_seqlens.dtype == torch.int32
        return kda(*(x[None] for x in (q, k, v, g, beta)), cu_seqlens=cu_seqlens)[0][0]

    for name in ("cudnn", "fla"):
        monkeypatch.setitem(sys.modules, name, None)  # not there, whatever is installed
    assert (CUDNN.missing, FLA.missing) == ("cudnn is not installed", "fla is not installed")
    install(monkeypatch, "fla.ops.kda", chunk_kda=chunk_kda)
    install(monkeypatch, "cudnn.linear_attention", kimi_delta_attention=kimi_delta_attention)
    assert CUDNN.missing == FLA.missing == ""
    verdicts = check([CUDNN, FLA], CPU, CHECKED)
    assert [verdict.failed for verdict in verdicts.values()] == ["", ""]
    assert list(verdicts["cuDNN"].errors) == ["o", "dq", "dk", "dv", "dg", "dbeta"]


def test_finding_the_benchmarks_loads_no_kernels_and_no_peers():
    code = (
        "import sys; from perilune.bench.cases import find; find(); "
        "print([name for name in sys.modules if name.split('.')[0] in ('fla', 'cudnn') or 'kda.kernels' in name])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# the clock


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def _cpu_events(monkeypatch):
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.Event", Event)


@pytest.mark.usefixtures("_cpu_events")
@pytest.mark.parametrize(("budget", "runs"), [(0.1, 3), (1e6, 100)])
def test_the_median_of_few_long_and_many_short_calls(budget, runs, monkeypatch):
    monkeypatch.setattr(meter, "BUDGET_MS", budget)
    pauses = [0.1, *[0.001] * (1 + runs // 4), *[0.05, *[0.001] * runs][:runs]]  # first ones do not count
    calls = iter(pauses)
    assert 1 <= Meter().median_ms(lambda: time.sleep(next(calls))) < 30
    assert next(calls, None) is None


@pytest.mark.usefixtures("_cpu_events")
def test_a_slow_call_runs_twice(monkeypatch):
    monkeypatch.setattr(meter, "LIMIT_S", 0.01)
    calls = []
    with pytest.raises(TooSlow, match=r"0\.0 s a call, over 0\.01 s"):
        Meter().median_ms(lambda: calls.append(time.sleep(0.02)))
    assert len(calls) == 2


@pytest.mark.usefixtures("_cpu_events")
def test_a_long_call_counts_once(monkeypatch):
    monkeypatch.setattr(meter, "ONCE_S", 0.01)
    calls = iter([0.001, 0.02])
    assert 20 <= Meter().median_ms(lambda: time.sleep(next(calls))) < 500
    assert next(calls, None) is None


def too_large(problem):
    if problem.leaves[0].shape[1] == 10:  # the first shape to be timed
        raise RuntimeError("too large")
    return ours(problem)


@pytest.mark.parametrize("others", [(), (too_large,), (lambda problem: 2 * ours(problem),)])
def test_all_steps_are_told_and_counted(others):
    told = []
    comparison(PERILUNE, *(stranger("other", run) for run in others)).run(lambda *step: told.append(step))
    steps, done, totals = zip(*told)
    assert done[0] == 0
    assert all(a < b for a, b in pairwise(done))
    assert done[-1] + 1 == totals[-1]
    assert steps[0] == "checking fast gates, rows"
    assert "timing perilune at 2, 5, 1, slow gates" in steps


def test_what_a_graph_reads_lives_while_it_is_replayed():
    class Graphs(Clock):
        def captured(self, call):
            held = weakref.ref(call)
            return lambda: held()()

    assert len(comparison(PERILUNE, clock=Graphs()).run()["decode"]) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_clock():
    sheet = replace(comparison(PERILUNE), device=torch.device("cuda"), meter=Meter())
    (times, _) = sheet.run()["times"]
    assert all(0 < ms < 100 for what in ("forward_ms", "both_ms") for ms in times[what].values())
    assert min(times["peak_bytes"].values()) > 0

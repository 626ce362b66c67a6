"""Traces written by hand, as the profiler of a GPU writes them, and one of this machine."""

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from perilune.bench.trace import GAPS, by_kind, covered, kind_of, read


def span(cat, name, ts, dur, tid=1, correlation=None):
    event = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 7, "tid": tid}
    return event if correlation is None else {**event, "args": {"correlation": correlation}}


def kernel(name, ts, dur, correlation):
    return span("kernel", name, ts, dur, tid=99, correlation=correlation)


def launch(ts, correlation, tid=1):
    return span("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, correlation)


GEMM, PLUS = "nvjet_tst_128x128_64x4", "void at::native::vectorized_elementwise_kernel<4, add>"


def test_the_same_kernel_counts_where_its_launch_lies():
    events = [
        span("cpu_op", "aten::linear", 0, 10),
        span("cpu_op", "aten::mm", 2, 6),
        launch(3, 1),
        kernel(GEMM, 100, 40, 1),
        span("user_annotation", "Optimizer.step#PerHeadMuon.step", 20, 30),
        span("cpu_op", "aten::bmm", 22, 6),
        launch(24, 2),
        kernel(GEMM, 150, 20, 2),
        span("cpu_op", "_LinearCrossEntropy", 60, 30, tid=2),
        span("cpu_op", "aten::mm", 62, 6, tid=2),
        launch(64, 3, tid=2),
        kernel(GEMM, 180, 10, 3),
        span("cpu_op", "aten::add", 200, 5),
        launch(201, 4),
        kernel(PLUS, 210, 5, 4),
        kernel("reverse_scan_hopper_kernel", 220, 7, 5),  # its launch was not seen
        kernel("row_product_kernel", 230, 8, 6),
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 240, 2, tid=99, correlation=7),
    ]
    found = by_kind(events, wall=200e-6)
    assert {kind: round(spent.seconds * 1e6, 3) for kind, spent in found.items()} == {
        "products": 40, "optimizer": 20, "head and loss": 10, "experts": 8, "KDA": 7, "elementwise and norms": 5,
        "copies": 2, GAPS: 200 - 92,
    }  # fmt: skip
    assert [spent.count for spent in found.values()] == [1, 1, 1, 1, 1, 1, 1, 0]
    assert list(found)[-1] == GAPS
    assert dict(found["products"].longest) == {GEMM: pytest.approx(40e-6)}


def test_a_launch_between_two_operations_lies_in_neither():
    events = [
        span("cpu_op", "aten::mm", 0, 10),
        span("cpu_op", "aten::bmm", 30, 10),
        launch(20, 1),
        kernel("reduce_kernel", 100, 5, 1),
    ]
    assert list(by_kind(events, 1.0)) == ["elementwise and norms", GAPS]


@pytest.mark.parametrize(
    ("name", "around", "kind"),
    [
        ("flash_fwd_kernel", ("aten::scaled_dot_product_attention",), "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", (), "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", (), "attention"),
        (PLUS, ("autograd::engine::evaluate_function: ScaledDotProductFlashAttentionBackward0",), "attention"),
        ("mix_kernel", ("_Fused",), "attention residuals"),
        (PLUS, ("AttnResBackward",), "attention residuals"),
        ("scan_kernel", ("_Fused",), "KDA"),
        ("conv_grads_kernel", ("_FusedBackward",), "KDA"),
        (PLUS, ("ShortConvBackward", "aten::mul"), "KDA"),
        ("outer_product_kernel", ("_FusedBackward",), "experts"),
        ("cutlass_gemm_grouped", ("_GroupedExperts", "aten::_grouped_mm"), "experts"),
        ("histogram_kernel", (), "routing and balance"),
        (PLUS, ("balance", "aten::cumsum"), "routing and balance"),
        ("row_product_kernel", ("Optimizer.step#PerHeadMuon.step",), "optimizer"),
        ("Memcpy DtoH (Device -> Pinned)", (), "copies"),
        (PLUS, ("aten::to", "aten::_to_copy", "aten::copy_"), "copies"),
        ("rms_norm_kernel", (), "elementwise and norms"),
        ("sm90_xmma_gemm_bf16bf16", (), "products"),
    ],
)
def test_kinds(name, around, kind):
    assert kind_of(name, around) == kind


def test_kernels_at_the_same_time_count_once_against_the_gaps():
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 4), (2, 3)]) == 6
    events = [kernel("a", 0, 10, 1), kernel("b", 5, 10, 2)]
    found = by_kind(events, 20e-6)
    assert found["elementwise and norms"].seconds == pytest.approx(20e-6)
    assert found[GAPS].seconds == pytest.approx(5e-6)


def test_without_a_device_an_operation_counts_without_what_is_inside(tmp_path):
    events = [
        span("cpu_op", "aten::linear", 0, 10),
        span("cpu_op", "aten::mm", 2, 6),
        span("cpu_op", "aten::add", 20, 5),
    ]
    found = by_kind(events, 30e-6)
    assert {kind: round(spent.seconds * 1e6, 3) for kind, spent in found.items()} == {
        "elementwise and norms": 9, "products": 6, GAPS: 15,
    }  # fmt: skip
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert read(path) == events


def test_a_real_trace_is_read(tmp_path):
    x = torch.randn(200, 200, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        (x @ x).sum().backward()
        optimizer.step()
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    found = by_kind(read(tmp_path / "trace.json"), wall=10.0)
    assert {"products", "optimizer", "elementwise and norms"} <= set(found)
    assert sum(spent.seconds for spent in found.values()) == pytest.approx(10.0)

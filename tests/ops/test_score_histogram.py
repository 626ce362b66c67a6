"""Histograms of required biases: every form counts alike, token for token.

Everything here runs on the plain form, and, in a process of its own whose Triton interprets, on the kernel.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perilune.core.errors import BackendError
from perilune.ops import fused as shared
from perilune.ops import quantile_bias
from perilune.ops.quantile_bias import Groups, score_histogram
from perilune.ops.quantile_bias.api import HISTOGRAM
from perilune.ops.quantile_bias.histogram import PART

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
on_kernel = pytest.mark.skipif(not (INTERPRETED or GPU), reason="runs in test_the_kernel_interpreted")
BACKENDS = ["chunked", pytest.param("triton", marks=[on_kernel, pytest.mark.gpu])]
SIZES = [  # tokens, experts, top_k, bins
    (1, 2, 1, 1),
    (3, 5, 4, 7),
    (9, 8, 2, 1000),
    (4, 33, 16, 50),
    (2, 64, 1, 1000),
    (3, 896, 16, 1000),
    (2, 1025, 6, 10),
]


@pytest.fixture(autouse=True)
def _no_deterministic_forms_on_a_gpu():
    if GPU:
        torch.use_deterministic_algorithms(False)


def draw(M, E, dtype=torch.float32):
    """scores, bias, mask."""
    return torch.rand(M, E).to(DEVICE, dtype), 0.3 * torch.randn(E, device=DEVICE), torch.rand(M).to(DEVICE) < 0.7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("M", "E", "top_k", "bins"), SIZES)
def test_counts_are_the_references(M, E, top_k, bins, dtype, masked, backend):
    scores, bias, mask = draw(M, E, dtype)
    mask = mask if masked else None
    expected = score_histogram(scores, bias, top_k, bins, mask, backend="reference")
    assert torch.equal(score_histogram(scores, bias, top_k, bins, mask, backend=backend), expected)
    assert expected.sum(-1).tolist() == [M if mask is None else int(mask.sum())] * E


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["ties", "signed zeros", "far apart", "negative", "ends"])
def test_hard_scores(case, backend):
    """Cutoffs shared by several experts, zeros of both signs, biases of every size, scores 0 and 1."""
    scores, bias, _ = draw(6, 12)
    if case == "ties":
        scores, bias = scores.round(), torch.zeros_like(bias)
    if case == "signed zeros":
        bias = -scores[0] * torch.tensor([1, 1.0 + 1e-6] * 6, device=DEVICE)
        scores[1:3] = torch.tensor([0.0, -0.0] * 6, device=DEVICE)
        bias[:4] = torch.tensor([-0.0, 0.0, 0.0, -0.0], device=DEVICE)
    if case == "far apart":
        bias = bias * torch.logspace(-30, 4, 12, device=DEVICE)
    if case == "negative":
        bias = bias - 3
    if case == "ends":
        scores = scores.round()
    for top_k in (1, 5, 11):
        expected = score_histogram(scores, bias, top_k, 100, backend="reference")
        assert torch.equal(score_histogram(scores, bias, top_k, 100, backend=backend), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("M", "E", "top_k", "groups"),
    [(1, 4, 1, (2, 1)), (9, 16, 4, (4, 2)), (5, 12, 3, (4, 2, 1)), (7, 6, 2, (6, 3)), (40, 64, 8, (8, 4))],
)
def test_counts_in_groups_are_the_references(M, E, top_k, groups, dtype):
    (scores, bias, mask), groups = draw(M, E, dtype), Groups(*groups)
    scores[-1] = scores[-1].round()  # ties
    got = score_histogram(scores, bias, top_k, 100, mask, groups=groups)
    assert torch.equal(got, score_histogram(scores, bias, top_k, 100, mask, groups=groups, backend="reference"))
    assert got.sum(-1).tolist() == [int(mask.sum())] * E
    everything = score_histogram(scores, bias, top_k, 100, mask, groups=Groups(groups.number, groups.number))
    assert torch.equal(everything, score_histogram(scores, bias, top_k, 100, mask))
    if M > 8:
        assert not torch.equal(got, everything)


def test_groups_lose_no_token_of_a_diverged_step():
    scores, bias, _ = draw(5, 8)
    scores[1, 3] = torch.nan
    scores[2] = torch.nan
    assert score_histogram(scores, bias, 2, 30, groups=Groups(4, 2)).sum(-1).tolist() == [5] * 8


def test_the_kernel_leaves_groups_to_the_plain_form(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(shared, "INTERPRETED", True)  # as where it could run
    scores, bias, _ = draw(3, 8)
    counts = torch.zeros(8, 30, dtype=torch.int64, device=DEVICE)
    assert HISTOGRAM.choice(counts, scores, bias, 2, None, None)[0] == "triton"
    chosen, refusals = HISTOGRAM.choice(counts, scores, bias, 2, None, Groups(4, 2))
    assert chosen == "chunked"
    assert refusals == {"triton": "it knows one cutoff a token, and experts come in 4 groups"}
    assert score_histogram(scores, bias, 2, 30, groups=Groups(4, 2)).sum() == 24
    for run in (score_histogram, quantile_bias):
        with pytest.raises(BackendError, match="cannot run on 'triton': it knows one cutoff a token"):
            run(scores, bias, 2, bins=30, groups=Groups(4, 2), backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_are_added_to_what_is_there(backend):
    scores, bias, mask = draw(20, 8)
    whole = score_histogram(scores, bias, 2, 30, mask, backend=backend)
    out = torch.zeros(8, 30, dtype=torch.int64, device=DEVICE)
    for part in (slice(0, 3), slice(3, 3), slice(3, 20)):
        assert score_histogram(scores[part], bias, 2, 30, mask[part], out=out, backend=backend) is out
    assert torch.equal(out, whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_lie_apart_and_across(backend):
    scores, bias, mask = draw(7, 9)
    expected = score_histogram(scores, bias, 2, 30, mask)
    apart, twice = torch.full((7, 20), torch.nan, device=DEVICE), torch.stack([mask, ~mask], 1)
    apart[:, :9] = scores
    assert torch.equal(score_histogram(apart[:, :9], bias, 2, 30, twice[:, 0], backend=backend), expected)
    assert torch.equal(score_histogram(scores.T.contiguous().T, bias, 2, 30, mask, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_padding_holds_does_not_count(backend):
    scores, bias, mask = draw(10, 8)
    expected = score_histogram(scores, bias, 2, 30, mask, backend=backend)
    scores[~mask] = torch.nan
    assert torch.equal(score_histogram(scores, bias, 2, 30, mask, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_diverged_step_loses_no_token(backend):
    scores, bias, _ = draw(5, 8)
    scores[1, 3] = torch.nan
    scores[2] = torch.nan
    assert score_histogram(scores, bias, 2, 30, backend=backend).sum(-1).tolist() == [5] * 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bias_is_the_same_by_every_form(backend):
    scores, bias, mask = draw(12, 8)
    expected = quantile_bias(scores, bias, 2, mask=mask, bins=50, backend="chunked")
    assert torch.equal(quantile_bias(scores, bias, 2, mask=mask, bins=50, backend=backend), expected)


def test_parts_are_all_that_is_allocated():
    """No tensor as large as the scores, and none but the counts larger than a part."""
    M, E, bins = 4 * PART // 64, 64, 100
    sizes = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **kwargs or {})
            sizes.extend(x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    scores, bias, mask = torch.rand(M, E), torch.zeros(E), torch.rand(M) < 0.5
    storage = scores.untyped_storage().nbytes()
    with Watched():
        score_histogram(scores, bias, 2, bins, mask, backend="chunked")
    assert max(size for size in sizes if size != storage) <= 8 * PART < 8 * M * E / 3


@pytest.mark.skipif(INTERPRETED or GPU, reason="the kernel runs here")
def test_the_kernel_refuses_what_it_cannot_do():
    pytest.importorskip("triton")
    scores, bias, _ = draw(3, 4)
    with pytest.raises(BackendError, match="'triton': its kernels run on a GPU, and the tensors are on cpu"):
        score_histogram(scores, bias, 1, backend="triton")
    with pytest.raises(BackendError, match="quantile_bias cannot run on 'triton': without bins nothing is counted"):
        quantile_bias(scores, bias, 1, backend="triton")


@on_kernel
@pytest.mark.gpu
def test_what_the_triton_kernel_leaves_to_others():
    scores, bias, _ = draw(3, 4)
    with pytest.raises(BackendError, match=r"scores and bias are torch\.float64"):
        score_histogram(scores.double(), bias, 1, backend="triton")
    with pytest.raises(BackendError, match="16384 at most, and there are 16385"):
        score_histogram(torch.rand(1, 16385, device=DEVICE), torch.zeros(16385, device=DEVICE), 1, backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_the_kernel_interpreted():
    """All of the above with backend 'triton', in a process in which Triton interprets its kernels on the CPU."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "triton", "-p", "no:xdist"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_real_step_on_a_gpu():
    """16,384 tokens of 896 experts, captured in a graph: against the plain form on the CPU."""
    scores, bias = torch.rand(16384, 896, device=DEVICE), 0.1 * torch.randn(896, device=DEVICE)
    mask, out = torch.rand(16384, device=DEVICE) < 0.9, torch.zeros(896, 1000, dtype=torch.int64, device=DEVICE)
    score_histogram(scores, bias, 16, 1000, mask, out=out, backend="triton")
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        score_histogram(scores, bias, 16, 1000, mask, out=out, backend="triton")
    graph.replay()
    expected = score_histogram(scores.cpu(), bias.cpu(), 16, 1000, mask.cpu(), backend="chunked")
    assert torch.equal(out.cpu(), expected)

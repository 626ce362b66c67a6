"""A plan's parts against what torch allocates and what the log measured, and its layouts against their limits."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perilune import recipes
from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Model, presets
from perilune.nn.norm import GatedHeadNorm, RMSNorm
from perilune.ops import short_conv, situ_glu
from perilune.optim import PerHeadMuon
from perilune.plan.gpus import GPUS, gpu_called
from perilune.plan.layout import Layout, Work, stages
from perilune.plan.memory import floor, memory
from perilune.plan.propose import divisors, judged, layouts, plan
from perilune.plan.rates import EXPERTS, FILLED, KDA_FORWARD, PRODUCTS
from perilune.plan.sizes import orthogonalizing, sizes
from perilune.plan.time import gather_rate, kda_seconds, mixers_seconds, point_to_point
from perilune.plan.traffic import BACKWARD, CONVOLUTION, GATED_NORM, NORM, SITU

H200 = GPUS["h200"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ALONE = Layout(1, 1, 1, 1, "weights", "none", 1)
WORK = Work("8k", 8192, 2**17, 2**20)


def results(name: str) -> list[dict]:
    times = json.loads((RESULTS / f"{name}-h200.json").read_text())["cases"][0]["times"]
    return [time for time in times if time["label"] == "perilune"]


# memory


@pytest.mark.parametrize("name", presets.PRESETS)
def test_weights_take_what_torch_allocates(name: str) -> None:
    config = presets.get(name)
    with torch.device("meta"):
        model = K3Model(config)
    allocated = sum(p.numel() * p.itemsize for p in model.parameters())
    (stage,) = stages(config, sizes(config), 1)
    states = memory(config, stage, ALONE, WORK).states
    assert states["master weights"] == states["gradients"] == allocated


def test_the_optimizers_states_take_what_torch_allocates() -> None:
    config = presets.nano().replace(num_nextn_predict_layers=1)
    optimizer = PerHeadMuon(K3Model(config).parameter_roles(), lr=1e-3)
    held = {"muon": 0, "adamw": 0}
    for group in optimizer.param_groups:
        for param in group["params"]:
            held[group["kind"]] += sum(x.nbytes for x in optimizer.state[param].values() if x.dim())
    (stage,) = stages(config, sizes(config), 1)
    states = memory(config, stage, ALONE, WORK).states
    assert (states["Muon's momentum"], states["AdamW's moments"]) == (held["muon"], held["adamw"])


@pytest.mark.parametrize("number", [1, 2, 3, 7, 16])
def test_stages_hold_everything_once(number: int) -> None:
    config = presets.k3()
    made = stages(config, sizes(config), number)
    assert [i for stage in made for i in stage.layers] == list(range(93))
    assert sum(stage.share.total for stage in made) == sizes(config).total
    assert [stage.last for stage in made] == [False] * (number - 1) + [True]
    assert sum(n for stage in made for _, n in stage.sorts) == 93


def test_sharing_among_more_takes_less() -> None:
    config = presets.get("1b")
    (stage,) = stages(config, sizes(config), 1)
    two, eight = (memory(config, stage, Layout(n, 1, 1, 1, "weights", "none", 1), WORK) for n in (2, 8))
    assert sum(two.states.values()) == pytest.approx(4 * sum(eight.states.values()))
    assert two.passes == eight.passes
    whole = memory(config, stage, Layout(8, 1, 1, 1, "states", "none", 1), WORK)
    assert whole.states["gradients"] == 4 * stage.share.total
    assert whole.states["master weights"] == eight.states["master weights"]


# time


def test_newton_schulz_costs_what_the_head_by_head_form_saves() -> None:
    """K3's q_proj [12288, 7168], whole and in 96 heads."""
    assert orthogonalizing(7168, 12288) == pytest.approx(1.63e13, rel=2e-3)
    assert 96 * orthogonalizing(128, 7168) == pytest.approx(2.27e11, rel=3e-3)


@pytest.mark.parametrize("index", range(4))
def test_kda_takes_what_was_measured(index: int) -> None:
    """Of the two smaller grids the host's queue is the measure, or the graph's time."""
    measured = results("kda")[index]
    seconds = kda_seconds(measured["B"] * measured["T"], measured["H"], 128, H200)
    assert 0.9 < seconds / (measured["graph_both_ms"]["mixed"] / 1e3) < 1.15
    assert seconds / (measured["both_ms"]["mixed"] / 1e3) < 1.15


def test_kda_forward_takes_what_was_measured() -> None:
    measured = results("kda")[:3]
    ratios = [x["forward_ms"]["mixed"] / 1e3 / (x["B"] * x["T"] * x["H"] * KDA_FORWARD) for x in measured]
    assert all(0.8 < ratio < 1.05 for ratio in ratios)


def test_rates_are_those_in_the_results() -> None:
    many, few = results("experts")
    assert pytest.approx(many["both"]["tflops"], rel=2e-3) == EXPERTS * H200.peak / 1e12
    assert EXPERTS < few["both"]["tflops"] * 1e12 / H200.peak < PRODUCTS < 1


def test_attention_residuals_take_what_was_measured() -> None:
    """One mixer of nine sources of 8192 x 7168: 0.284 ms forward, 1.11 with the backward, plus the sums' reads."""
    config = presets.k3()
    made = stages(config, sizes(config), 1)[0]
    seconds = mixers_seconds(config, made, 8192, H200)
    sources = 1003  # of all 187 mixers
    tensor = 8192 * 7168 * 2 / 4.3e12
    forward = tensor * (sources + 187) * 0.284 / 0.273
    backward = tensor * (3 * sources + 187) * 0.830 / 0.519
    assert seconds == pytest.approx(forward + backward, rel=1e-6)
    assert tensor * 10 * 0.284 / 0.273 == pytest.approx(0.284e-3, rel=2e-3)
    assert tensor * 19 * 0.830 / 0.519 == pytest.approx(0.830e-3, rel=2e-3)


class Moved(TorchDispatchMode):
    """Bytes that each operation reads and writes; views move nothing, and few rows are put in place."""

    still = ("aten::empty", "aten::_unsafe_view", "aten::detach", "aten::index_put")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.name.startswith(self.still)):
            self.total += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
        return out


def moved_by(function, *inputs: torch.Tensor) -> tuple[float, float]:
    """Forward, and backward over forward, a number of the first input."""
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    with Moved() as forward:
        out = function(*inputs)
    with Moved() as backward:
        out.backward(torch.ones_like(out))
    return forward.total / inputs[0].numel(), backward.total / forward.total


@pytest.mark.parametrize(
    ("function", "width", "inputs", "expected"),
    [
        (RMSNorm(64, 1e-5).bfloat16(), 64, 1, NORM),
        (GatedHeadNorm(64, 1e-5), 64, 2, GATED_NORM),
        (situ_glu, 256, 2, SITU),
        (lambda x: short_conv(x, torch.ones(256, 1, 4), activation="silu")[0], 256, 1, CONVOLUTION),
    ],
    ids=["norm", "gated norm", "SiTU", "convolution"],
)
def test_traffic_is_what_the_operations_move(function, width: int, inputs: int, expected: float) -> None:
    """In bfloat16, a number of the tensor worked on."""
    forward, backward = moved_by(function, *torch.randn(inputs, 1, 2048, width, dtype=torch.bfloat16))
    assert forward == pytest.approx(expected, rel=0.1)
    assert backward == pytest.approx(BACKWARD, rel=0.12)


def test_links() -> None:
    """In a server the link; across servers its eight cards together, or one where members are a server apart."""
    assert gather_rate(8, 1, H200) == H200.link
    assert gather_rate(64, 1, H200) == 8 * H200.network
    assert gather_rate(4, 8, H200) == H200.network
    assert gather_rate(2, 4, H200) == H200.link
    assert point_to_point(8, H200) == H200.link
    assert H200.network < point_to_point(64, H200) < 1.2 * H200.network


# layouts


@pytest.mark.parametrize("gpus", [1, 7, 8, 12, 64])
def test_layouts_use_all_gpus_and_divide_what_has_to_be_divided(gpus: int) -> None:
    config = presets.get("1b")
    found = list(layouts(config, WORK, gpus))
    assert len(set(found)) == len(found) > 0
    for x in found:
        assert x.gpus == gpus
        assert WORK.context % x.context == 0
        assert config.num_experts % x.expert == 0 == x.shards % x.expert
        assert x.micro_batches(WORK) * x.data * x.rows >= WORK.sequences
        assert 0 <= x.idle(WORK) < 1


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["nano", "small", "1b", "10b", "kimi_linear_48b"]),
    st.integers(1, 48),
    st.sampled_from(sorted(GPUS)),
    st.sampled_from([2048, 8192, 65536]),
)
def test_no_proposal_exceeds_the_memory(name: str, gpus: int, kind: str, context: int) -> None:
    gpu, work = gpu_called(kind), Work("any", context, 2**19, 2**22)
    found, said = None, ""
    try:
        found = plan(presets.get(name), work, gpus, gpu)
    except ConfigError as error:
        said = str(error)
    if found is None:
        assert re.fullmatch(rf"--gpus: expected at least \d+ for stage any, got {gpus}; \d+ fit", said)
        return
    best = found.proposal
    assert best.fits
    assert best.layout.gpus == gpus
    assert best.memory.peak <= FILLED * gpu.memory
    assert 0 < best.seconds < float("inf")
    assert min(x for part in (best.memory.states, best.memory.passes) for x in part.values()) >= 0


def test_the_proposal_is_the_fastest_that_fits() -> None:
    config = presets.get("1b")
    tried = judged(config, sizes(config), WORK, 8, H200)
    best = plan(config, WORK, 8, H200).proposal
    assert best.seconds == min(proposal.seconds for proposal in tried)
    assert not all(proposal.fits for proposal in judged(config, sizes(config), WORK, 1, GPUS["a100-80g"]))


def test_too_few_says_how_many_are_needed() -> None:
    config, work = presets.get("10b"), Work("8k", 8192, 2**22, 2**30)
    with pytest.raises(ConfigError) as caught:
        plan(config, work, 1, H200)
    found = re.fullmatch(r"--gpus: expected at least (\d+) for stage 8k, got 1; (\d+) fit", str(caught.value))
    assert found is not None
    least, fits = int(found[1]), int(found[2])
    share = stages(config, sizes(config), 1)[0].share
    assert floor(share) > (least - 1) * FILLED * H200.memory
    assert plan(config, work, fits, H200).proposal.fits


def test_k3_over_2048() -> None:
    """The released size: it fits, spread over experts and sequences, at a sane share of the peak."""
    run = recipes.get("k3_8k")
    stage = run.stages[0]
    work = Work(stage.name, stage.context, stage.batch_tokens, stage.tokens)
    found = plan(run.model, work, 2048, H200)
    assert found.proposal.layout.expert > 1
    assert any("experts of a layer on every GPU needs" in reason for reason in found.reasons)
    assert 0.05 < 3 * 2 * 104e9 * found.tokens_per_second / (2048 * H200.peak) < 0.6


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(49) == [1, 7, 49]


def test_unknown_gpu() -> None:
    with pytest.raises(ConfigError, match="--gpu: there is none called 'h20'; do you mean 'h200'"):
        gpu_called("h20")

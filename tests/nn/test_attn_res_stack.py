"""Attention residuals around any stack, whole and in the stages of a pipeline."""

import copy
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from perilune.core.errors import ConfigError, ShapeError
from perilune.nn import AttnResStack, BlockAttnRes, DepthStream, RMSNorm
from ranks import run_ranks

D, LAYERS = 8, 6
f64 = torch.float64


class Layer(nn.Module):
    """x + f(norm(x)), or f(norm(x)) alone."""

    def __init__(self, adds_input: bool = True) -> None:
        super().__init__()
        self.norm, self.matrix = RMSNorm(D, 1e-6), nn.Linear(D, D)
        self.adds_input = adds_input

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        y = gain * torch.tanh(self.matrix(self.norm(x)))
        return x + y if self.adds_input else y


def make(block_size: int, count: int = LAYERS, learned: bool = True, **options) -> AttnResStack:
    torch.manual_seed(1)
    layers = [Layer(options.get("adds_input", True)) for _ in range(count)]
    stack = AttnResStack(layers, D, block_size, **options).double()
    for part in stack.modules():
        if isinstance(part, BlockAttnRes) and learned:
            nn.init.normal_(part.query)
            nn.init.normal_(part.norm.weight, 1.0, 0.2)
    return stack


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(5), dtype=f64)


def by_hand(stack: AttnResStack, x: Tensor) -> Tensor:
    """Lists and sums, as the page on attention residuals lays them out."""

    def mix(mixer: BlockAttnRes, sources: list[Tensor]) -> Tensor:
        keys = [v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() for v in sources]
        a = torch.stack([key @ (mixer.query * mixer.norm.weight) for key in keys]).softmax(0)
        return sum(a_i[..., None] * v for a_i, v in zip(a, sources)) * (len(sources) if mixer.start != "mean" else 1)

    bank, live = [], x
    for n, layer in enumerate(stack.layers.values()):
        h = mix(stack.mixers[str(n)], [*bank, live])
        if n % stack.block_size == 0:
            bank, live = [*bank, live], torch.zeros_like(x)
        live = live + torch.tanh(layer.matrix(layer.norm(h)))
    return mix(stack.output, [*bank, live])


def gradients(y: Tensor, stack: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y * inputs(*y.shape[:-1]).sin()).sum(), [x, *stack.parameters()]))


@pytest.mark.parametrize("start", ["residual", "mean"])
@pytest.mark.parametrize("adds_input", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 100])
def test_the_stack_is_the_equation(block_size: int, adds_input: bool, start: str) -> None:
    stack = make(block_size, adds_input=adds_input, start=start)
    x = inputs(2, 3).requires_grad_()
    got, want = stack(x), by_hand(stack, x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(got, stack, x), gradients(want, stack, x), rtol=1e-10, atol=1e-12)


# The start


@pytest.mark.parametrize("adds_input", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 4, 6, 7])
def test_it_starts_as_the_plain_residual_with_its_gradients(block_size: int, adds_input: bool) -> None:
    stack = make(block_size, learned=False, adds_input=adds_input)
    x = inputs(2, 3).requires_grad_()
    want = x
    for layer in stack.layers.values():
        want = layer(want) if adds_input else want + layer(want)
    got = stack(x)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    for a, b in zip(*(torch.autograd.grad(y.cos().sum(), [x, *stack.layers.parameters()]) for y in (got, want))):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("start", ["residual", "mean"])
def test_every_query_but_the_first_is_drawn_away_from_the_start(start: str) -> None:
    """The first has one source only, and so nothing to choose."""
    stack = make(2, learned=False, start=start)
    stack(inputs(2, 3)).cos().sum().backward()
    sizes = [mixer.query.grad.abs().max().item() for mixer in [*stack.mixers.values(), stack.output]]
    assert sizes[0] == 0
    assert min(sizes[1:]) > 1e-4


def test_a_norm_behind_the_mixers_makes_both_starts_one_function() -> None:
    """Queries as they come: not at the start alone.  In float64, and with eps that do not count."""

    def run(start: str) -> tuple[Tensor, list[Tensor]]:
        stack = make(2, adds_input=False, start=start)
        for layer in stack.layers.values():
            layer.norm.eps = 0.0
        y = RMSNorm(D, 0.0).double()(stack(x))
        return y, gradients(y, stack, x)

    x = inputs(2, 3).requires_grad_()
    torch.testing.assert_close(run("residual"), run("mean"), rtol=1e-9, atol=1e-12)


def test_training_leaves_the_plain_residual() -> None:
    """What no sum over depth gives: the answer stands in the first layer's output, and later ones, frozen, bury it."""
    torch.manual_seed(0)
    stack = AttnResStack([Layer() for _ in range(4)], D, 1).double().requires_grad_(False)
    nn.init.normal_(stack.layers["2"].matrix.weight, std=4.0)
    norm = RMSNorm(D, 1e-6).double().requires_grad_(False)
    x = inputs(64)
    target = norm(stack.layers["0"](x) - x)
    mixers = [*stack.mixers.parameters(), *stack.output.parameters()]
    for p in mixers:
        p.requires_grad_()
    optimizer = torch.optim.Adam(mixers, lr=0.1)
    losses = []
    for _ in range(60):
        loss = (norm(stack(x)) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert stack.output.query.abs().max() > 0.5


def test_in_bfloat16_it_starts_no_further_from_the_truth_than_the_layers_alone() -> None:
    stack = make(2, count=12, learned=False)
    narrow = copy.deepcopy(stack).bfloat16()
    x = inputs(50).bfloat16()
    truth, alone = x.double(), x
    exact = copy.deepcopy(narrow).double()
    for a, b in zip(exact.layers.values(), narrow.layers.values()):
        truth, alone = a(truth), b(alone)
    got = narrow(x)
    assert got.dtype == torch.bfloat16
    assert (got.double() - truth).abs().mean() < 1.5 * (alone.double() - truth).abs().mean()


def test_autocast_leaves_the_stream_in_float32() -> None:
    stack = make(2).float()
    x = inputs(4).float()
    want = stack(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = stack(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert not torch.equal(got, want)  # the layers ran in bfloat16


# What a stack is given


def test_options_reach_every_layer() -> None:
    stack, x = make(2), inputs(3)
    torch.testing.assert_close(stack(x, gain=0.0), stack.output([x, 0 * x, 0 * x, 0 * x]))
    assert not torch.allclose(stack(x, gain=0.5), stack(x))


def test_recomputed_layers_have_the_same_gradients() -> None:
    class Recomputed(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)

    stack, x = make(2), inputs(3).requires_grad_()
    want = gradients(stack(x), stack, x)
    for name, layer in stack.layers.items():
        stack.layers[name] = Recomputed(layer)
    assert all(a.equal(b) for a, b in zip(gradients(stack(x), stack, x), want))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_is_the_same(backend: str) -> None:
    stack, x = make(2), inputs(3).requires_grad_()
    compiled = torch.compile(stack, backend=backend)
    want = stack(x)
    got = compiled(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(got, stack, x), gradients(want, stack, x), rtol=1e-10, atol=1e-12)
    torch.compiler.reset()


def test_one_layer_many_times_over() -> None:
    layer = Layer().double()
    stack = AttnResStack([layer] * 4, D, 2).double()
    x = inputs(3)
    torch.testing.assert_close(stack(x), layer(layer(layer(layer(x)))))


@pytest.mark.parametrize("block_size", [0, -1, 1.0, "2", True, None])
def test_a_block_has_whole_layers(block_size: object) -> None:
    with pytest.raises(ConfigError, match="block_size: expected a whole number of layers from 1 on, got"):
        AttnResStack([Layer()], D, block_size)


def test_what_does_not_fit_is_named() -> None:
    class Bad(nn.Module):
        def __init__(self, f) -> None:
            super().__init__()
            self.f = f

        def forward(self, x: Tensor) -> object:
            return self.f(x)

    for layers, got in (([], "none"), ([torch.tanh], "a list"), (nn.Tanh(), "a Tanh"), ({"a": nn.Tanh()}, "a dict")):
        with pytest.raises(ConfigError, match=f"layers: expected a list of one or more modules, got {got}; give"):
            AttnResStack(layers, D, 2)
    for size in (0, "8", None):
        with pytest.raises(ConfigError, match="hidden_size: expected the width of the layers, got"):
            AttnResStack([Layer()], size, 2)
    with pytest.raises(ConfigError, match="start: expected 'mean' or 'residual', got 'zero'"):
        AttnResStack([Layer()], D, 2, start="zero")
    x = torch.randn(3, D)
    for f, message in (
        (lambda x: (x, None), r"layers\[1\]: expected to return a tensor \[3, 8\] like its input, got tuple"),
        (lambda x: x[:1], r"layers\[1\]: expected to return a tensor \[3, 8\] like its input, got \[1, 8\]"),
        (lambda x: x.add_(1), r"layers\[1\]: expected a layer that leaves its input alone"),
    ):
        with pytest.raises(ShapeError, match=message), torch.no_grad():
            AttnResStack([nn.Identity(), Bad(f)], D, 1)(x)
    with pytest.raises(ShapeError, match=r"query: expected \[7\], the width of the sources, got \[8\]"):
        AttnResStack([nn.Identity()], D, 1)(torch.randn(3, 7))
    with pytest.raises(ShapeError, match="forward: expected one input by position, got 2; give options by name"):
        AttnResStack([nn.Identity()], D, 1)(x, x)
    with pytest.raises(ShapeError, match="forward: expected tensors, got tuple; unpack what an earlier stage returned"):
        make(2).split([3])[1]((x, x, x))


# Stages of a pipeline


def cuts(count: int) -> list[tuple[int, ...]]:
    """All ways to cut a stack."""
    return [starts for n in range(count) for starts in combinations(range(1, count), n)]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7])
def test_every_cut_is_the_whole_stack(block_size: int) -> None:
    """Each stage in a graph of its own, as in another process: gradients of all sources go back by hand."""
    stack = make(block_size)
    x = inputs(2, 3).requires_grad_()
    y = stack(x)
    dy = inputs(2, 3).sin()
    want = gradients(y, stack, x)
    for starts in cuts(LAYERS):
        stages = stack.split(starts)
        stack.zero_grad()
        given, made = [], [(x.detach(),)]
        for stage in stages:
            assert len(made[-1]) == DepthStream.depth(block_size, stage.first)
            given.append([source.detach().requires_grad_() for source in made[-1]])
            out = stage(*given[-1])
            made.append(out if isinstance(out, tuple) else (out,))
        assert made[-1][0].equal(y), starts
        back = [dy]
        for sources, outputs in zip(reversed(given), reversed(made)):
            torch.autograd.backward(outputs, back)
            back = [source.grad for source in sources]
        got = [back[0], *(p.grad for p in stack.parameters())]
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13, msg=lambda m: f"cut at {starts}: {m}")  # noqa: B023
        names = [name for stage in stages for name, _ in stage.named_parameters()]
        assert sorted(names) == sorted(name for name, _ in stack.named_parameters())


def test_a_stage_hands_on_tensors_of_its_own() -> None:
    first, second, _ = make(2).split([2, 4])
    for learning in (True, False):
        sources = first(inputs(3).requires_grad_(learning))
        out = second(*sources)
        assert [any(a is b for b in sources) for a in out] == [False] * 3


def test_only_a_whole_stack_is_cut_and_no_stage_is_empty() -> None:
    stack = make(2)
    for starts in ([0], [6], [3, 3], [4, 2], [-1], 3, "3", [2.0], None):
        with pytest.raises(ConfigError, match="starts: expected a list of rising ones from 1 to 5, got"):
            stack.split(starts)
    for stage in stack.split([3]):
        with pytest.raises(ConfigError, match="split: expected the whole stack, got a stage from layer"):
            stage.split([1])
    with pytest.raises(ShapeError, match="sources: expected 3 of them before sublayer 3 in blocks of 2, got 1"):
        stack.split([3])[1](inputs(3))


SCHEDULES = {
    "one after another": (ScheduleGPipe, 1),
    "forward and backward by turns": (Schedule1F1B, 1),
    "two stages a rank": (ScheduleInterleaved1F1B, 2),
}
MICRO = 4


def run_pipeline(rank: int, ranks: int) -> None:
    """torch's own schedules, which send what a stage returns; several micro-batches are under way at once."""
    x, dy = inputs(2 * MICRO, 3), inputs(2 * MICRO, 3).sin()

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y * target).sum()

    for block_size in (1, 2, 3, 4):
        whole = make(block_size)
        y = whole(x)
        loss(y, dy).backward()
        for name, (schedule, each) in SCHEDULES.items():
            for starts in combinations(range(1, LAYERS), ranks * each - 1):
                stack = make(block_size)
                parts = stack.split(starts)
                stages = [
                    PipelineStage(parts[i], i, len(parts), torch.device("cpu")) for i in range(rank, len(parts), ranks)
                ]
                run = schedule(stages if each > 1 else stages[0], n_microbatches=MICRO, loss_fn=loss, scale_grads=False)
                last = stages[-1].stage_index == len(parts) - 1
                got = run.step(*([x] if rank == 0 else []), **({"target": dy} if last else {}))
                where = f"{name}, cut at {starts}, blocks of {block_size}, rank {rank}"
                if last:
                    torch.testing.assert_close(got, y, rtol=1e-12, atol=1e-12, msg=where)
                for stage in stages:
                    for key, p in stage.submod.named_parameters():
                        want = whole.get_parameter(key).grad
                        torch.testing.assert_close(p.grad, want, rtol=1e-10, atol=1e-12, msg=f"{key}, {where}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pipeline_of_processes_is_the_whole_stack(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, tmp_path, run_pipeline)


def run_sharded(rank: int, ranks: int) -> None:
    """In float64; and with parameters cast to bfloat16, against a bfloat16 model, up to the order of its sums."""
    rows = inputs(ranks, 3).split(1)
    for block_size, dtype in ((1, f64), (2, f64), (4, f64), (2, torch.bfloat16)):
        wide = f64 if dtype == f64 else torch.float32
        whole, stack = make(block_size).to(dtype), make(block_size).to(wide)
        want = {name: torch.zeros_like(p, dtype=wide) for name, p in whole.named_parameters()}
        for row in rows:
            whole.zero_grad()
            whole(row.to(dtype)).cos().sum().backward()
            for name, p in whole.named_parameters():
                want[name] += p.grad
        for part in (*stack.layers.values(), stack):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide))
        stack(rows[rank].to(wide)).cos().sum().backward()
        for name, p in stack.named_parameters():
            assert isinstance(p.grad, DTensor)
            off = (p.grad.full_tensor() * ranks - want[name]).norm()
            assert off <= (1e-12 if dtype == f64 else 0.05) * want[name].norm(), f"{name}, {block_size}, {dtype}: {off}"


@pytest.mark.slow
def test_a_sharded_stack_has_the_gradients_of_a_whole_one(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, run_sharded)

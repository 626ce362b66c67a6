"""Finished blocks kept in less memory: by the depth stream, a stack, and the model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Config, K3Model, presets
from perilune.nn import AttnResStack, BlockAttnRes, DepthStream, LowRankBank, RMSNorm
from perilune.ops import Stored

D = 12
f64 = torch.float64


def bank_of(form: str, learned: bool = True) -> str | LowRankBank | None:
    if form != "rank":
        return None if form == "whole" else form
    torch.manual_seed(2)
    bank = LowRankBank(D, 5, learned=learned).double()
    with torch.no_grad():
        bank.up += 0.1 * torch.randn_like(bank.up)
    return bank


def rounded(x: Tensor, bank: str | LowRankBank | None) -> Tensor:
    """What a bank makes of a source, differentiably."""
    if bank is None:
        return x
    if isinstance(bank, LowRankBank):
        return x @ bank.down @ bank.up
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True) / 448 if bank == "float8" else 1.0
        read = (x / scale).to(torch.float8_e4m3fn if bank == "float8" else torch.bfloat16).to(x.dtype) * scale
    return x + (read - x).detach()


def mixers_of(count: int, dtype: torch.dtype = f64) -> nn.ModuleList:
    torch.manual_seed(4)
    mixers = nn.ModuleList(BlockAttnRes(D) for _ in range(count)).to(dtype)
    for mixer in mixers:
        nn.init.normal_(mixer.query)
    return mixers


@pytest.mark.parametrize("form", ["whole", "bfloat16", "float8", "rank"])
@pytest.mark.parametrize("period", [1, 2, 4, 6, 100])
def test_the_stream_is_a_list_of_what_the_bank_gives(period: int, form: str) -> None:
    """Blocks of which some are complete and some are not; also with a break before every sublayer."""
    mixers, bank = mixers_of(9), bank_of(form)
    x, matrices = torch.randn(2, 3, D, dtype=f64).requires_grad_(), torch.randn(8, D, D, dtype=f64).requires_grad_()
    wanted = [x, matrices, *mixers.parameters(), *([bank.up] if form == "rank" else [])]

    def by_list() -> Tensor:
        done, live = [], x
        for n, matrix in enumerate(matrices):
            begins = n % period == 0
            h = mixers[n]([*done, rounded(live, bank) if begins else live])
            if begins:
                done, live = [*done, rounded(live, bank)], torch.zeros_like(x)
            live = live + torch.tanh(h @ matrix)
        return mixers[-1]([*done, live])

    def by_stream(broken: bool) -> Tensor:
        stream = DepthStream(x, period, bank)
        for n, matrix in enumerate(matrices):
            if broken:
                stream = DepthStream.resume(stream.handed_over(), period, n, bank)
            stream.add(torch.tanh(stream.read(mixers[n]) @ matrix))
        return stream.mixed(mixers[-1])

    expected = by_list()
    dout = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, wanted, dout)
    for broken in (False, True):
        got = by_stream(broken)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(torch.autograd.grad(got, wanted, dout), expected_gradients, rtol=1e-9, atol=1e-10)


def test_a_bank_of_bfloat16_leaves_a_bfloat16_stream_as_it_is() -> None:
    mixers = mixers_of(3, torch.bfloat16)
    stream = DepthStream(torch.randn(2, D).bfloat16(), 1, "bfloat16")
    for mixer in mixers:
        stream.add(stream.read(mixer))
    assert all(isinstance(source, Tensor) for source in stream.bank)


@pytest.mark.parametrize("form", ["bfloat16", "float8"])
def test_the_live_sum_is_never_rounded(form: str) -> None:
    stream = DepthStream(torch.randn(2, D), 2, form)
    mixers = mixers_of(5, torch.float32)
    total = None
    for n, mixer in enumerate(mixers[:4]):
        y = stream.read(mixer) * (n + 1)
        stream.add(y)
        total = y if n % 2 == 0 else total + y
        assert torch.equal(stream.live, total)
    assert torch.equal(stream.sources[-1], total)
    assert all(isinstance(source, Stored) for source in stream.bank)


def kept_bytes(call: Callable[[], Tensor], beside: nn.Module) -> int:
    """Of all storages that the graph of a call holds, parameters left out."""
    own, found = {p.untyped_storage().data_ptr() for p in beside.parameters()}, {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return sum(found.values())


@pytest.mark.parametrize(("form", "each"), [("whole", 4 * 64), ("bfloat16", 2 * 64), ("float8", 64 + 4)])
def test_with_every_output_a_source_the_graph_keeps_what_the_bank_does(form: str, each: int) -> None:
    """Sublayers that keep nothing themselves; the mixers keep two numbers a row and source."""
    rows, depth = 200, 8
    mixers = nn.ModuleList(BlockAttnRes(64) for _ in range(depth + 1))
    x = torch.randn(rows, 64, requires_grad=True)

    def run() -> Tensor:
        stream = DepthStream(2 * x, 1, None if form == "whole" else form)
        for mixer in mixers[:-1]:
            stream.add(stream.read(mixer) * 0.5)
        return stream.mixed(mixers[-1])

    numbers = sum(2 * 4 * rows * (n + 1) for n in range(depth + 1))
    last = 4 * 64 * rows  # the live sum that the output mixes
    expected = depth * rows * each + numbers + last
    assert expected <= kept_bytes(run, mixers) <= expected * 1.02 + 1024


def stack_of(bank: str | LowRankBank | None) -> AttnResStack:
    torch.manual_seed(1)
    layers = [nn.Sequential(RMSNorm(D, 1e-6), nn.Linear(D, D)) for _ in range(5)]
    stack = AttnResStack(layers, D, 2, adds_input=False, bank=bank).double()
    for part in stack.modules():
        if isinstance(part, BlockAttnRes):
            nn.init.normal_(part.query)
    return stack


@pytest.mark.parametrize("form", ["bfloat16", "float8", "rank"])
def test_a_stack_keeps_its_bank(form: str) -> None:
    x = torch.randn(4, D, dtype=f64)
    stack, plain = stack_of(bank_of(form)), stack_of(None)
    stream = DepthStream(x, 2, stack.bank)
    for name, layer in stack.layers.items():
        stream.add(layer(stream.read(stack.mixers[name])))
    y = stack(x)
    torch.testing.assert_close(y, stream.mixed(stack.output), rtol=1e-12, atol=1e-12)
    assert (y - plain(x)).norm() > 1e-4 * y.norm()
    y.square().sum().backward()
    assert all(p.grad is not None for p in stack.parameters())
    assert ("bank.up" in dict(stack.named_parameters())) == (form == "rank")
    loaded = stack_of(bank_of(form))
    loaded.load_state_dict(stack.state_dict())
    assert torch.equal(loaded(x), y)
    with pytest.raises(ConfigError, match="bank: expected none in a stack that is split"):
        stack.split([2])


def test_a_fitted_basis_loses_nothing_of_blocks_of_its_rank_and_least_of_others() -> None:
    torch.manual_seed(0)
    blocks = torch.randn(2, 50, 4) @ torch.randn(4, D)
    bank = LowRankBank(D, 4)
    random_loss = (bank(blocks).read() - blocks).norm() / blocks.norm()
    bank.fit(blocks)
    assert (bank(blocks).read() - blocks).norm() <= 1e-5 * blocks.norm()
    assert random_loss > 0.5
    torch.testing.assert_close(bank.down.T @ bank.down, torch.eye(4), rtol=0, atol=1e-5)
    full = LowRankBank(D, D)
    torch.testing.assert_close(full(blocks).read(), blocks)


@pytest.mark.parametrize("rank", [0, D + 1, 2.5])
def test_a_rank_that_does_not_fit_is_refused(rank: object) -> None:
    with pytest.raises(ConfigError, match=f"rank: expected from 1 to hidden_size \\({D}\\), got {rank}"):
        LowRankBank(D, rank)


def test_an_unknown_bank_is_refused() -> None:
    for make in (lambda: DepthStream(torch.zeros(2, D), 2, "int4"), lambda: stack_of("int4")):
        with pytest.raises(ConfigError, match="bank: expected 'bfloat16' or 'float8', got 'int4'"):
            make()


# The model


def config(bank: str | None, size: int | str = 2) -> K3Config:
    return presets.nano().replace(attn_res_bank=bank, attn_res_block_size=size, num_nextn_predict_layers=0)


def model_of(bank: str | None, size: int | str = 2) -> K3Model:
    torch.manual_seed(0)
    model = K3Model(config(bank, size))
    for part in model.modules():
        if isinstance(part, BlockAttnRes):
            nn.init.normal_(part.query, std=0.3)
    return model


def tokens(T: int) -> Tensor:
    return torch.randint(0, 2048, (1, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [1, "full"])
@pytest.mark.parametrize("bank", ["bfloat16", "float8"])
def test_the_model_recomputes_to_the_same_bits(bank: str, size: int | str) -> None:
    whole, ids = model_of(bank, size).train(), tokens(20)
    grads = {}
    for how in ("none", "sublayers", "layers", "blocks"):
        model = copy.deepcopy(whole)
        model.recompute_activations(how)
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads[how] = [loss.detach(), *(p.grad for p in model.parameters())]
    for how, values in grads.items():
        assert all(torch.equal(x, y) for x, y in zip(values, grads["none"])), how
    plain = model_of(None, size).train()
    assert plain(ids, labels=ids).loss != grads["none"][0]


@pytest.mark.parametrize("bank", ["bfloat16", "float8"])
def test_packed_documents_and_decoding_see_the_same_bank(bank: str) -> None:
    model, ids = model_of(bank).eval(), tokens(24)
    with torch.no_grad():
        packed = model(ids, cu_seqlens=[0, 10, 24]).logits
        alone = torch.cat([model(ids[:, :10]).logits, model(ids[:, 10:]).logits], 1)
        cache = model.new_cache(1)
        steps = [model(ids[:, i : i + 1], cache=cache).logits for i in range(10)]
    # a last bit decides on which side of a border of float8 a value falls
    near = {"rtol": 0, "atol": 2e-2 * float(alone.abs().max())}
    torch.testing.assert_close(packed, alone, **near)
    torch.testing.assert_close(torch.cat(steps, 1), alone[:, :10], **near)


def test_the_key_is_absent_by_default_and_comes_back_from_a_file(tmp_path) -> None:
    assert "attn_res_bank" not in config(None).to_hf()["perilune"]
    assert K3Config.from_hf(config("float8").to_hf()) == config("float8")
    model, ids = model_of("float8").eval(), tokens(8)
    model.save_pretrained(tmp_path / "model")
    again = K3Model.from_pretrained(tmp_path / "model").eval()
    assert again.config.attn_res_bank == "float8"
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(ConfigError, match="attn_res_bank: expected null with the plain residual"):
        config("float8", None)
    with pytest.raises(ConfigError, match="attn_res_bank"):
        K3Config.from_dict({**config(None).to_dict(), "attn_res_bank": "int4"})


def test_blocks_that_are_recomputed_outlast_in_the_bank_alone() -> None:
    ids, bytes_of = tokens(64), {}
    for bank in (None, "bfloat16", "float8"):
        model = model_of(bank, 1).train()
        model.recompute_activations("blocks")
        held = []
        inner = type(model.model)._climb_by_sublayers
        model.model._climb_by_sublayers = lambda *args, inner=inner, model=model, held=held: (
            held.append(args[5:]) or inner(model.model, *args)
        )
        model(ids, labels=ids)
        bytes_of[bank] = sum(x.nbytes for x in held[-1])
    D, blocks = config(None).hidden_size, len(held[-1])
    assert blocks == config(None).num_hidden_layers
    assert bytes_of == {None: 64 * blocks * 4 * D, "bfloat16": 64 * blocks * 2 * D, "float8": 64 * blocks * (D + 4)}

"""The peer of `perilune bench train`: with plain parts in place of flash-linear-attention's it is `K3Model`."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from perilune import recipes
from perilune.bench import runner, training
from perilune.bench.peer.model import PeerModel
from perilune.bench.peer.parts import Parts, from_fla, missing
from perilune.bench.peer.trainer import PeerTrainer
from perilune.bench.training import MadeUp, Ours, Training, Work, compared, fault
from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Model, presets
from perilune.models.k3.flops import flops_per_token
from perilune.ops import BoundedGate, SoftplusGate, kda, short_conv
from tiny_run import run

CPU = torch.device("cpu")
WORK = Work("tiny", 16, 96, by="peer")
EVEN = {"moe_intermediate_size": 8, "routed_expert_hidden_size": 16}  # widths that torch's grouped products take
LAYERS = {"hidden_act": "silu", "num_hidden_layers": 4, "layer_types": ("kda", "kda", "kda", "mla")}


class Attention(nn.Module):
    """Signature, parameters and result of flash-linear-attention's `KimiDeltaAttention`."""

    def __init__(self, hidden_size, head_dim, num_heads, conv_size, norm_eps, safe_gate, lower_bound):
        super().__init__()
        self.heads, self.bound = (num_heads, head_dim), lower_bound
        assert safe_gate == (lower_bound is not None)
        width = num_heads * head_dim
        for name in "qkv":
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
            setattr(self, f"{name}_conv1d", nn.Conv1d(width, width, conv_size, groups=width, bias=False))
        self.f_proj, self.g_proj = (
            nn.Sequential(nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, width, bias=bias))
            for bias in (False, True)
        )
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(num_heads))
        self.dt_bias = nn.Parameter(torch.full((width,), -5.0))
        self.o_norm = Norm(head_dim, eps=norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden_states, *, cu_seqlens):
        def convolved(name):
            x = getattr(self, f"{name}_proj")(hidden_states)
            y = short_conv(x, getattr(self, f"{name}_conv1d").weight, cu_seqlens=cu_seqlens)[0]
            return y.unflatten(-1, self.heads)

        z, gate = (p(hidden_states).unflatten(-1, self.heads) for p in (self.f_proj, self.g_proj))
        bias = self.dt_bias.view(self.heads)
        rule = SoftplusGate(self.A_log, bias) if self.bound is None else BoundedGate(self.A_log, bias, self.bound)
        o, _ = kda(
            *map(convolved, "qkv"), z, self.b_proj(hidden_states), gate=rule, normalize_qk=True, beta_logits=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return self.o_proj((self.o_norm(o) * torch.sigmoid(gate)).flatten(2)), None, None


class FeedForward(nn.Module):
    def __init__(self, hidden_size, *, intermediate_size):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.RMSNorm):
    def __init__(self, size, *, eps):
        super().__init__(size, eps)

    def forward(self, x):
        return F.rms_norm(x.to(self.weight.dtype), x.shape[-1:], self.weight, self.eps).to(x.dtype)


def mixture(query, sources, key_weight, outer_weight, *, rms_eps):
    v = torch.stack(list(sources)).to(query.dtype)
    a = (F.rms_norm(v, v.shape[-1:], key_weight, rms_eps) @ query).softmax(0)
    return F.rms_norm((a[..., None] * v).sum(0), v.shape[-1:], outer_weight, rms_eps).to(sources[0].dtype)


PLAIN = Parts(
    attention=Attention,
    norm=Norm,
    feed_forward=FeedForward,
    swiglu=lambda gate, up: F.silu(gate) * up,
    mixture=mixture,
    loss=lambda x, targets, weight: F.cross_entropy((x @ weight.to(x.dtype).T).to(weight.dtype), targets),
)


def contender(**changes):
    made = training.Contender(lambda run, feed, device: PeerTrainer(run, feed, device, PLAIN), ("torch",))
    return replace(made, **changes)


def small(**changes):
    peer = changes.pop("peer", contender())
    return Training(
        **{
            "works": (WORK,), "contenders": {"perilune": training.CONTENDERS["perilune"], "peer": peer},
            "device": CPU, "warmup": 1, "timed": 15, "profiled": 1, **changes,
        }
    )  # fmt: skip


@pytest.fixture
def _tiny(monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "tiny", lambda: run(model=EVEN))


def same_weights(config, parts=PLAIN, dtype=torch.float32):
    """A `K3Model` in which every parameter matters, and the peer with its weights."""
    torch.manual_seed(0)
    ours = K3Model(config).train()
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if "norm" in name:
                p.normal_(1, 0.2)
            elif name.endswith("query"):
                p.normal_(std=3 * p.numel() ** -0.5)
            elif name.endswith("dt_bias"):
                p.uniform_(-6, -3)
        for balancer in ours.balancers().values():
            balancer.bias.normal_(std=0.05)
    peer = PeerModel(config, parts, dtype).train()
    weights = {peers_name(name): p for name, p in ours.state_dict().items()}
    # what else a balancer keeps is its own
    peer.load_state_dict({name: weights[name].view_as(p) for name, p in peer.state_dict().items()})
    return ours, peer


def peers_name(name):
    for old, new in (("f_a_proj", "f_proj.0"), ("f_b_proj", "f_proj.1"), ("balancer.bias", "bias")):
        name = name.replace(old, new)
    return name


def written_out(rows, matrices, *, offs):
    """`grouped_mm`, also for float64."""
    return torch.cat([x @ w for x, w in zip(rows.tensor_split(offs[:-1].tolist()), matrices)])


@pytest.mark.parametrize("lengths", [(16, 16, 16), (1, 20, 27), (48,)], ids=str)
@pytest.mark.parametrize("gate", [-5.0, None], ids=["bounded", "softplus"])
def test_with_the_same_weights_it_is_our_model(lengths, gate, monkeypatch):
    monkeypatch.setattr(F, "grouped_mm", written_out)
    made = run(model={**LAYERS, "attn_res_block_size": 1, "initializer_range": 0.2}).model
    made = made.replace(
        q_lora_rank=12 if gate else None, linear_attn_config=made.linear_attn_config.replace(gate_lower_bound=gate)
    )
    ours, peer = (model.double() for model in same_weights(made, dtype=torch.float64))
    ids, targets = torch.randint(300, (2, 1, 48))
    targets[0, ::5] = -100
    cu = torch.tensor([0, *lengths]).cumsum(0)
    expected = ours(ids, targets=targets, cu_seqlens=cu).loss
    expected.backward()
    loss = peer(ids, targets, cu, lengths)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    gradients = {peers_name(name): p.grad for name, p in ours.named_parameters()}
    assert gradients.keys() == dict(peer.named_parameters()).keys()
    for name, p in peer.named_parameters():
        exact = gradients[name].view_as(p)
        assert (p.grad - exact).norm() <= 1e-10 * exact.norm(), name


def test_products_of_all_experts_at_once_are_those_of_each(monkeypatch):
    _, peer = same_weights(run(model=EVEN).model)
    moe = peer.model.layers[1].block_sparse_moe
    x = torch.randn(1, 50, 32, requires_grad=True)
    dy = torch.randn_like(x)

    def both():
        y = moe(x)
        return y, *torch.autograd.grad(y, [x, *moe.parameters()], dy)

    got = both()
    monkeypatch.setattr(F, "grouped_mm", written_out)
    for one, expected in zip(got, both()):
        assert torch.allclose(one, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["1b", "small", "nano"])
def test_as_many_parameters_as_the_preset(name):
    config = presets.get(name)
    with torch.device("meta"):
        ours, peer = K3Model(config), PeerModel(config, PLAIN)
    shapes = {peers_name(name): p.numel() for name, p in ours.named_parameters()}
    assert {name: p.numel() for name, p in peer.named_parameters()} == shapes


class Projections(Attention):
    """Without the recurrence, which is not made of products that torch could count."""

    def forward(self, hidden_states, *, cu_seqlens):
        x = hidden_states
        z = sum(p(x) for p in (self.q_proj, self.k_proj, self.v_proj, self.f_proj, self.g_proj))
        return self.o_proj(z) + self.b_proj(x).sum(-1, keepdim=True), None, None


def test_as_many_operations_as_the_preset():
    """On no device; and what torch's counter does not see, which is of the same sizes, taken from our formula."""
    config, tokens = presets.get("1b"), 8192
    with torch.device("meta"):
        peer = PeerModel(config, replace(PLAIN, attention=Projections), torch.bfloat16).to(torch.bfloat16)
        ids, cu = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(2, dtype=torch.long)

    def grouped(rows, matrices, *_, **__):
        return 2 * rows[0] * matrices[-2] * matrices[-1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped}) as counter:
        peer(ids, ids, cu, [tokens])
    counts = {str(op): n / tokens for op, n in counter.get_flop_counts()["Global"].items()}
    ours = flops_per_token(config, tokens, kda_chunk=0)
    unseen = sum(ours[name] for name in ("KDA recurrence", "short convolutions", "attention residuals"))
    attention, routed = ours["MLA attention"], ours["routed experts"]  # the former counted without the mask
    assert counts["aten.mm"] == pytest.approx(sum(ours.values()) - unseen - attention - routed)
    assert counts["aten._grouped_mm"] == pytest.approx(routed, rel=0.01)
    total = counts["aten.mm"] + counts["aten._grouped_mm"] + unseen + attention
    assert total == pytest.approx(sum(ours.values()), rel=0.01)


def test_experts_without_tokens_are_left_alone():
    made = run(model={**EVEN, "hidden_act": "silu", "num_experts": 40}).model
    _, peer = same_weights(made)
    ids = torch.randint(300, (1, 3))
    peer(ids, ids, torch.tensor([0, 3]), [3]).backward()
    moe = peer.model.layers[1].block_sparse_moe
    assert moe.loads.sum() == 3 * moe.top_k
    idle = moe.loads == 0
    assert idle.sum() >= 34
    for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3):
        assert w.grad[idle].eq(0).all()
        assert w.grad[~idle].abs().amax((1, 2)).gt(0).all()
    before = moe.bias.clone()
    moe.balance()
    assert (moe.bias - before)[idle].gt(0).all()
    assert (moe.bias - before)[moe.loads > 1].lt(0).all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_its_loss_falls_in_a_step_and_over_a_run(precision):
    made = run(model=EVEN, precision=precision)
    feed = MadeUp(made)
    trainer = PeerTrainer(made, feed, CPU, PLAIN)
    batch = feed.next()
    first, second = (trainer.step(batch).item() for _ in range(2))
    assert second < first
    losses = []
    trainer.train(12, losses.append)
    assert len(losses) == 12
    assert fault(losses) == ""
    assert trainer.tokens_done == 14 * 96
    kinds = {p.dtype for p in trainer.model.parameters()} | {
        s["exp_avg"].dtype for s in trainer.optimizer.state.values()
    }
    assert kinds == {torch.float32}


def test_the_same_boundaries_are_the_same_tensor():
    made = run(model=EVEN)
    trainer = PeerTrainer(made, MadeUp(made), CPU, PLAIN)
    first, again, other = torch.tensor([0, 4, 8]), torch.tensor([0, 4, 8]), torch.tensor([0, 8])
    held = trainer._on_device(first)
    assert trainer._on_device(again) is held
    assert torch.equal(trainer._on_device(other), other)


def test_precision_of_products_is_what_it_was_before():
    made = run(model=EVEN)
    trainer = PeerTrainer(made, MadeUp(made), CPU, PLAIN)
    before, seen = torch.get_float32_matmul_precision(), []
    trainer.train(1, lambda loss: seen.append(torch.get_float32_matmul_precision()))
    with pytest.raises(ZeroDivisionError):
        trainer.train(1, lambda loss: 1 // 0)
    assert (seen, torch.get_float32_matmul_precision()) == (["high"], before)


@pytest.mark.usefixtures("_tiny")
def test_it_stands_beside_ours(capsys):
    case = small(works=(replace(WORK, by="perilune"), WORK))
    result = case.run()
    assert result["passed"]
    own, peer = result["times"]
    assert (own["by"], peer["by"], peer["label"]) == ("perilune", "peer", "tiny, 6 x 16 tokens, peer")
    assert own["flops_per_token"] == peer["flops_per_token"]
    assert peer["versions"] == {"torch": runner.installed("torch")}
    assert peer["tokens_per_s"] == pytest.approx(96 / peer["median_s"])
    assert {"experts", "attention", "optimizer", "products"} < set(peer["kinds"])
    runner.show(case.parts(result), True)
    printed = capsys.readouterr().out
    ratio = own["tokens_per_s"] / peer["tokens_per_s"]
    assert f"tiny, 6 x 16 tokens: {ratio:.2f} times the tokens a second of peer" in printed
    assert f"torch {torch.__version__.split('+')[0]}" in printed


def test_like_is_compared_with_like():
    rows = [
        {"recipe": "a", "context": 8, "tokens": tokens, "by": by, "label": f"{by} {tokens}", "tokens_per_s": speed}
        for tokens, by, speed in ((8, "perilune", 30.0), (16, "perilune", 60.0), (16, "peer", 40.0), (32, "peer", 1.0))
    ]
    assert list(compared(rows)) == ["perilune 16: 1.50 times the tokens a second of peer"]


def broken(run, feed, device):
    raise ImportError("no module named 'einops'\nat all")


class Backwards(Ours):
    def train(self, steps, watch):
        told = iter(range(steps))
        super().train(steps, lambda loss: watch(1.0 + next(told)))


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (contender(missing=lambda: "peer is not installed"), "peer is not installed"),
        (contender(loop=broken), "ImportError: no module named 'einops'"),
        (contender(loop=Backwards), "expected a loss that falls, got 3.0000, then 14.0000"),
    ],
    ids=["missing", "broken", "wrong"],
)
def test_a_peer_that_cannot_is_named_and_ours_is_timed(peer, said, capsys):
    case = small(peer=peer, works=(WORK, replace(WORK, by="perilune")))
    result = case.run()
    assert result["passed"]
    assert result["times"][0]["skipped"] == said
    assert result["times"][1]["runs"] == 15
    runner.show(case.parts(result), True)
    assert f"tiny, 6 x 16 tokens, peer: skipped: {said}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("_tiny")
def test_ours_has_to_work():
    ours = {"perilune": contender(loop=broken)}
    with pytest.raises(ImportError):
        small(contenders=ours, works=(replace(WORK, by="perilune"),)).run()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: expected 0, got 1"),
        ({"attn_res_block_size": None}, "attn_res_block_size: expected a number, got none"),
        ({"moe_renormalize": False}, "moe_renormalize: expected True, got False"),
    ],
)
def test_a_model_that_it_has_no_form_for(changes, said):
    with pytest.raises(ConfigError, match=said):
        PeerModel(run(model=changes).model, PLAIN)


def test_its_parts_are_imported_when_it_is_built():
    loaded = "print([name for name in sys.modules if name.split('.')[0] in ('fla', 'einops')])"
    code = f"import sys, perilune.bench.cases.train; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_gpu_compares_the_preset_at_every_size():
    peers = {(work.recipe, work.context, work.tokens) for work in training.ON_GPU if work.by != "perilune"}
    assert peers == {("1b_8k", 8192, tokens) for tokens in (8192, 32_768, 65_536)}
    assert {work.by for work in (*training.ON_GPU, *training.ON_CPU)} == set(training.CONTENDERS)
    assert training.CONTENDERS["flash-linear-attention"].missing() == missing()


def assert_no_worse_in_bfloat16(config, parts, lengths, device):
    """Loss and gradients under autocast, by their distance from ours in float32, against that of ours under autocast.

    Every expert is chosen, for bfloat16 scores of the peer may choose others.
    """
    config = config.replace(num_experts=config.num_experts_per_token)
    ours, peer = (model.to(device) for model in same_weights(config, parts, torch.bfloat16))
    ids, targets = torch.randint(config.vocab_size, (2, 1, sum(lengths)), device=device)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    results = []
    for model, mixed in ((ours, False), (ours, True), (peer, True)):
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            if model is ours:
                loss = ours(ids, targets=targets, cu_seqlens=cu).loss
            else:
                loss = peer(ids, targets, cu.to(device), lengths)
        loss.backward()
        gradients = {peers_name(name): p.grad.flatten().clone() for name, p in model.named_parameters()}
        results.append({"loss": loss.detach(), **gradients})
    exact, baseline, got = results
    assert exact.keys() == got.keys()
    for name, x in exact.items():
        off, allowed = (got[name] - x).norm(), 4 * (baseline[name] - x).norm() + 0.02 * x.norm()
        assert off <= allowed, f"{name}: expected error <= {allowed:.1e}, got {off:.1e} of {x.norm():.1e}"


def test_in_bfloat16_it_is_as_near_as_ours():
    sizes = {"hidden_size": 64, "attn_res_block_size": 1, "moe_intermediate_size": 32, "routed_expert_hidden_size": 32}
    assert_no_worse_in_bfloat16(run(model={**LAYERS, **sizes}).model, PLAIN, [100, 1, 199], CPU)


@pytest.mark.gpu
@pytest.mark.skipif(bool(missing()), reason="flash-linear-attention is not installed")
def test_with_flash_linear_attention_it_is_our_model():
    """At the widths of `1b`, so that what was tuned here need not be for the benchmark."""
    config = presets.get("1b").replace(**LAYERS, vocab_size=2048)
    assert_no_worse_in_bfloat16(config, from_fla(), [300, 1, 699], torch.device("cuda"))

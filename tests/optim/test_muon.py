import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perilune.core.errors import ConfigError
from perilune.models.k3 import K3Model, presets
from perilune.optim import Blocks, PerHeadMuon, Role, Roles, muon
from perilune.optim.newton_schulz import COEFFICIENTS


def param(*shape, dtype=torch.float64):
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


def plain_muon(W, G, M, lr, momentum=0.95, nesterov=True, weight_decay=0.1):
    """One block W [n, m], by the book; returns the new weight and momentum."""
    M = momentum * M + G
    N = G + momentum * M if nesterov else M
    X = N / N.norm() if N.norm() > 0 else N
    if W.shape[0] > W.shape[1]:
        X = X.T
    a, b, c = COEFFICIENTS
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    if W.shape[0] > W.shape[1]:
        X = X.T
    return W - lr * (0.2 * math.sqrt(max(W.shape)) * X + weight_decay * W), M


def plain_blocks(tensor, blocks):
    """The matrices of a tensor one by one."""
    return [matrix for piece in blocks.of(tensor) for matrix in piece.flatten(0, -3)]


CUTS = {
    "whole": ((12, 7), Blocks()),
    "tall": ((7, 12), Blocks()),
    "heads": ((4 * 6, 9), Blocks(repeat=4)),
    "keys and values": ((3 * (5 + 4), 6), Blocks((5, 4), repeat=3)),
    "experts": ((6, 5, 8), Blocks()),
    "experts, transposed": ((6, 8, 5), Blocks()),
    "interleaved": ((2, 12, 7), Blocks(interleave=2)),
    "fused columns": ((7, 10), Blocks((5, 5), columns=True)),
}


@pytest.mark.parametrize("nesterov", [True, False])
def test_every_block_is_updated_as_if_it_were_alone(nesterov):
    """All kinds of tensor in one optimiser, against a loop over single blocks; three steps."""
    params = {name: param(*shape) for name, (shape, _) in CUTS.items()}
    roles = {name: Role(p, "muon", CUTS[name][1]) for name, p in params.items()}
    optimizer = PerHeadMuon(roles, lr=0.03, nesterov=nesterov)
    expected = {name: [w.detach().clone() for w in plain_blocks(p, CUTS[name][1])] for name, p in params.items()}
    momenta = {name: [torch.zeros_like(w) for w in matrices] for name, matrices in expected.items()}
    for _ in range(3):
        for name, p in params.items():
            p.grad = torch.randn_like(p)
            for i, G in enumerate(plain_blocks(p.grad, CUTS[name][1])):
                expected[name][i], momenta[name][i] = plain_muon(
                    expected[name][i], G, momenta[name][i], 0.03, nesterov=nesterov
                )
        optimizer.step()
    for name, p in params.items():
        for got, want in zip(plain_blocks(p.detach(), CUTS[name][1]), expected[name]):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=name)


def update(weight, grad, blocks=None, **options):
    """What one step without decay adds to `weight`."""
    p = nn.Parameter(weight.clone())
    p.grad = grad.clone()
    PerHeadMuon([Role(p, "muon", blocks or Blocks())], lr=1.0, weight_decay=0.0, **options).step()
    return p.detach() - weight


def test_few_at_a_time_get_the_same_updates(monkeypatch):
    """Cut between parameters and inside them, down to a matrix at a time."""
    shapes = {"experts": ((7, 5, 8), Blocks()), "heads": ((6 * 5, 8), Blocks(repeat=6)), "one": ((8, 5), Blocks())}
    params = {name: param(*shape) for name, (shape, _) in shapes.items()}
    for p in params.values():
        p.grad = torch.randn_like(p)
    found = []
    for numbers in (2**27, 3 * 40, 4 * 40 + 1, 1):
        monkeypatch.setattr(muon, "DEVICE_BATCH", numbers)
        copies = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
        for name, p in copies.items():
            p.grad = params[name].grad
        PerHeadMuon({name: Role(p, "muon", shapes[name][1]) for name, p in copies.items()}, lr=0.1).step()
        found.append(list(copies.values()))
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("shape", "rms"), [((128, 7168), 0.157), ((192, 1536), 0.191), ((512, 256), 0.188), ((896, 7168), 0.206)]
)
def test_the_size_of_an_update_is_near_that_of_adamw(shape, rms):
    G = torch.randn(shape)
    assert update(torch.zeros(shape), G).square().mean().sqrt() == pytest.approx(rms, abs=0.002)


def test_the_size_of_one_heads_gradient_changes_no_heads_update():
    W, G = torch.zeros(4 * 16, 64, dtype=torch.float64), torch.randn(4 * 16, 64, dtype=torch.float64)
    scaled = G.clone()
    scaled[:16] *= 1000
    per_head = [update(W, g, Blocks(repeat=4)) for g in (G, scaled)]
    torch.testing.assert_close(*per_head, rtol=0, atol=1e-9)
    whole = [update(W, g) for g in (G, scaled)]
    change = (whole[1] - whole[0])[16:].norm() / whole[0][16:].norm()
    assert change > 0.5  # what cutting the heads apart prevents


@pytest.mark.parametrize(
    ("fuse", "blocks"),
    [
        (lambda a, b: torch.cat([a, b]), Blocks((10, 10))),
        (lambda a, b: torch.stack([a, b], dim=1).flatten(0, 1), Blocks(interleave=2)),
        (lambda a, b: torch.cat([a.T, b.T], dim=1), Blocks((10, 10), columns=True)),
        (lambda a, b: torch.stack([a, b]), Blocks()),
        (lambda a, b: torch.stack([a.T, b.T]), Blocks()),
    ],
)
def test_fused_storage_of_the_same_matrices_gets_the_same_update(fuse, blocks):
    zero = torch.zeros(10, 6, dtype=torch.float64)
    G = torch.randn(2, 10, 6, dtype=torch.float64)
    separate = [update(zero, g) for g in G]
    torch.testing.assert_close(update(fuse(zero, zero), fuse(*G), blocks), fuse(*separate), rtol=0, atol=1e-13)


def test_non_contiguous_parameters_and_gradients():
    W, G = torch.randn(9, 8, dtype=torch.float64), torch.randn(9, 8, dtype=torch.float64)
    expected = update(W, G, Blocks(repeat=3))
    torch.testing.assert_close(update(W.T.contiguous().T, G, Blocks(repeat=3)), expected, rtol=0, atol=1e-14)
    p = nn.Parameter(W.clone())
    p.grad = G.T.contiguous().T
    PerHeadMuon([Role(p, "muon", Blocks(repeat=3))], lr=1.0, weight_decay=0.0).step()
    torch.testing.assert_close(p.detach() - W, expected, rtol=0, atol=1e-14)


def test_bfloat16_iteration_stays_close():
    W, G = torch.zeros(4, 32, 64), torch.randn(4, 32, 64)
    exact, rough = update(W, G), update(W, G, ns_dtype=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("nesterov", [True, False])
def test_blocks_of_all_kinds_in_bfloat16_stay_close_to_the_plain_form(nesterov):
    """Directions are rounded where the iteration begins, weights and momenta are not; no singular value is small."""
    shapes = {
        "heads": ((4 * 16, 64), Blocks(repeat=4)),
        "experts": ((6, 64, 16), Blocks()),
        "tall": ((64, 16), Blocks()),
    }
    for shape, cut in shapes.values():
        p = param(*shape, dtype=torch.float32)
        before = [w.clone() for w in plain_blocks(p.detach(), cut)]
        p.grad = torch.randn_like(p)
        grads = [g.clone() for g in plain_blocks(p.grad, cut)]
        optimizer = PerHeadMuon([Role(p, "muon", cut)], lr=0.1, nesterov=nesterov, ns_dtype=torch.bfloat16)
        optimizer.step()
        for W, G, got, M in zip(
            before, grads, plain_blocks(p.detach(), cut), plain_blocks(optimizer.state[p]["momentum"], cut)
        ):
            exact, momentum = plain_muon(W, G, torch.zeros_like(W), lr=0.1, nesterov=nesterov)
            assert torch.equal(M, momentum)
            assert 0 < (got - exact).norm() < 0.03 * (exact - W).norm()


class Counting(TorchDispatchMode):
    """How often each operation that does something is called, and how many bytes go in and out of all of them;
    how many numbers the largest tensor has that is made."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.largest = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.largest = max(self.largest, out.numel())
        if not func.is_view and not any(word in str(func) for word in ("empty", "unsafe_view", "alias", "profiler")):
            self.calls[func.overloadpacket] += 1
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


def test_a_step_of_1b_takes_few_products_and_holds_nothing_twice():
    """On the meta device: 8,817 matrices of 11 shapes go through 3 x 5 batched products a shape, or, where one shape's
    hold more than DEVICE_BATCH numbers, for each so many."""
    with torch.device("meta"):
        model = K3Model(presets.get("1b"))
    roles = {name: role for name, role in model.parameter_roles().items() if role.kind == "muon"}
    optimizer = PerHeadMuon(roles, lr=1e-3, ns_dtype=torch.bfloat16)
    for role in roles.values():
        role.param.grad = torch.empty_like(role.param)
    with Counting() as counting:
        optimizer.step()
    aten = torch.ops.aten
    batches = 10 + 7  # the experts' 33 tensors five at a time; ten other shapes
    assert (counting.calls[aten.bmm], counting.calls[aten.baddbmm]) == (5 * batches, 10 * batches)
    assert counting.largest <= muon.DEVICE_BATCH
    pieces = sum(len(role.blocks.of(role.param)) for role in roles.values())
    assert counting.calls.total() - 15 * batches <= 2 * (pieces + batches) + 12 * batches
    numbers = sum(role.param.numel() for role in roles.values())
    assert counting.bytes < 160 * numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_torchs(dtype):
    ours, theirs = ([param(5, 4, dtype=dtype), param(3, dtype=dtype)] for _ in range(2))
    for a, b in zip(ours, theirs):
        b.data.copy_(a.data)
    optimizer = PerHeadMuon(
        [Role(ours[0], "adamw"), Role(ours[1], "adamw", weight_decay=False, lr_scale=0.5)], lr=0.01, weight_decay=0.3
    )
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0, "lr": 0.005}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for _ in range(5):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    assert all(a.equal(b) for a, b in zip(ours, theirs))


def test_adamw_adds_eps_after_the_bias_correction():
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    p.grad = torch.full_like(p, 1e-8)
    PerHeadMuon([Role(p, "adamw", weight_decay=False)], lr=1.0, eps=1e-8).step()
    assert p.item() == pytest.approx(-0.5, abs=1e-9)


class Toy(nn.Module):
    """One of each treatment."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.q_proj = nn.Linear(8, 12, bias=False)
        self.experts = nn.Parameter(torch.randn(5, 4, 8))
        self.norm = nn.RMSNorm(8)
        self.A_log = nn.Parameter(torch.randn(3))
        self.to(dtype)

    def parameter_roles(self):
        return Roles.match(self, {"q_proj.weight": Blocks(repeat=3), "experts": Blocks()}, decay=("embed.weight",))


def test_zero_gradients_leave_only_the_decay():
    toy = Toy()
    old = {name: p.detach().clone() for name, p in toy.named_parameters()}
    optimizer = PerHeadMuon(toy.parameter_roles(), lr=0.02, weight_decay=0.1)
    for _ in range(10):
        for p in toy.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for name, p in toy.named_parameters():
        if name in ("norm.weight", "A_log"):
            assert p.equal(old[name]), name
        else:
            torch.testing.assert_close(p.detach(), old[name] * (1 - 0.02 * 0.1) ** 10, rtol=1e-13, atol=0)


def test_a_parameter_without_a_gradient_is_left_alone():
    toy = Toy()
    optimizer = PerHeadMuon(toy.parameter_roles(), lr=0.1)
    old = {name: p.detach().clone() for name, p in toy.named_parameters()}
    toy.q_proj.weight.grad = torch.ones_like(toy.q_proj.weight)
    toy.norm.weight.grad = torch.ones_like(toy.norm.weight)
    optimizer.step()
    changed = {name for name, p in toy.named_parameters() if not p.equal(old[name])}
    assert changed == {"q_proj.weight", "norm.weight"}
    assert optimizer.state[toy.experts]["momentum"].eq(0).all()
    assert optimizer.state[toy.A_log]["step"] == 0


def train(toy, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in toy.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(dtype, tmp_path):
    straight = Toy(dtype)
    start = {name: p.clone() for name, p in straight.state_dict().items()}
    optimizer = PerHeadMuon(straight.parameter_roles(), lr=0.02)
    train(straight, optimizer, 4, seed=1)
    train(straight, optimizer, 4, seed=2)

    first = Toy(dtype)
    first.load_state_dict(start)
    optimizer = PerHeadMuon(first.parameter_roles(), lr=0.02)
    train(first, optimizer, 4, seed=1)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    second = Toy(dtype)
    optimizer = PerHeadMuon(second.parameter_roles(), lr=99.0)  # the saved rate counts
    assert optimizer.state_dict()["state"].keys() == saved["optimizer"]["state"].keys()  # there is something to fill
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(second, optimizer, 4, seed=2)
    for (name, a), (_, b) in zip(straight.named_parameters(), second.named_parameters()):
        assert a.equal(b), name


def test_the_saved_state_names_its_parameters():
    names = [n for group in PerHeadMuon(Toy().parameter_roles(), lr=1.0).param_groups for n in group["param_names"]]
    assert sorted(names) == ["A_log", "embed.weight", "experts", "norm.weight", "q_proj.weight"]


def test_one_learning_rate_set_on_every_group_keeps_their_ratios():
    muon, adamw = param(4, 4), param(3)
    roles = [Role(muon, "muon", lr_scale=0.5, weight_decay=False), Role(adamw, "adamw", weight_decay=False)]
    steps = []
    for lr in (1.0, 0.25):
        muon.grad, adamw.grad = torch.ones_like(muon), torch.ones_like(adamw)
        optimizer = PerHeadMuon(roles, lr=1.0, adamw_lr=0.1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        old = muon.detach().clone(), adamw.detach().clone()
        optimizer.step()
        steps.append(((muon - old[0]).norm().item(), (adamw - old[1]).abs().max().item()))
    assert steps[0][1] == pytest.approx(0.1)
    assert steps[1] == pytest.approx([0.25 * size for size in steps[0]])
    whole = update(torch.zeros(4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)).norm().item()
    assert steps[0][0] == pytest.approx(0.5 * whole)


def test_torch_schedulers_and_closures_work():
    toy = Toy()
    optimizer = PerHeadMuon(toy.parameter_roles(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loss = optimizer.step(lambda: toy.norm.weight.square().sum().backward() or 7.0)
    scheduler.step()
    assert loss == 7.0
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}


def test_a_group_added_later_is_adamws():
    optimizer = PerHeadMuon(Toy().parameter_roles(), lr=0.1)
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("late", late)]})
    late.grad = torch.ones(2)
    optimizer.step()
    assert late.tolist() == pytest.approx([0.9, 0.9])


def test_fits_a_linear_map():
    target, W = torch.randn(8, 16), nn.Parameter(torch.zeros(8, 16))
    x = torch.randn(64, 16)
    optimizer = PerHeadMuon([Role(W, "muon", Blocks(repeat=2), weight_decay=False)], lr=0.2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (x @ (W - target).T).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr: expected >= 0"),
        ({"lr": 0.0, "adamw_lr": 0.1}, "lr: expected >= 0, and > 0 beside adamw_lr"),
        ({"momentum": 1.0}, r"momentum: expected a decay in \[0, 1\), got 1.0"),
        ({"betas": (0.9, 1.5)}, "beta2: expected a decay"),
        ({"weight_decay": -0.1}, "weight_decay: expected >= 0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        PerHeadMuon(Toy().parameter_roles(), **{"lr": 0.1, **options})

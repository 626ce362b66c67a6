"""Many layers' balancers moved at once, against each on its own: the same bits, in far fewer launches."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.nn import balancer as module
from perilune.nn.balancer import Balancer, QuantileBalancer, SignBalancer, balancer, update_balancers
from perilune.nn.routing import route
from perilune.ops.quantile_bias import bias_from_histogram, rebin

RULES = {
    "decay": ("quantile", {}),
    "plain": ("quantile", {"decay": None}),
    "both": ("quantile", {"ema": 0.8}),
    "ema": ("quantile", {"ema": 0.8, "decay": None, "bins": 37}),
    "exact": ("quantile", {"bins": None}),
    "sign": ("sign", {"step": 1e-2}),
    "band": ("band", {"window": 3}),
    "fixed band": ("band", {"adaptive": False}),
    "aux": ("aux", {}),
    "none": ("none", {}),
}


def layers_of(name: str, number: int, E: int = 24, top_k: int = 5) -> list[Balancer]:
    kind, options = RULES[name]
    return [balancer(kind, E, top_k, **options) for _ in range(number)]


def observe(layers: list[Balancer], seed: int, silent: tuple[int, ...] = ()) -> None:
    """A step of each layer's own tokens; the silent ones see padding alone."""
    random = torch.Generator().manual_seed(seed)
    for i, layer in enumerate(layers):
        E = layer.num_experts
        tilt = 2 * torch.randn(E, generator=random)
        scores = torch.sigmoid(torch.randn(90 + 7 * i, E, generator=random) + tilt)
        mask = None if i not in silent else torch.zeros(len(scores), dtype=torch.bool)
        layer.observe(scores, route(scores, layer.bias, layer.top_k)[0], mask)


def assert_same(one: list[Balancer], other: list[Balancer]) -> None:
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert dict(a.named_buffers()).keys() == dict(b.named_buffers()).keys()
        for (name, x), (_, y) in zip(a.named_buffers(), b.named_buffers()):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=f"layer {i}: {name}")


class Launches(TorchDispatchMode):
    """How many operations write something."""

    VIEWS = ("view", "expand", "slice", "select", "squeeze", "unbind", "detach", "alias", "split", "t.", "transpose")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        self.count += not name.startswith((*self.VIEWS, "unsqueeze", "empty", "new_empty"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RULES)
def test_layers_moved_together_have_the_bits_of_each_alone(name: str) -> None:
    together, alone = layers_of(name, 5), layers_of(name, 5)
    for step in range(6):
        silent = (1, 3) if step in (0, 3) else ()  # also where a rule has no state yet
        for layers in (together, alone):
            observe(layers, step, silent)
        update_balancers(together)
        for layer in alone:
            layer.update()
        assert_same(together, alone)
        assert not any(x.any() for layer in together for x in layer._buffers_to_sum())
    assert name in ("aux", "none") or all(layer.bias.any() for layer in together)


def test_layers_of_all_sorts_keep_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(SignBalancer):
        """Somebody's rule, which knows of one layer only."""

        def _next_bias(self, seen):
            assert self.counts.dim() == 1
            return self.bias + 1

    def made() -> list[Balancer]:
        layers = [layer for name in RULES for layer in layers_of(name, 2)]
        layers += [*layers_of("decay", 3, E=16), *layers_of("decay", 2, top_k=3), *layers_of("sign", 2, top_k=24)]
        layers += [*layers_of("decay", 2, top_k=24), QuantileBalancer(24, 5, decay=0.5), SignBalancer(24, 5, step=0.1)]
        layers += [Own(24, 5), Own(24, 5), SignBalancer(24, 5).double(), *layers_of("decay", 2)]
        layers[0].freeze()
        return layers

    monkeypatch.setattr(module, "NUMBERS", 24 * 1000 * 2)  # two layers' histograms at a time
    together, alone = made(), made()
    for step in range(4):
        for layers in (together, alone):
            observe(layers, step)
            layers[-1].unfreeze() if step % 2 else layers[-1].freeze()
        update_balancers(layer for layer in (*together, together[3]))  # one named twice is moved once
        for layer in alone:
            layer.update()
        assert_same(together, alone)


def test_a_state_taken_up_by_some_layers_only_is_theirs() -> None:
    together = layers_of("both", 4)
    observe(together[:2], 0)
    update_balancers(together[:2])
    alone = copy.deepcopy(together)
    for layers in (together, alone):
        observe(layers, 1)
    update_balancers(together)
    for layer in alone:
        layer.update()
    assert_same(together, alone)
    kept = [layer.training_state() for layer in together]
    together[0].pooled.zero_()  # no layer's state is part of another's
    for layer, state in zip(together[1:], kept[1:]):
        assert torch.equal(layer.pooled, state["pooled"])


@pytest.mark.parametrize("name", [name for name in RULES if name != "exact"])
def test_many_layers_take_as_many_launches_as_two(name: str) -> None:
    counts = []
    for number in (2, 9):
        layers = layers_of(name, number)
        for step in range(2):
            observe(layers, step)
            with Launches() as launches:
                update_balancers(layers)
        counts.append(launches.count)
    assert counts[0] == counts[1] > 0


def test_histograms_of_layers_are_read_and_rebinned_as_each_alone() -> None:
    counts = torch.randint(0, 9, (3, 2, 5, 40))
    bias, new = torch.randn(2, 3, 2, 5)
    counts[1, 0] = 0  # a layer without tokens
    estimate, moved = bias_from_histogram(counts, bias, 2), rebin(counts, bias, new)
    for i in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
        at = tuple(i)
        assert torch.equal(estimate[at], bias_from_histogram(counts[at], bias[at], 2))
        assert torch.equal(moved[at], rebin(counts[at], bias[at], new[at]))
    assert torch.equal(estimate[1, 0], bias[1, 0])

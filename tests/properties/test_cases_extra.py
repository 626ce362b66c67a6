"""Failures seen in other libraries that belong to no single module here."""

from copy import deepcopy

import pytest
import torch

from perilune.models.k3 import K3Model, presets
from perilune.nn import moe
from perilune.ops import BoundedGate, attn_res, kda, kda_step, situ_glu
from tiny_k3 import assert_close


def test_sequences_times_heads_may_pass_65535():
    """Grids of some kernels end there: 2,049 documents of 32 heads, then the same in two halves and in one step."""
    N, H, K, V = 2049, 32, 4, 6
    q, k, v = (0.3 * torch.randn(1, N, H, n) for n in (K, K, V))
    g, beta, state = -torch.rand(1, N, H, K), torch.rand(1, N, H), torch.randn(N, H, K, V)

    def documents(a: int, z: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (x[:, a:z] for x in (q, k, v, g, beta))
        cu = torch.arange(z - a + 1)
        o, final = kda(*rows, cu_seqlens=cu, initial_state=state[a:z], output_final_state=True)
        return o[0], final

    halves = [torch.cat(x) for x in zip(documents(0, 1000), documents(1000, N))]
    for name, whole, half, step in zip(
        "os", documents(0, N), halves, kda_step(*(x[0] for x in (q, k, v, g, beta)), state)
    ):
        assert_close(whole, half, 1e-6, name)
        assert_close(whole, step, 1e-6, name)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_the_meta_device_gives_shapes(backend):
    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    B, T, H, K, V = 2, 70, 2, 16, 24
    for lead, cu, N in (((B, T), None, B), ((1, T), [0, 5, T], 2)):
        inputs = [new(*lead, H, K), new(*lead, H, K), new(*lead, H, V), new(*lead, H, K), new(*lead, H)]
        o, state = kda(
            *inputs, gate=BoundedGate(new(H), new(H, K)), normalize_qk=True, beta_logits=True, cu_seqlens=cu,
            output_final_state=True, backend=backend,
        )  # fmt: skip
        assert (o.shape, state.shape) == ((*lead, H, V), (N, H, K, V))
        (o.sum() + state.sum()).backward()
        assert all(x.grad.shape == x.shape and x.grad.is_meta for x in inputs)
    sources = [new(3, 5, 8), new(3, 5, 8)]
    attn_res(new(8), sources, new(8), backend=backend).sum().backward()
    situ_glu(*sources, backend=backend).sum().backward()
    assert all(x.grad.is_meta for x in sources)


def test_bfloat16_is_judged_with_its_own_choices_and_with_those_of_float32(monkeypatch):
    """Near-ties flip experts, which is no error of arithmetic: with the choices held, logits are close."""
    exact, tokens = K3Model(presets.nano()).eval(), torch.randint(2048, (2, 40))
    coarse = deepcopy(exact).bfloat16()
    route, chosen = moe.route, []

    def recorded(scores, *args, **options):
        choice = route(scores, *args, **options)
        chosen.append(choice[0])
        return choice

    def forced(scores, *args, **options):
        held = next(held_choices)
        weights = scores.gather(-1, held)
        return held, weights / weights.sum(-1, keepdim=True)

    with torch.no_grad():
        monkeypatch.setattr(moe, "route", recorded)
        expected = exact(tokens).logits
        choices, chosen = chosen, []
        coarse(tokens)
        alike = [(a.sort().values == b.sort().values).float().mean() for a, b in zip(choices, chosen)]
        held_choices = iter(choices)
        monkeypatch.setattr(moe, "route", forced)
        error = coarse(tokens).logits.float() - expected
    assert min(alike) > 0.9
    assert error.square().mean() < (2e-2) ** 2 * expected.square().mean()

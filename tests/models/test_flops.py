"""The formula against torch's own counter, on models whose every size is different."""

from dataclasses import asdict

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from perilune.core.backends import Backend, never
from perilune.models.k3 import K3Model, presets
from perilune.models.k3.flops import token_flops
from perilune.ops.attn_res import api as attn_res
from perilune.ops.grouped_experts import api as grouped_experts
from perilune.ops.kda import api as kda
from perilune.ops.kda import reference as kda_reference
from tiny_k3 import config

T = 7


def kda_step(q, k, v, g, beta, state, scale):
    """The recurrence with each of its three products as one that the counter sees."""
    state = state * g.exp()[..., None]
    error = v - (k[..., None, :] @ state)[..., 0, :]
    state = state + k[..., None] @ (beta[..., None] * error)[..., None, :]
    return scale * (q[..., None, :] @ state)[..., 0, :], state


def mixture(query, sources, key_weight, eps, norm_weight, norm_eps):
    """Scores and mixture as products, over rows of their own."""
    v = torch.stack(list(sources)).flatten(1, -2).transpose(0, 1)  # [M, N, D]
    if v.shape[1] == 1:
        return sources[0]
    scores = v @ (query * key_weight)[:, None].expand(len(v), -1, 1)
    return (scores.softmax(1).mT @ v).view_as(sources[0])


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """Every operation in the form whose products are those of its equation."""
    for api in (kda, grouped_experts):
        monkeypatch.setattr(api.BACKENDS, "_backends", {"reference": api.BACKENDS._backends["reference"]})
    monkeypatch.setattr(kda_reference, "step", kda_step)
    monkeypatch.setattr(attn_res.BACKENDS, "_backends", {"reference": Backend("reference", mixture, never)})


def counted(made, tokens=T, train=False):
    """By torch, with heads as wide as keys so that nothing is padded: all of the model, and each of its modules."""
    torch.manual_seed(0)
    model = K3Model(made).train(train)
    ids = torch.randint(made.vocab_size, (1, tokens))
    with FlopCounterMode(display=False, depth=8) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(ids, labels=ids) if train else model(ids)
        if train:
            output.loss.backward()
    return counter.get_total_flops(), {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


def expected(made, tokens=T):
    """The formula's parts for all tokens, MLA's with the upper triangle, which the plain form computes."""
    parts = asdict(token_flops(made, tokens))
    parts["attention"] *= 2 * tokens / (tokens + 1)
    return {name: tokens * value for name, value in parts.items()}


def linear(**changes):
    return config().linear_attn_config.replace(**changes)


VARIANTS = {
    "all on": {},
    "low-rank gate": {"linear_attn_config": linear(use_full_rank_gate=False), "q_lora_rank": None},
    "no output gate": {"mla_use_output_gate": False},
    "experts at full width": {"routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "more experts a token": {"num_experts_per_token": 5, "num_experts": 9, "num_shared_experts": 3},
    "no shared experts": {"num_shared_experts": 0},
    "two dense layers": {"first_k_dense_replace": 2, "intermediate_size": 72},
    "no experts": {"num_experts": 0},
    "plain residual": {"attn_res_block_size": None},
    "full attention residuals": {"attn_res_block_size": "full"},
    "larger vocabulary": {"vocab_size": 77},
    "other heads": {
        "num_attention_heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
        "linear_attn_config": linear(num_heads=3, head_dim=6),
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("tokens", [1, T])
def test_the_formula_is_what_torch_counts(changes, tokens):
    made = config(**{"v_head_dim": 12, **changes})
    made = made.replace(v_head_dim=made.qk_nope_head_dim + made.qk_rope_head_dim)
    total, _ = counted(made, tokens)
    assert total == pytest.approx(sum(expected(made, tokens).values()), rel=1e-12)


def test_every_part_is_counted_where_it_is():
    made = config(v_head_dim=12)
    _, modules = counted(made)
    parts = expected(made)

    def of(*ends):
        return sum(count for name, count in modules.items() if name.endswith(ends))

    assert of("lm_head") == parts["head"]
    assert of("block_sparse_moe.gate") == parts["router"]
    assert of("shared_experts", ".mlp") == parts["shared"]
    assert of("_attn_res", "attention_res", "mlp_res") == parts["attn_res"]
    assert of("block_sparse_moe") == parts["router"] + parts["experts"] + of("shared_experts")
    assert of("self_attn") == parts["projections"] + parts["kda"] + parts["attention"]


def test_a_backward_takes_twice_the_forward_except_where_nothing_asks():
    """Not of the mixtures and the recurrence alone: all of a training step, further tokens included."""
    made = config(v_head_dim=12, num_nextn_predict_layers=1, attn_res_block_size=None)
    total, _ = counted(made, train=True)
    assert total == pytest.approx(3 * sum(expected(made).values()), rel=0.02)  # the first state has no gradient


def test_further_tokens_cost_a_layer_and_a_head():
    plain, more = (token_flops(config(num_nextn_predict_layers=n), 40) for n in (0, 1))
    assert more.head == 2 * plain.head
    assert more.kda == plain.kda
    assert more.projections > plain.projections


def test_what_a_preset_needs():
    """1b at 8K: twice its active parameters, which the embedding is none of, and what sequence and depth add."""
    flops = token_flops(presets.one_b(), 8192)
    assert flops.training == 3 * flops.forward
    rest = flops.forward - flops.kda - flops.attention - flops.attn_res
    assert rest == pytest.approx(2 * 145e6, rel=0.01)  # the preset's active parameters
    assert flops.attention == 3 * 8 * (192 + 128) * 8193
    assert flops.kda == 9 * 8 * 6 * 128 * 128

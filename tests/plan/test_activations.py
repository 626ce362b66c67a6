"""Bytes kept for the backward pass: the formulas against what autograd saves on a CPU."""

from itertools import pairwise
from operator import sub
from typing import get_args

import pytest
import torch
from kept import kept_bytes, saved_by

import tiny_k3
from perilune.models.k3 import K3Config, K3Model, presets
from perilune.models.k3.config import Recompute
from perilune.ops.kda.kernels.chunks import chunks_of
from perilune.ops.kda.kernels.workspace import Flow, Records
from perilune.plan.activations import kda_records, kda_workspace, kept_in_all, largest_stretch
from perilune.plan.layout import stages
from perilune.plan.sizes import sizes

TOKENS = 1024
BAND = 0.002
"""Formula over measurement, on either side of 1: states between chunks and a few numbers a head are left out."""


def measured(
    config: K3Config, *, recompute: Recompute, dtype: torch.dtype = torch.float32, tokens: int = TOKENS
) -> int:
    model = K3Model(config).to(dtype).train()
    model.recompute_activations(recompute)
    return kept_bytes(model, torch.randint(config.vocab_size, (1, tokens)))


def kinds_of(config: K3Config) -> tuple[Recompute, ...]:
    kinds = get_args(Recompute)
    return kinds if config.residual_period is not None else kinds[:-1]


LINEAR = tiny_k3.config().linear_attn_config
CASES = {
    "nano": presets.nano(),
    "tiny": tiny_k3.config(),
    "plain residual": presets.nano().replace(attn_res_block_size=None),
    "full attention residuals": presets.nano().replace(attn_res_block_size="full"),
    "wide values": tiny_k3.config(v_head_dim=12),
    "no low ranks": tiny_k3.config(q_lora_rank=None, mla_use_output_gate=False, routed_expert_hidden_size=None),
    "low-rank gate": tiny_k3.config(linear_attn_config=LINEAR.replace(use_full_rank_gate=False)),
    "more shared experts": tiny_k3.config(num_shared_experts=3, first_k_dense_replace=2),
}


@pytest.mark.parametrize("name", CASES)
def test_what_autograd_saves(name: str) -> None:
    config = CASES[name]
    for recompute in kinds_of(config):
        paper = kept_in_all(config, TOKENS, 4, recompute=recompute, fused=False)
        assert paper == pytest.approx(measured(config, recompute=recompute), rel=BAND), recompute


@pytest.mark.parametrize("name", CASES)
def test_what_autograd_saves_in_bfloat16(name: str) -> None:
    """Without experts, which a CPU computes in float32 whatever they are given."""
    config = CASES[name].replace(num_experts=0)
    for recompute in kinds_of(config):
        paper = kept_in_all(config, TOKENS, 2, recompute=recompute, fused=False)
        found = measured(config, recompute=recompute, dtype=torch.bfloat16)
        assert paper == pytest.approx(found, rel=3 * BAND), recompute


@pytest.mark.parametrize("name", ["nano", "plain residual", "full attention residuals", "no low ranks"])
def test_what_autograd_saves_in_a_runs_bfloat16(name: str) -> None:
    """As `perilune train` works: weights and stream float32, products bfloat16.  By tokens: weights' copies are left
    out, which are no activations."""
    config = CASES[name].replace(num_experts=0)
    for recompute in kinds_of(config):
        with torch.autocast("cpu", torch.bfloat16):
            few, many = (measured(config, recompute=recompute, tokens=n) for n in (TOKENS, 2 * TOKENS))
        paper = (kept_in_all(config, n * TOKENS, 2, 4, recompute=recompute, fused=False) for n in (1, 2))
        assert -sub(*paper) == pytest.approx(many - few, rel=3 * BAND), recompute


@pytest.mark.parametrize("name", ["nano", "tiny", "plain residual", "full attention residuals"])
def test_what_is_alive_while_it_is_recomputed(name: str) -> None:
    """Of the functions that run again, the one that saves most; of a block its live sums, and one sublayer."""
    config = CASES[name]
    model = K3Model(config).train()
    backbone, (stage,) = model.model, stages(config, sizes(config), 1)
    before = [(backbone.embed_tokens(torch.randint(config.vocab_size, (1, TOKENS))),)]
    alive = {}
    for recompute in kinds_of(config)[1:]:
        model.recompute_activations(recompute)
        climb = backbone._climb_by_sublayers if recompute == "blocks" else backbone._climb
        stretches = []
        for first, last in pairwise(backbone._stretches()):
            sources, size = saved_by(model, climb, first, last, None, None, None, *before[first])
            stretches.append(size)
            if recompute == "sublayers":
                before.append(sources)
        alive[recompute] = max(stretches) + (alive["sublayers"] if recompute == "blocks" else 0)
        paper = largest_stretch(config, stage.sorts, stage.mixers, 4, 4, recompute, fused=False)
        assert TOKENS * paper == pytest.approx(alive[recompute], rel=0.02), recompute


def test_logits_are_no_part_of_it() -> None:
    """Twice the words: the head's gradient grows by its weight, and nothing by a token."""
    few, many = presets.nano(), presets.nano().replace(vocab_size=4096)
    more = measured(many, recompute="layers") - measured(few, recompute="layers")
    assert more == 2048 * 128 * 4
    paper = (kept_in_all(config, TOKENS, 4, recompute="layers") for config in (many, few))
    assert more == sub(*paper)


@pytest.mark.parametrize(("rows", "T", "H"), [(1, 8192, 96), (1, 65536, 32), (8, 4096, 16), (1, 32768, 8)])
def test_records_of_kda_are_those_of_its_kernels(rows: int, T: int, H: int) -> None:
    """All at once, or in the stretches that the kernels make, whose largest is looked at."""
    C, K = 64, 128
    size = H * (3 * C * K + 2 * C * C + 2 * C * K + 2 * K * K) * 2
    chunks = chunks_of(rows, T, None, C, H, torch.device("cpu"), size)
    number = max(part.number for part in chunks.stretches)
    records = Records.empty(number, H, C, K, torch.bfloat16, torch.device("meta"))
    flow = Flow.empty(number, H, C, K, K, torch.bfloat16, torch.device("meta"))
    wide = sum(x.nbytes for x in records if x.dtype == torch.float32)  # a few numbers a row
    held = sum(x.nbytes for x in (*records, *flow)) - wide
    assert wide < 0.02 * held
    assert kda_records(rows * T, H, K, 2) == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "T", "H", "peak"),
    [(1, 8192, 96, 3_075_457_024), (1, 65536, 32, 6_769_132_544), (8, 4096, 16, 2_327_913_472),
     (1, 32768, 8, 1_168_675_840)],
)  # fmt: skip
def test_memory_of_kda_covers_what_was_measured(rows: int, T: int, H: int, peak: int) -> None:
    """benchmarks/results/kda-h200.json: forward and backward, its inputs counted; never less, at most a sixth more."""
    inputs = 2 * rows * T * H * (6 * 128 + 1)  # q, k, v, the decay's logit, o, its gradient; beta
    config = presets.k3().replace(linear_attn_config=presets.k3().linear_attn_config.replace(num_heads=H))
    paper = inputs + kda_workspace(config, rows * T, 2) - 2 * rows * T * H * 128  # o's gradient is in both
    assert 0.98 < paper / peak < 1.17

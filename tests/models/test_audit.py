"""Parameter counts of the released models, to the last one, from the model itself on the meta device."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from perilune.models.k3 import K3Config, K3Model, presets
from perilune.models.k3.audit import Audit, audit
from perilune.models.k3.convert import released_views, stored_shape
from perilune.nn import BlockAttnRes

ROUTED = 2_722_740_830_208  # K3's routed experts
BFLOAT16 = 57_179_884_544  # K3's other parameters kept in bfloat16, vision included
FLOAT32 = 11_122_432


@cache
def audited(name: str) -> Audit:
    return audit(presets.get(name))


@cache
def shapes(name: str) -> dict[str, tuple[list[int], torch.dtype]]:
    """Released name to stored shape and dtype, of the preset cast to bfloat16."""
    config = presets.get(name)
    with torch.device("meta"):
        views = released_views(K3Model(config).bfloat16())
    return {name: (stored_shape(name, view, config), view.dtype) for name, view in views.items()}


def part(name: str, line: str) -> int:
    return next(x.total for x in audited(name).lines if x.part == line)


def owned(name: str, prefix: str, *, experts: bool = True) -> int:
    """Parameters whose released names begin with `prefix`, with or without routed experts."""
    return sum(
        math.prod(s) for n, (s, _) in shapes(name).items() if n.startswith(prefix) and (experts or ".experts." not in n)
    )


# K3


def test_k3_layers() -> None:
    assert owned("k3", "model.layers.0.self_attn.") == 443_740_416
    assert owned("k3", "model.layers.3.self_attn.") == 232_196_096
    assert owned("k3", "model.layers.1.block_sparse_moe.experts.0.") == 33_030_144
    assert owned("k3", "model.layers.1.block_sparse_moe.", experts=False) == 189_927_808
    assert owned("k3", "model.layers.0.mlp.") == 726_663_168


def test_k3_parts() -> None:
    assert {line.part: (line.count, line.total) for line in audited("k3").lines} == {
        "embedding": (1, 1_174_405_120),
        "head": (1, 1_174_405_120),
        "routed experts": (92 * 896, ROUTED),
        "shared experts, router, latent projections": (92, 92 * 189_927_808),
        "dense feed-forward": (1, 726_663_168),
        "norms and attention residuals": (93, 4_021_248),
        "KDA": (69, 69 * 443_740_416),
        "MLA": (24, 24 * 232_196_096),
        "vision tower": (27, 401_214_464),
        "vision projector": (1, 46_144_512),
    }


def test_k3_totals() -> None:
    table = audited("k3")
    assert table.total == 2_779_931_837_184
    text = table.total - part("k3", "vision tower") - part("k3", "vision projector")
    assert text == 2_779_484_478_208 == owned("k3", "")
    assert table.active == 104_189_614_848
    assert table.active - part("k3", "head") == 103_015_209_728
    assert table.active + part("k3", "embedding") == 105_364_019_968


def test_k3_census() -> None:
    """497,220 released tensors: every expert matrix is two there (packed values and scales), vision has 168 more."""
    experts = [n for n in shapes("k3") if ".experts." in n]
    rest = {n: v for n, v in shapes("k3").items() if ".experts." not in n}
    assert 2 * len(experts) == 494_592
    assert sum(dtype == torch.float32 for _, dtype in rest.values()) == 506
    assert sum(dtype == torch.bfloat16 for _, dtype in rest.values()) == 2_122 - 168
    assert audited("k3").tensors == len(shapes("k3")) == 497_220 - len(experts) - 168


def test_k3_dtypes_and_bytes() -> None:
    rest = [(math.prod(s), dtype) for n, (s, dtype) in shapes("k3").items() if ".experts." not in n]
    float32 = sum(n for n, dtype in rest if dtype == torch.float32)
    bfloat16 = sum(n for n, dtype in rest if dtype == torch.bfloat16)
    bfloat16 += part("k3", "vision tower") + part("k3", "vision projector")
    routed = part("k3", "routed experts")
    assert (float32, bfloat16, routed) == (FLOAT32, BFLOAT16, ROUTED)
    assert routed // 2 + routed // 32 + 2 * bfloat16 + 4 * float32 == 1_560_860_324_864


def test_k3_names_tell_each_layers_kind() -> None:
    names = shapes("k3")
    for i in range(93):
        latent = i % 4 == 3 or i == 92
        assert (f"model.layers.{i}.self_attn.kv_b_proj.weight" in names) == latent
        assert (f"model.layers.{i}.self_attn.A_log" in names) != latent
        assert (f"model.layers.{i}.mlp.gate_proj.weight" in names) == (i == 0)


def test_k3_shapes() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    expected = {
        "lm_head.weight": ([163840, 7168], bf16),
        "model.embed_tokens.weight": ([163840, 7168], bf16),
        "model.norm.weight": ([7168], bf16),
        "model.output_attn_res_norm.weight": ([7168], bf16),
        "model.output_attn_res_proj.weight": ([1, 7168], bf16),
        "model.layers.5.input_layernorm.weight": ([7168], bf16),
        "model.layers.5.post_attention_layernorm.weight": ([7168], bf16),
        "model.layers.5.self_attention_res_norm.weight": ([7168], bf16),
        "model.layers.5.self_attention_res_proj.weight": ([1, 7168], bf16),
        "model.layers.5.mlp_res_norm.weight": ([7168], bf16),
        "model.layers.5.mlp_res_proj.weight": ([1, 7168], bf16),
        "model.layers.5.self_attn.q_proj.weight": ([12288, 7168], bf16),
        "model.layers.5.self_attn.k_proj.weight": ([12288, 7168], bf16),
        "model.layers.5.self_attn.v_proj.weight": ([12288, 7168], bf16),
        "model.layers.5.self_attn.q_conv1d.weight": ([12288, 1, 4], fp32),
        "model.layers.5.self_attn.k_conv1d.weight": ([12288, 1, 4], fp32),
        "model.layers.5.self_attn.v_conv1d.weight": ([12288, 1, 4], fp32),
        "model.layers.5.self_attn.A_log": ([128], fp32),
        "model.layers.5.self_attn.dt_bias": ([12288], fp32),
        "model.layers.5.self_attn.o_norm.weight": ([128], fp32),
        "model.layers.5.self_attn.f_a_proj.weight": ([128, 7168], bf16),
        "model.layers.5.self_attn.f_b_proj.weight": ([12288, 128], bf16),
        "model.layers.5.self_attn.b_proj.weight": ([96, 7168], bf16),
        "model.layers.5.self_attn.g_proj.weight": ([12288, 7168], bf16),
        "model.layers.5.self_attn.o_proj.weight": ([7168, 12288], bf16),
        "model.layers.91.self_attn.q_a_proj.weight": ([1536, 7168], bf16),
        "model.layers.91.self_attn.q_a_layernorm.weight": ([1536], bf16),
        "model.layers.91.self_attn.q_b_proj.weight": ([18432, 1536], bf16),
        "model.layers.91.self_attn.kv_a_proj_with_mqa.weight": ([576, 7168], bf16),
        "model.layers.91.self_attn.kv_a_layernorm.weight": ([512], bf16),
        "model.layers.91.self_attn.kv_b_proj.weight": ([24576, 512], bf16),
        "model.layers.91.self_attn.g_proj.weight": ([12288, 7168], bf16),
        "model.layers.91.self_attn.o_proj.weight": ([7168, 12288], bf16),
        "model.layers.0.mlp.up_proj.weight": ([33792, 7168], bf16),
        "model.layers.0.mlp.down_proj.weight": ([7168, 33792], bf16),
        "model.layers.92.block_sparse_moe.gate.weight": ([896, 7168], bf16),
        "model.layers.92.block_sparse_moe.gate.e_score_correction_bias": ([896], fp32),
        "model.layers.92.block_sparse_moe.routed_expert_down_proj.weight": ([3584, 7168], bf16),
        "model.layers.92.block_sparse_moe.routed_expert_up_proj.weight": ([7168, 3584], bf16),
        "model.layers.92.block_sparse_moe.routed_expert_norm.weight": ([3584], bf16),
        "model.layers.92.block_sparse_moe.shared_experts.gate_proj.weight": ([6144, 7168], bf16),
        "model.layers.92.block_sparse_moe.shared_experts.down_proj.weight": ([7168, 6144], bf16),
        "model.layers.92.block_sparse_moe.experts.895.w1.weight": ([3072, 3584], bf16),
        "model.layers.92.block_sparse_moe.experts.895.w2.weight": ([3584, 3072], bf16),
        "model.layers.92.block_sparse_moe.experts.895.w3.weight": ([3072, 3584], bf16),
    }
    assert {name: shapes("k3")[name] for name in expected} == expected


# Kimi Linear


def test_kimi_linear() -> None:
    table = audited("kimi_linear_48b")
    assert table.total == 49_122_681_728 == owned("kimi_linear_48b", "")
    assert table.tensors == len(shapes("kimi_linear_48b")) == 20_493
    assert table.active == 3_106_972_544
    assert table.active - part("kimi_linear_48b", "head") == 2_729_485_184
    assert table.active + part("kimi_linear_48b", "embedding") == 3_484_459_904


def test_kimi_linear_shapes() -> None:
    layer = "model.layers"
    expected = {
        f"{layer}.0.self_attn.A_log": [1, 1, 32, 1],
        f"{layer}.0.self_attn.g_a_proj.weight": [128, 2304],
        f"{layer}.0.self_attn.g_b_proj.weight": [4096, 128],
        f"{layer}.3.self_attn.q_proj.weight": [6144, 2304],
        f"{layer}.26.self_attn.kv_b_proj.weight": [8192, 512],
        f"{layer}.0.mlp.gate_proj.weight": [9216, 2304],
        f"{layer}.1.block_sparse_moe.experts.255.w1.weight": [1024, 2304],
        f"{layer}.1.block_sparse_moe.shared_experts.down_proj.weight": [2304, 1024],
    }
    names = shapes("kimi_linear_48b")
    assert {name: names[name][0] for name in expected} == expected
    assert not [n for n in names if "_res_" in n or "routed_expert" in n or ".g_proj." in n]


# the others


def test_1b() -> None:
    table = audited("1b")
    assert table.total == pytest.approx(1.02e9, rel=5e-3)
    assert table.active == pytest.approx(145e6, rel=5e-3)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_counted(name: str) -> None:
    table = audited(name)
    assert 0 < table.active < table.total
    assert all(line.count > 0 and line.total > 0 for line in table.lines)


def test_a_real_model_has_as_many_parameters() -> None:
    """Beside `A_log`'s padding the audit counts what the model holds."""
    config = presets.nano()
    model = K3Model(config)
    held = sum(p.numel() for p in model.parameters()) + sum(b.bias.numel() for b in model.balancers().values())
    padding = 3 * (config.linear_attn_config.head_dim - config.linear_attn_config.num_heads)
    assert audited("nano").total == held + padding


def test_mtp_is_a_line_of_its_own() -> None:
    plain, more = audited("nano"), audit(presets.nano().replace(num_nextn_predict_layers=1))
    extra = next(line for line in more.lines if line.part == "multi-token prediction")
    assert extra.count == 1
    assert extra.total == more.total - plain.total > 0
    assert more.active == plain.active


# depth: how many sources each mixer reads


def test_attention_residual_sources_of_93_layers() -> None:
    released = presets.k3()
    linear = {"num_heads": 1, "head_dim": 2, "kda_layers": released.linear_attn_config.kda_layers}
    config: K3Config = released.replace(
        hidden_size=4, vocab_size=8, intermediate_size=4, num_attention_heads=1, q_lora_rank=2, kv_lora_rank=2,
        qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, num_experts=0, first_k_dense_replace=93, carried={},
        linear_attn_config=released.linear_attn_config.replace(**linear),
    )  # fmt: skip
    model = K3Model(config).eval()
    sources: dict[str, int] = {}

    def watch(name: str, mixer: nn.Module) -> None:
        def count(module: nn.Module, args: tuple[list[Tensor]]) -> None:
            sources[name] = len(args[0])

        mixer.register_forward_pre_hook(count)

    for name, module in model.named_modules():
        if isinstance(module, BlockAttnRes):
            watch(name.removeprefix("model."), module)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))

    assert len(sources) == 187
    assert sum(sources.values()) == 1003
    expected = {
        "layers.0.self_attention_res": 1,
        "layers.0.mlp_res": 2,
        "layers.1.self_attention_res": 2,
        "layers.11.mlp_res": 2,
        "layers.12.self_attention_res": 2,
        "layers.12.mlp_res": 3,
        "layers.84.self_attention_res": 8,
        "layers.84.mlp_res": 9,
        "layers.92.mlp_res": 9,
        "output_attn_res": 9,
    }
    assert {name: sources[name] for name in expected} == expected

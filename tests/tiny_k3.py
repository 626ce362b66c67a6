"""A K3-class model of five layers with everything on, small enough for float64 and alive in every parameter."""

import torch

from perilune.models.k3 import K3Config, K3Model, presets


def config(**changes) -> K3Config:
    nano = presets.nano()
    small = {
        "hidden_size": 32, "num_hidden_layers": 5, "vocab_size": 50, "intermediate_size": 40, "num_attention_heads": 2,
        "q_lora_rank": 12, "kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 12, "routed_expert_hidden_size": 16,
        "attn_res_block_size": 2, "initializer_range": 0.2,
        "linear_attn_config": nano.linear_attn_config.replace(
            num_heads=2, head_dim=8, kda_layers=(1, 3, 4), full_attn_layers=(2, 5)
        ),
    }  # fmt: skip
    return nano.replace(**{**small, **changes})


def model(dtype=torch.float64, **changes) -> K3Model:
    """Slow decay, so that what leaks between documents or gets lost between calls shows."""
    made = K3Model(config(**changes)).to(dtype)
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("query"):
                p.normal_()
            elif name.endswith("dt_bias"):
                p.uniform_(-9, -6)
            elif "norm" in name:
                p.normal_(1, 0.2)
        for balancer in made.balancers().values():
            balancer.bias.normal_(std=0.05)
    return made


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape)


def assert_close(got, expected, tolerance=1e-11, what="logits"):
    assert got.shape == expected.shape, what
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1) if got.numel() else 0
    assert error <= tolerance, f"{what}: relative error {error:.1e}"

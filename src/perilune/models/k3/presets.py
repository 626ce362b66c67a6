"""Ready configurations, from a laptop's to the released ones.  Imports without torch.

>>> nano().hidden_size
128
>>> get("1b").num_experts
256
"""

from collections.abc import Callable
from typing import Any

from perilune.core.errors import ConfigError, nearest
from perilune.models.k3.config import K3Config, LinearAttentionConfig, hybrid_layers


def _k3_class(
    *,
    width: int,
    layers: int,
    vocab: int,
    heads: int,
    head_dim: int = 128,
    q_rank: int,
    kv_rank: int,
    nope: int = 128,
    rope: int = 64,
    experts: int,
    top_k: int,
    shared: int,
    expert_width: int,
    latent: int,
    dense: int,
    block: int,
    mtp: int = 0,
    **carried: Any,
) -> K3Config:
    """Everything that all K3-class models here have in common."""
    return K3Config(
        hidden_size=width,
        num_hidden_layers=layers,
        vocab_size=vocab,
        intermediate_size=dense,
        rms_norm_eps=1e-5,
        num_attention_heads=heads,
        q_lora_rank=q_rank,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=head_dim,
        mla_use_output_gate=True,
        linear_attn_config=LinearAttentionConfig(
            num_heads=heads,
            head_dim=head_dim,
            short_conv_kernel_size=4,
            use_full_rank_gate=True,
            gate_lower_bound=-5.0,
            **hybrid_layers(layers),
        ),
        attn_res_block_size=block,
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        num_experts=experts,
        num_experts_per_token=top_k,
        num_shared_experts=shared,
        moe_intermediate_size=expert_width,
        moe_router_activation_func="sigmoid",
        moe_renormalize=True,
        routed_scaling_factor=1.0,
        routed_expert_hidden_size=latent,
        latent_moe_use_norm=True,
        num_nextn_predict_layers=mtp,
        carried={"max_position_embeddings": 1048576, **carried},
    )


def nano() -> K3Config:
    """2.3M parameters: every mechanism at a size that two CPU cores train in minutes."""
    return _k3_class(
        width=128, layers=4, vocab=2048, heads=4, head_dim=32, q_rank=64, kv_rank=64, nope=24, rope=8,
        experts=64, top_k=4, shared=1, expert_width=32, latent=64, dense=256, block=2,
    )  # fmt: skip


def small() -> K3Config:
    """0.12B parameters, 32M active."""
    return _k3_class(
        width=512, layers=8, vocab=16384, heads=4, q_rank=192, kv_rank=256,
        experts=64, top_k=4, shared=1, expert_width=256, latent=256, dense=1536, block=4,
    )  # fmt: skip


def one_b() -> K3Config:
    """1.02B parameters, 145M active."""
    return _k3_class(
        width=1024, layers=12, vocab=32768, heads=8, q_rank=384, kv_rank=512,
        experts=256, top_k=6, shared=1, expert_width=320, latent=320, dense=2048, block=4,
    )  # fmt: skip


def ten_b() -> K3Config:
    """10.2B parameters, 0.8B active."""
    return _k3_class(
        width=1536, layers=24, vocab=65536, heads=12, q_rank=512, kv_rank=512,
        experts=384, top_k=8, shared=2, expert_width=512, latent=704, dense=6144, block=6,
    )  # fmt: skip


def thirty_b() -> K3Config:
    """29B parameters, 2.1B active."""
    return _k3_class(
        width=2560, layers=32, vocab=131072, heads=20, q_rank=768, kv_rank=512,
        experts=512, top_k=8, shared=1, expert_width=640, latent=896, dense=8192, block=8,
    )  # fmt: skip


def hundred_b() -> K3Config:
    """99B parameters, 7.1B active."""
    return _k3_class(
        width=3584, layers=48, vocab=163840, heads=32, q_rank=1024, kv_rank=512,
        experts=640, top_k=12, shared=2, expert_width=896, latent=1152, dense=16384, block=12,
    )  # fmt: skip


VISION = {
    "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear", "vt_hidden_size": 1024,
    "vt_num_hidden_layers": 27, "vt_num_attention_heads": 12, "vt_intermediate_size": 4096, "qkv_hidden_size": 1536,
    "norm_type": "rmsnorm", "mlp_type": "mlp2", "attn_bias": False, "linear_bias": False,
    "patch_embed_proj_bias": False, "activation_func": "gelu_pytorch_tanh", "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool", "mm_projector_type": "patchmergerv2", "mm_hidden_size": 1024,
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": 7168,
}  # fmt: skip


def k3() -> K3Config:
    """The released K3: 2.78T parameters, 104.2B active."""
    outer = {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "ignore_index": -100,
        "media_placeholder_token_id": 163605, "tie_word_embeddings": False, "vision_config": VISION,
    }  # fmt: skip
    return _k3_class(
        width=7168, layers=93, vocab=163840, heads=96, q_rank=1536, kv_rank=512,
        experts=896, top_k=16, shared=2, expert_width=3072, latent=3584, dense=33792, block=12,
        model_type="kimi_linear", architectures=["KimiLinearForCausalLM"], topk_method="noaux_tc", outer=outer,
    )  # fmt: skip


def kimi_linear_48b() -> K3Config:
    """The released Kimi-Linear-48B-A3B: 49.1B parameters, 3.1B active."""
    return K3Config(
        hidden_size=2304,
        num_hidden_layers=27,
        vocab_size=163840,
        intermediate_size=9216,
        rms_norm_eps=1e-5,
        num_attention_heads=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_attn_config=LinearAttentionConfig(
            num_heads=32,
            head_dim=128,
            short_conv_kernel_size=4,
            kda_layers=tuple(i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)),
            full_attn_layers=(4, 8, 12, 16, 20, 24, 27),
        ),
        hidden_act="silu",
        first_k_dense_replace=1,
        moe_layer_freq=1,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        moe_router_activation_func="sigmoid",
        moe_renormalize=True,
        routed_scaling_factor=2.446,
        carried={
            "model_type": "kimi_linear",
            "architectures": ["KimiLinearForCausalLM"],
            "head_dim": 72,
            "rope_theta": 10000.0,
            "model_max_length": 1048576,
            "bos_token_id": 163584,
            "eos_token_id": 163586,
            "pad_token_id": 163839,
        },
    )


PRESETS: dict[str, Callable[[], K3Config]] = {
    "nano": nano,
    "small": small,
    "1b": one_b,
    "10b": ten_b,
    "30b": thirty_b,
    "100b": hundred_b,
    "kimi_linear_48b": kimi_linear_48b,
    "k3": k3,
}


def get(name: str) -> K3Config:
    """The preset of that name, as the command line spells it; ConfigError if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"preset: there is none called {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]()

"""Two whole tiny models against numbers computed elsewhere, from the equations alone.

Every tensor is filled by a hash of its released name and index, so the numbers hang on names, shapes, layouts and
every equation at once, and on no random generator.
"""

import zlib

import numpy as np
import pytest
import torch
from torch import Tensor

from perilune.models.k3 import K3Config, K3Model
from perilune.models.k3.convert import released_views, stored_shape
from perilune.nn import moe

K3_LIKE = {
    "hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 9, "intermediate_size": 160,
    "num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "mla_use_nope": True, "mla_use_output_gate": True, "num_experts": 16,
    "num_experts_per_token": 4, "num_shared_experts": 2, "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32, "latent_moe_use_norm": True, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.0, "hidden_act": "situ",
    "activation_situ_beta": 4, "activation_situ_linear_beta": 25, "attn_res_block_size": 4, "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
        "gate_lower_bound": -5, "full_attn_layers": [4, 8, 9], "kda_layers": [1, 2, 3, 5, 6, 7],
    },
}  # fmt: skip
KIMI_LINEAR_LIKE = {
    "hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 7, "intermediate_size": 160,
    "num_attention_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": True, "num_experts": 16, "num_experts_per_token": 4,
    "num_shared_experts": 1, "moe_intermediate_size": 32, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "linear_attn_config": {
        "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "full_attn_layers": [4, 7],
        "kda_layers": [1, 2, 3, 5, 6],
    },
}  # fmt: skip
CONFIGS = {"k3": K3_LIKE, "kimi_linear": KIMI_LINEAR_LIKE}
IDS = {
    "k3": [6, 14, 32, 60, 98, 146, 204, 16, 94, 182, 24, 132],
    "kimi_linear": [3, 13, 37, 75, 127, 193, 17, 111, 219, 85, 221, 115],
}
FIRST_LOGITS = {
    "k3": [1.3132128165, 1.4403551053, 0.5535087718, -0.8671219351, -0.9031729818],
    "kimi_linear": [1.4130197194, 1.0178385652, -0.0734139729, -0.2224176672, -0.3022589624],
}
LAST_LOGITS = {
    "k3": [0.6495357687, 0.9998388623, -0.9728905626, 0.9129516948, -0.2374312653],
    "kimi_linear": [-0.0780642386, 0.0200963781, 0.7753940843, -0.2927203085, 1.5904617352],
}
ARGMAX = {
    "k3": [96, 161, 39, 29, 204, 13, 76, 134, 14, 104, 168, 20],
    "kimi_linear": [119, 218, 27, 165, 254, 6, 37, 144, 165, 221, 171, 37],
}
MEAN_ABS = {"k3": 0.643935134989, "kimi_linear": 0.647663281592}
MEAN_NLL = {"k3": 5.577248903529, "kimi_linear": 5.985184834697}
RMS = {
    "k3": [0.48515147, 1.01929202, 1.43285735, 1.66474187, 0.92794387, 1.34482935, 1.65707497, 1.90651773, 0.88556539],
    "kimi_linear": [0.74752922, 0.97968423, 1.18525552, 1.31174127, 1.45592826, 1.57662058, 1.7225991],
}
EXPERTS = {  # of the last token, by MoE layer
    "k3": [
        {0, 3, 6, 7}, {4, 5, 6, 15}, {2, 6, 10, 12}, {8, 9, 10, 14},
        {1, 9, 11, 14}, {4, 7, 11, 15}, {9, 12, 13, 15}, {2, 7, 14, 15},
    ],
    "kimi_linear": [
        {5, 10, 11, 14}, {1, 2, 5, 9}, {1, 3, 4, 11}, {0, 3, 9, 12}, {0, 4, 5, 15}, {2, 6, 7, 11},
    ],
}  # fmt: skip
NAMES = ("k3", "kimi_linear")


def hashed(name: str, count: int) -> np.ndarray:
    """`count` numbers in [-1, 1) that depend on the name and the index alone."""
    seed = zlib.crc32(name.encode()) % 1009
    u = (np.arange(count, dtype=np.uint64) + np.uint64(1000003 * seed)) & np.uint64(0xFFFFFFFF)
    for _ in range(2):
        u = ((u ^ (u >> np.uint64(16))) * np.uint64(0x45D9F3B)) & np.uint64(0xFFFFFFFF)
    u ^= u >> np.uint64(16)
    return u.astype(np.float64) / 2**31 - 1


def filling(name: str, shape: torch.Size) -> Tensor:
    x = torch.from_numpy(hashed(name, shape.numel())).view(shape)
    module, _, kind = name.rpartition(".")
    if name.endswith("embed_tokens.weight"):
        return x
    if kind == "A_log":
        return 0.3 * x
    if kind == "dt_bias":
        return -2 + x
    if kind == "e_score_correction_bias":
        return 0.05 * x
    if module.endswith("_conv1d"):
        return 0.5 * x
    if "norm" in module:
        return 1 + 0.1 * x
    return 1.4 * x / shape[-1] ** 0.5


def golden_model(which: str, dtype: torch.dtype = torch.float64) -> K3Model:
    model = K3Model(K3Config.from_hf(CONFIGS[which])).to(dtype).eval()
    for name, view in released_views(model).items():
        view.copy_(filling(name, view.shape))
    return model


@torch.no_grad()
def logits_of(model: K3Model, which: str) -> Tensor:
    return model(torch.tensor([IDS[which]])).logits[0]


def close(got: Tensor, expected: list[float], digits: float) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=0, atol=digits)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[str, K3Model, Tensor]:
    model = golden_model(request.param)
    return request.param, model, logits_of(model, request.param)


def test_fill_rule() -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    assert zlib.crc32(name.encode()) % 1009 == 291
    close(filling(name, torch.Size([64, 64])).flatten()[:3], [-0.071083934, 0.058582690, 0.001954575], 5e-10)


@pytest.mark.parametrize(("which", "tensors", "parameters"), [("k3", 618, 797_280), ("kimi_linear", 423, 836_084)])
def test_tensors_and_parameters_are_counted(which: str, tensors: int, parameters: int) -> None:
    config = K3Config.from_hf(CONFIGS[which])
    views = released_views(golden_model(which))
    assert len(views) == tensors
    assert sum(view.numel() for view in views.values()) == parameters
    shapes = {name: stored_shape(name, view, config) for name, view in views.items()}
    assert shapes["model.layers.0.self_attn.A_log"] == ([16] if which == "k3" else [1, 1, 4, 1])
    unpadded = {n: s for n, s in shapes.items() if not n.endswith(".A_log")}
    assert all(list(views[n].shape) == s for n, s in unpadded.items())


def test_decay_is_filled_in_head_order() -> None:
    a_log = golden_model("k3").model.layers[0].self_attn.A_log.detach()
    close(a_log, [-0.115757761, 0.257812616, -0.247785639, 0.145682070], 5e-10)


def test_logits(case: tuple[str, K3Model, Tensor]) -> None:
    which, _, logits = case
    close(logits[0, :5], FIRST_LOGITS[which], 1e-10)
    close(logits[11, :5], LAST_LOGITS[which], 1e-10)
    assert logits.argmax(-1).tolist() == ARGMAX[which]
    close(logits.abs().mean(), MEAN_ABS[which], 1e-12)


@torch.no_grad()
def test_loss(case: tuple[str, K3Model, Tensor]) -> None:
    which, model, _ = case
    ids = torch.tensor([IDS[which]])
    close(model(ids, labels=ids).loss, MEAN_NLL[which], 1e-11)


def test_float32_agrees(case: tuple[str, K3Model, Tensor]) -> None:
    which, _, logits = case
    got = logits_of(golden_model(which, torch.float32), which)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), logits, rtol=0, atol=2e-5)  # rounding alone makes 1e-5 of it


def test_residual_stream_after_each_layer(case: tuple[str, K3Model, Tensor]) -> None:
    which, model, _ = case
    live: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda m, args, out: live.append(args[0].live)) for layer in model.model.layers
    ]
    logits_of(model, which)
    for hook in hooks:
        hook.remove()
    close(torch.stack([x.square().mean().sqrt() for x in live]), RMS[which], 1e-8)
    if which == "k3":
        close(live[0][0, -1, :3], [-0.17838766, 0.44039241, 0.27753637], 1e-8)
        close(live[8][0, -1, :3], [0.24507103, -0.08887749, -0.57657769], 1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("which", NAMES)
def test_experts_of_the_last_token(which: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[set[int]] = []
    plain = moe.route

    def recording(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        ids, weights = plain(*args, **kwargs)
        chosen.append(set(ids[-1].tolist()))
        return ids, weights

    monkeypatch.setattr(moe, "route", recording)
    logits_of(golden_model(which, dtype), which)
    assert chosen == EXPERTS[which]


@torch.no_grad()
def test_kda_state_after_the_last_token() -> None:
    model = golden_model("k3")
    cache = model.new_cache(1)
    model(torch.tensor([IDS["k3"]]), cache=cache)
    close(cache.layers[0].state[0].norm(dim=(1, 2)), [0.7413803, 0.56968686, 0.90684772, 0.68297067], 1e-8)


def test_without_pseudo_queries() -> None:
    model = golden_model("k3")
    for name, view in released_views(model).items():
        if name.endswith("_res_proj.weight"):
            view.zero_()
    expected = [0.0591935140, 0.2093439805, -1.3198300709, -0.3322016637, -0.4593295693]
    close(logits_of(model, "k3")[11, :5], expected, 1e-10)


def test_without_selection_bias() -> None:
    model = golden_model("k3")
    for name, view in released_views(model).items():
        if name.endswith("e_score_correction_bias"):
            view.zero_()
    close(logits_of(model, "k3")[11, :3], [1.6694646573, -0.1224692190, -1.5462059430], 1e-10)


@torch.no_grad()
def test_prefill_in_pieces_equals_one_shot(case: tuple[str, K3Model, Tensor]) -> None:
    which, model, logits = case
    cache = model.new_cache(1)
    pieces = torch.tensor([IDS[which]]).split([5, 1, 3, 1, 1, 1], dim=1)
    got = torch.cat([model(piece, cache=cache).logits for piece in pieces], dim=1)[0]
    torch.testing.assert_close(got, logits, rtol=0, atol=1e-12)
    assert cache.lengths == [12]

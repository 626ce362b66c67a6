"""Models to files and back: bit for bit, every damage named, nothing half written taken for whole."""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from perilune.core.errors import CheckpointError
from perilune.models.k3 import K3Config, K3Model, convert, presets
from perilune.models.k3.config import LinearAttentionConfig
from perilune.models.k3.convert import from_stored, released_views, stored_shape, to_stored

FINE = 1 + 2**-12  # not to be had in bfloat16
PINNED = re.compile(r"(A_log|dt_bias|_conv1d\.weight|o_norm\.weight|e_score_correction_bias)$")  # always float32


def tiny(**changes: object) -> K3Config:
    """K3 at the size of a test: 4 KDA heads of width 6, so that the stored `A_log` has 6 entries."""
    config = presets.nano().replace(
        hidden_size=16, vocab_size=40, num_hidden_layers=3, intermediate_size=20, num_attention_heads=2,
        q_lora_rank=7, kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=3, v_head_dim=4, num_experts=6,
        num_experts_per_token=2, moe_intermediate_size=8, routed_expert_hidden_size=12,
        linear_attn_config=LinearAttentionConfig(
            num_heads=4, head_dim=6, short_conv_kernel_size=4, use_full_rank_gate=True, gate_lower_bound=-5.0,
            kda_layers=(1, 3), full_attn_layers=(2,),
        ),
    )  # fmt: skip
    return config.replace(**changes)


def kimi_like() -> K3Config:
    linear = tiny().linear_attn_config.replace(use_full_rank_gate=False, gate_lower_bound=None)
    return tiny(
        linear_attn_config=linear, q_lora_rank=None, mla_use_output_gate=False, attn_res_block_size=None,
        hidden_act="silu", activation_situ_beta=None, activation_situ_linear_beta=None,
        routed_expert_hidden_size=None, latent_moe_use_norm=False,
    )  # fmt: skip


def multimodal() -> K3Config:
    return tiny(carried={"model_type": "kimi_linear", "outer": {"model_type": "kimi_k3"}})


def drawn(config: K3Config, seed: int = 0) -> K3Model:
    """A model whose every stored tensor differs from what initialisation gives."""
    torch.manual_seed(seed)
    model = K3Model(config)
    for view in released_views(model).values():
        view.normal_()
    return model


def assert_same(got: K3Model, expected: K3Model) -> None:
    a, b = released_views(got), released_views(expected)
    assert list(a) == list(b)
    for name, view in a.items():
        assert view.dtype == b[name].dtype, name
        assert torch.equal(view, b[name]), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


# round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", [tiny(), kimi_like(), multimodal()], ids=["k3", "kimi_linear", "multimodal"])
def test_round_trip(config: K3Config, dtype: torch.dtype, folder: Path) -> None:
    model = drawn(config).to(dtype)
    model.save_pretrained(folder)
    again = K3Model.from_pretrained(folder)
    assert again.config == config
    assert_same(again, model)
    assert all(t.device.type == "cpu" and t.isfinite().all() for t in again.state_dict().values())


def test_what_lies_on_disk(folder: Path) -> None:
    model = drawn(tiny()).bfloat16()
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    views = released_views(model)
    assert set(stored) == set(views)
    for name, tensor in stored.items():
        assert list(tensor.shape) == stored_shape(name, views[name], model.config), name
        assert tensor.dtype == (torch.float32 if PINNED.search(name) else torch.bfloat16), name
    layer = model.model.layers[2]
    experts = layer.block_sparse_moe.experts
    prefix = "model.layers.2"
    assert torch.equal(stored[f"{prefix}.block_sparse_moe.experts.5.w2.weight"], experts.w2[5])
    assert torch.equal(stored[f"{prefix}.mlp_res_proj.weight"], layer.mlp_res.query[None])
    a_log = stored[f"{prefix}.self_attn.A_log"]
    assert torch.equal(a_log, torch.cat([layer.self_attn.A_log, torch.zeros(2)]))


def test_loaded_model_computes_the_same(folder: Path) -> None:
    model = drawn(tiny()).eval()
    model.save_pretrained(folder)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(K3Model.from_pretrained(folder).eval()(ids).logits, model(ids).logits)


def test_dtype_of_choice(folder: Path) -> None:
    drawn(tiny()).bfloat16().save_pretrained(folder)
    views = released_views(K3Model.from_pretrained(folder, dtype=torch.float32))
    assert {v.dtype for v in views.values()} == {torch.float32}
    views = released_views(K3Model.from_pretrained(folder, dtype=torch.bfloat16))
    assert {n for n, v in views.items() if v.dtype == torch.float32} == {n for n in views if PINNED.search(n)}


def test_multimodal_names(folder: Path) -> None:
    drawn(multimodal()).save_pretrained(folder)
    assert all(name.startswith("language_model.") for name in load_file(folder / "model.safetensors"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "kimi_k3"


def test_vision_tensors_are_left_unread(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = drawn(multimodal())
    model.save_pretrained(folder)
    add(folder, "vision_tower.patch_embed.proj.weight", torch.ones(2))
    add(folder, "mm_projector.proj.0.weight", torch.ones(2))
    with caplog.at_level(logging.WARNING, "perilune"):
        assert_same(K3Model.from_pretrained(folder), model)
    assert "left 2 tensors unread" in caplog.text


def test_mtp_tensors_are_optional(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint with them fits a model without; one without them fits a model that has them."""
    model = drawn(tiny(num_nextn_predict_layers=1))
    model.save_pretrained(folder)
    assert_same(K3Model.from_pretrained(folder), model)
    rewrite_config(folder, num_nextn_predict_layers=0)
    with caplog.at_level(logging.WARNING, "perilune"):
        assert not K3Model.from_pretrained(folder).model.mtp
    assert "unread" in caplog.text
    drawn(tiny()).save_pretrained(folder)
    rewrite_config(folder, num_nextn_predict_layers=1)
    assert all(p.isfinite().all() for p in K3Model.from_pretrained(folder).parameters())


# float32 that must stay so


def test_float32_tensors_survive_casting_and_files(folder: Path) -> None:
    model = K3Model(tiny())
    pinned = {n: v for n, v in released_views(model).items() if PINNED.search(n)}
    assert {PINNED.search(n)[1] for n in pinned} == {
        "A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias",
    }  # fmt: skip
    for view in pinned.values():
        view.fill_(FINE)
    model.to(torch.bfloat16).save_pretrained(folder)
    again = K3Model.from_pretrained(folder).bfloat16().half().to(torch.bfloat16)
    again.save_pretrained(folder)
    views = released_views(K3Model.from_pretrained(folder, dtype=torch.bfloat16))
    for name in pinned:
        assert views[name].dtype == torch.float32, name
        assert (views[name] == FINE).all(), name


def test_close_selection_biases_stay_apart(folder: Path) -> None:
    """Both are 0.30078125 in bfloat16."""
    model = K3Model(tiny())
    bias = released_views(model)["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"]
    bias[:2] = torch.tensor([0.30128125, 0.3000])
    model.bfloat16().save_pretrained(folder)
    again = released_views(K3Model.from_pretrained(folder))[
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    ]
    assert again.dtype == torch.float32
    assert torch.equal(again, bias)


def test_bfloat16_files_are_raised_to_float32(folder: Path) -> None:
    """Releases may store the small tensors in bfloat16; in memory they are float32."""
    model = drawn(kimi_like()).bfloat16()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file)
    for name, view in released_views(K3Model.from_pretrained(folder)).items():
        expected = released_views(model)[name]
        assert view.dtype == expected.dtype
        assert torch.equal(view, expected.bfloat16().to(view.dtype)), name


# initialisation never touches loaded weights, and leaves nothing undefined


@pytest.mark.parametrize("config", [tiny(), kimi_like()], ids=["k3", "kimi_linear"])
def test_loading_keeps_the_decay(config: K3Config, folder: Path) -> None:
    model = K3Model(config)
    for layer in (0, 2):
        released_views(model)[f"model.layers.{layer}.self_attn.A_log"].fill_(1.2345)
    model.save_pretrained(folder)
    views = released_views(K3Model.from_pretrained(folder))
    for layer in (0, 2):
        assert (views[f"model.layers.{layer}.self_attn.A_log"] == torch.tensor(1.2345)).all()


KNOWN: list[tuple[str, Callable[[Tensor], object]]] = [  # released name, what initialisation promises
    (r"e_score_correction_bias$|_res_proj\.weight$", lambda t: (t == 0).all()),
    (r"norm\.weight$", lambda t: (t == 1).all()),
    (r"dt_bias$", lambda t: ((t >= -6.9073) & (t <= -2.2521)).all() and t.std() > 0),
    (r"conv1d\.weight$", lambda t: (t.abs() <= 0.5).all() and t.std() > 0.2),
    (r"block_sparse_moe\.gate\.weight$", lambda t: (t.abs() <= t.shape[1] ** -0.5).all() and t.std() > 0.1),
    (
        r"(proj|proj_with_mqa|w[123]|lm_head|embed_tokens)\.weight$",
        lambda t: 0.014 < t.std() < 0.026 and t.abs().max() < 0.12,
    ),
]


@pytest.mark.parametrize("config", [tiny(num_nextn_predict_layers=1), kimi_like()], ids=["k3", "kimi_linear"])
def test_meta_device_then_initialised(config: K3Config) -> None:
    """`torch.empty` gives NaN in these tests, so what is left uninitialised shows."""
    with torch.device("meta"):
        model = K3Model(config)
    model.to_empty(device="cpu")
    assert model.lm_head.weight.isnan().all()
    model.init_weights()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.isfinite().all(), name
    bounded = config.linear_attn_config.gate_lower_bound is not None
    for name, view in released_views(model).items():
        if name.endswith("A_log"):
            assert (view == 0).all() if bounded else ((view >= 0) & (view <= torch.tensor(16.0).log())).all(), name
            continue
        promise = next(check for pattern, check in KNOWN if re.search(pattern, name))
        assert promise(view), name
    for balancer in model.balancers().values():
        assert all((statistic == 0).all() for statistic in balancer.statistics())


def test_the_pad_row_is_zero() -> None:
    weight = K3Model(tiny(carried={"pad_token_id": 39})).model.embed_tokens.weight
    assert (weight[39] == 0).all()
    assert (weight[:39].abs().sum(1) > 0).all()


# tied embeddings


def test_tied_embeddings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 4000)
    model = drawn(tiny(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    assert "lm_head.weight" not in index["weight_map"]
    again = K3Model.from_pretrained(folder)
    assert_same(again, model)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    again.model.embed_tokens.weight.data.fill_(3)
    assert (again.bfloat16().lm_head.weight == 3).all()


def test_untied_embeddings_are_two_tensors(folder: Path) -> None:
    drawn(tiny()).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


# shards


def test_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn(tiny())
    monkeypatch.setattr(convert, "SHARD_BYTES", 6000)
    model.save_pretrained(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 5
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    shards = {f.name: load_file(f) for f in files}
    assert index["weight_map"] == {name: file for file, shard in shards.items() for name in shard}
    sizes = [sum(t.nbytes for t in shard.values()) for shard in shards.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size <= 6000 or len(shard) == 1 for size, shard in zip(sizes, shards.values()))
    assert_same(K3Model.from_pretrained(folder), model)


# the padded decay


@pytest.mark.parametrize(
    ("heads", "width", "stored"), [(96, 128, 128), (128, 128, 128), (129, 128, 256), (4, 16, 16), (20, 16, 32)]
)
def test_decay_is_padded_to_the_head_width(heads: int, width: int, stored: int) -> None:
    config = tiny(linear_attn_config=tiny().linear_attn_config.replace(head_dim=width))
    name, a_log = "model.layers.0.self_attn.A_log", torch.randn(heads)
    padded = to_stored(name, a_log, config)
    assert list(padded.shape) == [stored] == stored_shape(name, a_log, config)
    assert torch.equal(padded[:heads], a_log)
    assert (padded[heads:] == 0).all()
    assert torch.equal(from_stored(name, padded, torch.empty(heads)), a_log)


def test_decay_of_the_softplus_gate_is_four_dimensional() -> None:
    name, a_log = "model.layers.0.self_attn.A_log", torch.randn(4)
    stored = to_stored(name, a_log, kimi_like())
    assert torch.equal(stored, a_log.view(1, 1, 4, 1))
    assert torch.equal(from_stored(name, stored, torch.empty(4)), a_log)


# damage, each named in one line


def add(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Puts the tensor into the file, or takes it out."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, file)


def rewrite_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_index(folder: Path, **entries: object) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"] | entries
    path.write_text(json.dumps({"weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        K3Model.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def saved(folder: Path) -> Path:
    drawn(tiny()).save_pretrained(folder)
    return folder


@pytest.fixture
def sharded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(convert, "SHARD_BYTES", 6000)
    drawn(tiny()).save_pretrained(folder)
    return folder


NORM = "model.layers.1.input_layernorm.weight"


def test_missing_tensor(saved: Path) -> None:
    add(saved, NORM, None)
    assert f"expected the tensor {NORM}, found none (1 missing)" in refusal(saved)


def test_unexpected_tensor(saved: Path) -> None:
    add(saved, "model.layers.1.self_attn.rotary.weight", torch.ones(2))
    assert "no place for the tensor model.layers.1.self_attn.rotary.weight (1 unexpected)" in refusal(saved)


def test_wrong_shape(saved: Path) -> None:
    add(saved, NORM, torch.ones(17))
    assert f"{NORM}: expected shape [16], got [17]" in refusal(saved)


def test_transposed_matrix(saved: Path) -> None:
    add(saved, "model.layers.0.self_attn.f_a_proj.weight", torch.ones(16, 6))
    assert "model.layers.0.self_attn.f_a_proj.weight: expected shape [6, 16], got [16, 6]" in refusal(saved)


def test_decay_with_values_behind_its_heads(saved: Path) -> None:
    add(saved, "model.layers.2.self_attn.A_log", torch.tensor([1.0, 2, 3, 4, 0, 1e-30]))
    assert "model.layers.2.self_attn.A_log: expected zeros behind its 4 heads" in refusal(saved)


def test_decay_of_too_few_heads(saved: Path) -> None:
    add(saved, "model.layers.2.self_attn.A_log", torch.ones(3))
    assert "model.layers.2.self_attn.A_log: expected shape [4], got [3]" in refusal(saved)


def test_packed_experts(saved: Path) -> None:
    add(saved, "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed", torch.ones(2, dtype=torch.uint8))
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed (MXFP4)" in refusal(saved)


def test_another_kind_of_model(saved: Path) -> None:
    add(saved, "model.embed_tokens.weight", None)
    assert "model.embed_tokens.weight, found none; this is not a K3-class checkpoint" in refusal(saved)


def test_no_folder(tmp_path: Path) -> None:
    assert "found no config.json" in refusal(tmp_path / "nowhere")


def test_no_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    assert "expected model.safetensors or its index, found neither" in refusal(saved)


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_damaged_config(saved: Path, text: str) -> None:
    (saved / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "config.json: expected" in refusal(saved)


@pytest.mark.parametrize("size", [0, 7, 100, 5000])
def test_truncated_file(saved: Path, size: int) -> None:
    os.truncate(saved / "model.safetensors", size)
    assert "model.safetensors: expected safetensors" in refusal(saved)


def test_damaged_header(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    assert "model.safetensors: expected safetensors" in refusal(saved)


def test_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    os.truncate(shard, shard.stat().st_size - 1)
    assert f"{shard.name}: expected safetensors" in refusal(sharded)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    shard.unlink()
    assert f"expected the shard {shard.name}, found none" in refusal(sharded)


def test_shard_without_the_promised_tensor(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map[NORM] != shard.name
    rewrite_index(sharded, **{NORM: shard.name})
    message = refusal(sharded)
    assert shard.name in message
    assert NORM in message


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"a": [1]}}',
        '{"weight_map": {"a": 1, "b": "c"}}',
        "\udcff",
    ],
)
def test_damaged_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "model.safetensors.index.json: expected a weight_map" in refusal(sharded)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/secret.safetensors", "sub/secret.safetensors", "."])
def test_index_that_leaves_the_folder(sharded: Path, file: object) -> None:
    rewrite_index(sharded, **{NORM: file})
    assert f"expected file names without folders, got {file!r}" in refusal(sharded)


def test_index_that_names_the_parent_folder(sharded: Path) -> None:
    rewrite_index(sharded, **{NORM: ".."})
    assert "expected the shard .., found none" in refusal(sharded)


def test_half_a_prefix_is_no_excuse(folder: Path) -> None:
    """Names with and without the multimodal prefix in one file: each is read, none is left at random."""
    model = drawn(multimodal())
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("language_model.lm_head.weight")
    save_file(tensors, file)
    assert_same(K3Model.from_pretrained(folder), model)


# saving over, and being interrupted


class Interrupted(BaseException):
    pass


@pytest.fixture
def interruption(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The third shard is never written."""
    written = []

    def failing(tensors: dict[str, Tensor], file: Path, **kwargs: object) -> None:
        if len(written) == 2:
            file.write_bytes(b"half")
            raise Interrupted
        written.append(file)
        save_file(tensors, file, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "SHARD_BYTES", 6000)
        patch.setattr(convert, "save_file", failing)
        yield


def test_interrupted_save_leaves_the_old_model(saved: Path, request: pytest.FixtureRequest) -> None:
    old, new = K3Model.from_pretrained(saved), drawn(tiny(), seed=1)
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    request.getfixturevalue("interruption")
    with pytest.raises(Interrupted):
        new.save_pretrained(saved)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert_same(K3Model.from_pretrained(saved), old)


def test_saving_again_after_an_interruption(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn(tiny())

    def failing(*args: object, **kwargs: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(convert, "save_file", failing)
        with pytest.raises(Interrupted):
            model.save_pretrained(folder)
    assert "found no config.json" in refusal(folder)
    model.save_pretrained(folder)
    assert_same(K3Model.from_pretrained(folder), model)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_interrupted_while_moving_is_no_model(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of two models side by side must not load as one."""
    moved = []
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if len(moved) == 2:
            raise Interrupted
        moved.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(convert.os, "replace", failing)
        with pytest.raises(Interrupted):
            drawn(tiny(), seed=1).save_pretrained(sharded)
    assert "found no config.json" in refusal(sharded)


def test_saving_over_another_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer shards, then one file, then shards again: nothing stale stays, and what is not the model's does."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for seed, size in enumerate([3000, 20000, 10**9, 6000]):
        monkeypatch.setattr(convert, "SHARD_BYTES", size)
        model = drawn(tiny(), seed)
        model.save_pretrained(folder)
        assert_same(K3Model.from_pretrained(folder), model)
        index = folder / "model.safetensors.index.json"
        files = {p.name for p in folder.glob("*.safetensors")}
        if size == 10**9:
            assert files == {"model.safetensors"}
            assert not index.exists()
        else:
            assert files == set(json.loads(index.read_text())["weight_map"].values())
        assert (folder / "tokenizer.json").read_text() == "{}"


def test_saving_into_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    monkeypatch.chdir(folder)
    model = drawn(tiny())
    model.save_pretrained(".")
    assert_same(K3Model.from_pretrained("."), model)
    assert_same(K3Model.from_pretrained(str(folder)), model)

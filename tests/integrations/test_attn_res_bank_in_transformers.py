"""The bank of attention residuals inside decoders of `transformers`."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from perilune.core.errors import ConfigError
from perilune.integrations import add_attn_res, load_attn_res
from perilune.nn import DepthStream

IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
D, LAYERS = 32, 4


def make(family: str, block_size: int | str, bank: str | None, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "gpt2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=50, n_embd=D, n_head=2, n_positions=64, n_layer=LAYERS, **still, **IDS)
        )
    else:
        sizes = {"hidden_size": D, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=LAYERS, **sizes, **IDS))
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.2)
    for mixer in add_attn_res(model.to(dtype), block_size, bank=bank):
        nn.init.normal_(mixer.query)
    return model.eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(7))


def gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def llama_by_hand(model: PreTrainedModel, ids: Tensor, period: int, bank: str) -> Tensor:
    decoder = model.model
    x = decoder.embed_tokens(ids)
    places = torch.arange(ids.shape[1])[None]
    rope = decoder.rotary_emb(x, places)
    mask = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)[None, None]
    stream = DepthStream(x, period, bank)
    for layer in decoder.layers:
        h = layer.input_layernorm(stream.read(layer.self_attention_res))
        stream.add(layer.self_attn(h, position_embeddings=rope, attention_mask=mask)[0])
        stream.add(layer.mlp(layer.post_attention_layernorm(stream.read(layer.mlp_res))))
    return model.lm_head(decoder.norm(stream.mixed(decoder.layers[-1].output_attn_res)))


@pytest.mark.parametrize("bank", ["bfloat16", "float8"])
@pytest.mark.parametrize("block_size", ["full", 1, 3, 100])
def test_layers_hand_on_what_one_stream_holds(block_size: int | str, bank: str) -> None:
    model, ids = make("llama", block_size, bank), tokens(2, 9)
    period = 1 if block_size == "full" else 2 * block_size
    # rounding goes either way where sums in another order differ in their last bits
    torch.testing.assert_close(model(ids).logits, llama_by_hand(model, ids, period, bank), rtol=1e-6, atol=1e-6)
    whole = make("llama", block_size, None)
    assert (model(ids).logits - whole(ids).logits).abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bank", ["bfloat16", "float8"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_changes_nothing(family: str, bank: str, dtype: torch.dtype) -> None:
    """Bit by bit; the reentrant kind, which adds gradients in another order, up to that."""
    for block_size in ("full", 2):
        model, ids = make(family, block_size, bank, dtype).train(), tokens(2, 9)
        want = gradients(model, ids)
        again = copy.deepcopy(model)
        again.gradient_checkpointing_enable({"use_reentrant": False})
        got = gradients(again, ids)
        assert all(torch.equal(got[name], expected) for name, expected in want.items())
        if dtype == torch.bfloat16:  # every one of those sums is rounded, with a bank or without
            continue
        again.gradient_checkpointing_enable({"use_reentrant": True})
        again.enable_input_require_grads()
        got, near = gradients(again, ids), 1e-10 if dtype == torch.float64 else 3e-4
        for name, expected in want.items():
            assert (got[name] - expected).norm() <= near * expected.norm() + 1e-12, name


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model, ids = make("llama", 2, "float8", torch.float32), tokens(1, 8)
    model.save_pretrained(tmp_path)
    loaded = load_attn_res(LlamaForCausalLM, tmp_path).eval()
    assert loaded.config.attn_res == {"block_size": 2, "start": "residual", "bank": "float8"}
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_an_unknown_bank_leaves_the_model_as_it_was() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_hidden_layers=2, hidden_size=32, intermediate_size=8, num_attention_heads=2)
    )
    layer = type(model.model.layers[0])
    with pytest.raises(ConfigError, match="bank: expected 'bfloat16' or 'float8', got 'int4'"):
        add_attn_res(model, 1, bank="int4")
    assert type(model.model.layers[0]) is layer
    assert not hasattr(model.config, "attn_res")

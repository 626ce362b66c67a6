"""Attention residuals inside decoders of `transformers`: where they start, and what people do with a model."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from perilune.core.errors import ConfigError, ShapeError
from perilune.integrations import add_attn_res, load_attn_res, replace_attention
from perilune.nn import BlockAttnRes
from ranks import run_ranks

ROOT = Path(__file__).parents[2]
LAYERS, D = 5, 32
IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
SIZES = {
    "vocab_size": 50,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **IDS,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"vocab_size": 50, "n_embd": D, "n_head": 2, "n_positions": 64, **NO_DROPOUT, **IDS}
FAMILIES = {
    "llama": lambda **o: LlamaForCausalLM(LlamaConfig(**SIZES, **o)),
    "mistral": lambda **o: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4, **o)),
    "qwen2": lambda **o: Qwen2ForCausalLM(Qwen2Config(**SIZES, **o)),
    "qwen3": lambda **o: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=4, max_window_layers=2, **o)
    ),
    "gpt2": lambda **o: GPT2LMHeadModel(GPT2Config(**GPT2, **o)),
}
BLOCK_SIZES = ["full", 1, 2, 5, 100]


def make(family: str, layers: int = LAYERS, **options) -> PreTrainedModel:
    """In float64, with matrices large enough for every layer to matter."""
    torch.manual_seed(0)
    model = FAMILIES[family](**{"n_layer" if family == "gpt2" else "num_hidden_layers": layers}, **options)
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.2)
    return model.double().eval()


def learned(family: str, block_size: int | str = 2, **options) -> PreTrainedModel:
    """With mixers that mix unevenly."""
    model = make(family)
    for mixer in add_attn_res(model, block_size, **options):
        nn.init.normal_(mixer.query)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(7))


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    decoder = model.get_decoder()
    return decoder.h if isinstance(model, GPT2LMHeadModel) else decoder.layers


def gradients(model: PreTrainedModel, ids: Tensor, **options) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, **options).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Norms of these models are float32 inside."""
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")  # noqa: B023


# The start


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_starts_as_the_model_that_it_was_with_its_gradients(family: str, block_size: int | str) -> None:
    plain = make(family)
    model, ids = copy.deepcopy(plain), tokens(2, 12)
    mixers = add_attn_res(model, block_size)
    assert len(mixers) == 2 * LAYERS + 1
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-6, atol=1e-6)
    assert_same(gradients(model, ids), gradients(plain, ids))
    assert mixers[0].query.grad.eq(0).all()  # it has one source
    assert min(mixer.query.grad.abs().max() for mixer in mixers[1:]) > 1e-5
    assert [name for name, _ in model.named_parameters() if "_res." not in name] == [
        name for name, _ in plain.named_parameters()
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_mean_is_the_same_model_but_for_the_eps_of_its_norms(family: str) -> None:
    plain, ids = make(family), tokens(2, 12)
    for module in plain.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 1e-12)
    model = copy.deepcopy(plain)
    add_attn_res(model, 1, start="mean")
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_leaves_the_plain_residual(family: str) -> None:
    """Mixers alone are trained, and on one batch they fit what the frozen model does not."""
    model, ids = make(family).requires_grad_(False), tokens(4, 12)
    mixers = add_attn_res(model, 1)
    optimizer = torch.optim.Adam([p for mixer in mixers for p in mixer.parameters()], lr=0.05)
    losses = []
    for _ in range(30):
        loss = model(ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2
    assert all(p.grad is None for name, p in model.named_parameters() if "_res." not in name)
    assert min(mixer.query.abs().max() for mixer in mixers[1:]) > 0.1


# The equation


@pytest.mark.parametrize("start", ["residual", "mean"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_every_sublayer_reads(family: str, block_size: int | str, start: str) -> None:
    """Against lists and sums over what the sublayers returned."""
    model, ids = learned(family, block_size, start=start), tokens(2, 9)
    reads, outputs, ends = [], [], []
    names = ("ln_1", "attn", "ln_2", "mlp") if family == "gpt2" else (
        "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")  # fmt: skip
    for layer in layers_of(model):
        for norm, sublayer in (names[:2], names[2:]):
            layer.get_submodule(norm).register_forward_pre_hook(lambda _, args: reads.append(args[0]))
            layer.get_submodule(sublayer).register_forward_hook(
                lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out)
            )
    final = model.transformer.ln_f if family == "gpt2" else model.model.norm
    final.register_forward_pre_hook(lambda _, args: ends.append(args[0]))
    model(ids)
    mixers = [part for part in model.modules() if isinstance(part, BlockAttnRes)]
    order = [layer.get_submodule(f"{name}_res") for layer in layers_of(model) for name in ("self_attention", "mlp")]
    order.append(layers_of(model)[-1].output_attn_res)
    assert len(mixers) == len(order) == len(reads) + 1
    bank, live = [], reads[0]
    for n, mixer in enumerate(order):
        sources = [*bank, live]
        scores = torch.stack([(v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt()) @ mixer.query for v in sources])
        h = (scores.softmax(0)[..., None] * torch.stack(sources)).sum(0) * (len(sources) if start == "residual" else 1)
        torch.testing.assert_close((reads + ends)[n], h, rtol=1e-9, atol=1e-9)
        if n < 2 * LAYERS:
            if n % (1 if block_size == "full" else 2 * block_size) == 0:
                bank, live = sources, torch.zeros_like(live)
            live = live + outputs[n]


# What people do with a model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family: str, attention: str) -> None:
    model = make(family, attn_implementation=attention).float()
    for mixer in add_attn_res(model, 2):
        nn.init.normal_(mixer.query)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(together[1:, 4:], model(ids[1:, 4:]).logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(together[:1], model(ids[:1]).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_generating_with_a_cache_is_generating_without(family: str) -> None:
    model, ids = learned(family), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    for options in ({}, {"num_beams": 3}):
        options |= {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(*(model.generate(ids, use_cache=use, **options) for use in (True, False)))
    out = model(ids[:, :5], use_cache=True)
    pieces = [out.logits]
    for part in (ids[:, 5:6], ids[:, 6:]):
        out = model(part, cache=out.cache, use_cache=True)
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), model(ids).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("block_size", ["full", 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_have_the_same_gradients(family: str, block_size: int | str, reentrant: bool) -> None:
    model, ids = learned(family, block_size).train(), tokens(2, 9)
    calls = []
    layers_of(model)[1].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    want = gradients(model, ids, use_cache=False)
    assert len(calls) == 1
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same(gradients(model, ids), want, 1e-11, 1e-13)
    assert len(calls) == 3  # and once more in the backward pass
    model.gradient_checkpointing_disable()
    assert_same(gradients(model, ids), want, 1e-11, 1e-13)
    assert len(calls) == 4


def test_recomputed_layers_keep_one_tensor_each() -> None:
    """Beside finished blocks: what the graph holds grows with depth by the live sum alone, and by far less than it
    does without recomputation."""

    def kept(layers: int, recompute: bool) -> int:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers)).train()
        add_attn_res(model, 100)
        if recompute:
            model.gradient_checkpointing_enable()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            if x.untyped_storage().data_ptr() not in weights:
                held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(tokens(2, 16), labels=tokens(2, 16), use_cache=False).loss
        total = sum(held.values())
        loss.backward()
        return total

    source = 2 * 16 * D * 4
    recomputed, plain = ((kept(6, on) - kept(3, on)) / 3 for on in (True, False))
    assert recomputed <= source
    assert plain > 8 * source


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_to_the_bit(family: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    model = make(family, tie_word_embeddings=tied)
    for mixer in add_attn_res(model, 2, start="mean"):
        nn.init.normal_(mixer.query)
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load_attn_res(type(model), tmp_path)
    assert type(again) is type(model)
    assert again.config.attn_res == {"block_size": 2, "start": "mean"}
    assert again.dtype == dtype
    state = again.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    if dtype == torch.float64:  # in bfloat16 a cast took bits from the rotation's frequencies, which are not saved
        torch.testing.assert_close(again(tokens(1, 9)).logits, model(tokens(1, 9)).logits, rtol=1e-6, atol=1e-6)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    built = make(family, tie_word_embeddings=tied).to(dtype)  # by hand
    add_attn_res(built, 2, start="mean")
    assert built.load_state_dict(model.state_dict()) == ([], [])


def test_what_was_saved_without_is_not_loaded_with(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="config: expected attn_res from a model with attention residuals, got none"):
        load_attn_res(LlamaForCausalLM, tmp_path / "plain")
    model.config.attn_res = {"block_size": 2, "start": "residual"}  # and yet no mixers
    model.save_pretrained(tmp_path / "half")
    with pytest.raises(ConfigError, match=r"folder: expected mixers among the weights in .*, got no model.layers.0.*"):
        load_attn_res(LlamaForCausalLM, tmp_path / "half")
    add_attn_res(model, 2)
    model.save_pretrained(tmp_path / "with")
    again, info = load_attn_res(LlamaForCausalLM, tmp_path / "with", output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(again(tokens(1, 9)).logits, model(tokens(1, 9)).logits, rtol=1e-6, atol=1e-6)


def test_copies_and_pickles_are_the_model() -> None:
    model, ids = learned("gpt2"), tokens(1, 9)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, model(ids).logits)


class LowRank(nn.Module):
    """A frozen matrix and a product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features, dtype=base.weight.dtype) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, 4, dtype=base.weight.dtype) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("recompute", [True, False])
def test_low_rank_adapters_have_the_gradients_of_the_matrix_they_stand_for(recompute: bool) -> None:
    """With W = base + up down: d up = dW down^T and d down = up^T dW, for every adapter in every layer."""
    adapted, ids = learned("llama", 1), tokens(2, 9)
    whole = copy.deepcopy(adapted)
    places = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in ("self_attn.q_proj", "mlp.down_proj")]
    for place in places:
        low = LowRank(adapted.get_submodule(place))
        adapted.set_submodule(place, low)
        whole.get_submodule(place).weight.data += low.up.data @ low.down.data
    if recompute:
        adapted.train().gradient_checkpointing_enable()
    got, want = gradients(adapted, ids), gradients(whole, ids)
    for place in places:
        low, dW = adapted.get_submodule(place), want[f"{place}.weight"]
        torch.testing.assert_close(got[f"{place}.up"], dW @ low.down.T, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(got[f"{place}.down"], low.up.T @ dW, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_of_peft(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, ids = learned(family), tokens(2, 9)
    before = copy.deepcopy(base)
    config = peft.LoraConfig(
        r=4,
        target_modules=["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "down_proj"],
        modules_to_save=["self_attention_res", "mlp_res", "output_attn_res"],
        fan_in_fan_out=family == "gpt2",
    )
    model = peft.get_peft_model(base, config)
    torch.testing.assert_close(model(ids).logits, before(ids).logits)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):  # the first step moves one of the two narrow matrices
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = {name: p.grad.abs().max() > 0 for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, yes in moved.items() if not yes and "0.self_attention_res" not in name] == []
    assert any("query" in name for name in moved)
    assert any("lora_A" in name for name in moved)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(before), tmp_path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, again(ids).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(*(merged.generate(ids, max_new_tokens=8, do_sample=False, use_cache=u) for u in (True, False)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_compiled_it_is_one_graph_and_the_same(family: str) -> None:
    model, ids = make(family, layers=2), tokens(2, 9)
    for mixer in add_attn_res(model, 1):
        nn.init.normal_(mixer.query)
    decoder, weights = model.train().get_decoder(), list(model.get_decoder().parameters())
    compiled = torch.compile(decoder, backend="aot_eager", fullgraph=True)
    got, want = (f(ids, use_cache=False).last_hidden_state for f in (compiled, decoder))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    got, want = (torch.autograd.grad(y.sin().sum(), weights) for y in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    torch.compiler.reset()


def run_sharded(rank: int, ranks: int) -> None:
    ids = tokens(ranks, 9)
    for family in ("llama", "gpt2"):
        for recompute in (False, True):
            want = gradients(learned(family).train(), ids, use_cache=False)
            model = learned(family).train()
            if recompute:
                model.gradient_checkpointing_enable()
            for layer in layers_of(model):
                fully_shard(layer)
            fully_shard(model)
            got = gradients(model, ids[rank : rank + 1], use_cache=False)
            assert all(isinstance(grad, DTensor) for grad in got.values())
            assert_same({name: grad.full_tensor() for name, grad in got.items()}, want)


@pytest.mark.slow
def test_a_sharded_model_has_the_gradients_of_a_whole_one(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, run_sharded)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_and_autocast(family: str) -> None:
    model, ids = learned(family).float().train(), tokens(2, 20)
    want = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=0.02, atol=0)
    narrow = copy.deepcopy(model).bfloat16()
    loss = narrow(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss.float(), want, rtol=0.03, atol=0)
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in narrow.parameters())


def test_beside_kimi_delta_attention() -> None:
    model, ids = make("llama"), tokens(2, 9)
    replace_attention(model)
    plain = copy.deepcopy(model)
    mixers = add_attn_res(model, 2)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-6, atol=1e-6)
    for mixer in mixers:
        nn.init.normal_(mixer.query)
    assert torch.equal(*(model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=u) for u in (True, False)))


def test_another_head() -> None:
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3)).eval()
    want = model(tokens(2, 9)).logits
    add_attn_res(model, 2)
    torch.testing.assert_close(model(tokens(2, 9)).logits, want)


def test_hidden_states_are_live_sums_and_attentions_as_before() -> None:
    model = make("llama", attn_implementation="eager").float()
    want = model(tokens(2, 9), output_hidden_states=True, output_attentions=True)
    add_attn_res(model, 100)
    got = model(tokens(2, 9), output_hidden_states=True, output_attentions=True)
    assert len(got.hidden_states) == LAYERS + 1
    torch.testing.assert_close(got.attentions, want.attentions, rtol=1e-4, atol=1e-5)
    for i in range(1, LAYERS):  # one block: the embedding is the only other source
        plain = want.hidden_states[i] - want.hidden_states[0]
        torch.testing.assert_close(got.hidden_states[i], plain, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.hidden_states[-1], want.hidden_states[-1], rtol=1e-3, atol=1e-4)


def test_a_layer_hands_on_tensors_alone() -> None:
    """So that sharding and pipelines, which look for tensors in what layers take and return, see them all."""
    model, shapes = learned("gpt2", 1), []
    for layer in layers_of(model):
        layer.register_forward_hook(
            lambda _, __, out: shapes.append([type(x) for x in out] if type(out) is tuple else out)
        )
    model(tokens(1, 9))
    assert [len(x) for x in shapes[:-1]] == [2, 3, 4, 5]
    assert all(kind is Tensor for kinds in shapes[:-1] for kind in kinds)
    assert isinstance(shapes[-1], Tensor)


# What does not fit


def test_models_that_do_not_fit_are_named_and_left_alone() -> None:
    model = make("llama")
    before = model.state_dict().keys()
    for size in (0, -2, 1.5, "half", "2", None, True):
        with pytest.raises(ConfigError, match="block_size: expected a whole number of layers from 1 on or 'full', got"):
            add_attn_res(model, size)
    with pytest.raises(ConfigError, match="start: expected 'mean' or 'residual', got 'identity'"):
        add_attn_res(model, 2, start="identity")
    for other in (nn.Linear(2, 2), torch.compile(model, backend="eager"), nn.DataParallel(model)):
        with pytest.raises(ConfigError, match=f"model: expected a PreTrainedModel .* got {type(other).__name__}; add"):
            add_attn_res(other, 2)
    assert model.state_dict().keys() == before
    assert not hasattr(model.config, "attn_res")
    add_attn_res(model, 2)
    with pytest.raises(ConfigError, match="model: expected one without attention residuals, got one that has them"):
        add_attn_res(model, 2)
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16))  # names of parts as in Llama, norms elsewhere
    with pytest.raises(
        ConfigError, match=r"expected layers among DeepseekV3.*, GPT2Block, Llama.*, got Gemma2DecoderLayer; .*by hand"
    ):
        add_attn_res(gemma, 2)
    crossed = GPT2LMHeadModel(GPT2Config(**GPT2, add_cross_attention=True))
    with pytest.raises(ConfigError, match="expected a decoder without cross-attention"):
        add_attn_res(crossed, 2)
    with pytest.raises(ConfigError, match="encoder_hidden_states: expected None"):
        learned("gpt2")(tokens(1, 4), encoder_hidden_states=torch.randn(1, 3, D).double())


def test_layers_taken_out_afterwards_are_noticed() -> None:
    model = learned("llama", 1)
    del layers_of(model)[1]
    with pytest.raises(ShapeError, match=r"sources: expected 3 of them before sublayer 4 in blocks of 2, got 2"):
        model(tokens(1, 9))


def test_the_example_runs_and_goes_on_where_the_model_was() -> None:
    command = [sys.executable, str(ROOT / "examples" / "attn_res_in_gpt2.py"), "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (moved,) = (float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("logits moved by"))
    losses = {line.split(",")[0]: float(line.split()[-1]) for line in done.stdout.splitlines() if ", step" in line}
    assert 0 < moved < 1e-4
    assert losses["with"] < losses["GPT-2"] - 0.3

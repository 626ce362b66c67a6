"""KDA inside decoders of `transformers`: padding, packing, caches, and what people do with a model."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache

from perilune.core.errors import ConfigError, ShapeError
from perilune.integrations.padding import pack_of
from perilune.integrations.transformers import KdaCacheLayer, KdaSelfAttention, replace_attention
from perilune.nn import KimiDeltaAttention

ROOT = Path(__file__).parents[2]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ATTENTIONS = ["sdpa", "eager"]
MIXES = [None, [0, 1, 2, 3], [1, 3], [3]]  # which layers are KDA; None is 0, 1, 2


CLOSE = {"sdpa": {"rtol": 1e-9, "atol": 1e-10}, "eager": {"rtol": 1e-3, "atol": 1e-4}}


def make_model(layers: list[int] | None = None, attention: str = "sdpa", dtype: torch.dtype | None = None):
    """A Llama whose decays are slow, so that what must not be remembered would be.

    In float64, but for eager attention, whose softmax is float32 always and overflows in masks of float64.
    """
    dtype = dtype or (torch.float64 if attention == "sdpa" else torch.float32)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention))
    for i in replace_attention(model, layers):
        torch.nn.init.normal_(model.model.layers[i].self_attn.kda.dt_bias, -4.0)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2)
    return model.to(dtype).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape)


def padded(documents: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T] of documents of unlike length, padding a token that is not nothing."""
    T = max(map(len, documents))
    ids, mask = torch.full((len(documents), T), 7), torch.zeros(len(documents), T, dtype=torch.long)
    for row, document in enumerate(documents):
        part = slice(T - len(document), T) if side == "left" else slice(0, len(document))
        ids[row, part], mask[row, part] = document, 1
    return ids, mask


def test_three_layers_in_four_and_the_rest_as_they_were() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 9}))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    assert replace_attention(model) == [0, 1, 2, 4, 5, 6, 8]
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert kinds == ["KdaSelfAttention" if i % 4 != 3 else "LlamaAttention" for i in range(9)]
    after = model.state_dict()
    assert all(torch.equal(after[name], p) for name, p in before.items() if name in after)
    assert all(p.isfinite().all() for p in model.parameters())
    assert [layer.self_attn.kda.num_heads for layer in model.model.layers[:3]] == [2, 2, 2]


def test_parameters_are_drawn_as_in_the_model_around() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3))
    replace_attention(model, [-1], num_heads=4, head_dim=16, g_min=None)
    kda = model.model.layers[3].self_attn.kda
    assert (kda.num_heads, kda.head_dim, kda.g_min) == (4, 16, None)
    assert 0.27 < kda.q_proj.weight.std() < 0.33
    assert kda.A_log.min() >= 0
    assert kda.dt_bias.max() < -2


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("layers", [None, [0, 1, 2, 3]])
def test_padding_changes_nothing(layers: list[int] | None, side: str, attention: str) -> None:
    """Logits and gradients are those of each sequence alone."""
    model = make_model(layers, attention)
    documents = [tokens(n) for n in (9, 1, 70, 4)]
    ids, mask = padded(documents, side)
    parameters = list(model.parameters())
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    together = logits[mask.bool()]
    alone = torch.cat([model(document[None]).logits[0] for document in documents])
    torch.testing.assert_close(together, alone, **CLOSE[attention])
    weights = torch.randn_like(alone)
    got, expected = (torch.autograd.grad((y * weights).sum(), parameters) for y in (together, alone))
    for mine, theirs in zip(got, expected):  # beside each gradient's largest number, which is in the hundreds
        size = theirs.abs().max().clamp(min=1)
        torch.testing.assert_close(mine / size, theirs / size, **CLOSE[attention])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["ones and zeros", "boolean", "additive", "float32 of a bfloat16 model"])
def test_padding_is_not_even_touched(form: str, side: str) -> None:
    """NaN in padding reaches no output; its own outputs are zero."""
    layer = KdaSelfAttention(KimiDeltaAttention(16, 2, 8), 0)
    documents = [tokens(n) for n in (5, 12)]
    _, mask = padded(documents, side)
    x = torch.randn(2, 12, 16)
    expected = [layer.kda(row[kept.bool()][None])[0] for row, kept in zip(x, mask)]
    x[~mask.bool()] = torch.nan
    if form != "ones and zeros":
        sees = (mask.bool()[:, None] & torch.ones(12, 12, dtype=torch.bool).tril())[:, None]
        least = torch.finfo(torch.bfloat16 if form.startswith("float32") else torch.float32).min
        mask_given = sees if form == "boolean" else torch.zeros(sees.shape).masked_fill(~sees, least)
    else:
        mask_given = mask
    y, weights = layer(hidden_states=x, attention_mask=mask_given)
    assert weights is None
    assert not y[~mask.bool()].any()
    torch.testing.assert_close(y[mask.bool()], torch.cat(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("layers", MIXES)
def test_packed_documents_do_not_see_each_other(layers: list[int] | None, attention: str) -> None:
    model = make_model(layers, attention)
    lengths = [[5, 1, 30], [20, 16]]  # of two rows
    ids = tokens(2, 36)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    logits = model(ids, position_ids=positions, use_cache=False).logits
    alone = [model(d[None]).logits for row, ns in zip(ids, lengths) for d in row.split(ns)]
    torch.testing.assert_close(logits.flatten(0, 1), torch.cat(alone, 1)[0], **CLOSE[attention])


def test_boundaries_as_flash_attention_takes_them() -> None:
    layer = KdaSelfAttention(KimiDeltaAttention(16, 2, 8), 0)
    x = torch.randn(1, 20, 16)
    y, _ = layer(x, cu_seq_lens_q=torch.tensor([0, 7, 7, 20], dtype=torch.int32))
    torch.testing.assert_close(y, layer.kda(x, cu_seqlens=[0, 7, 20]), rtol=0, atol=0)
    with pytest.raises(ShapeError, match="expected last entry 20"):
        layer(x, cu_seq_lens_q=torch.tensor([0, 7]))


def test_no_token_has_a_gradient_from_the_future_or_from_another_document() -> None:
    layer = KdaSelfAttention(KimiDeltaAttention(16, 2, 8), 0)
    x = torch.randn(2, 20, 16, requires_grad=True)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    y, _ = layer(x, position_ids=positions)
    (grad,) = torch.autograd.grad(y[0, 14].sum(), x)
    reached = grad.abs().sum(-1).nonzero().tolist()
    assert reached == [[0, t] for t in range(8, 15)]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("layers", MIXES)
def test_generating_with_a_cache_is_generating_without(layers: list[int] | None, attention: str) -> None:
    model = make_model(layers, attention)
    ids, mask = padded([tokens(n) for n in (3, 11, 1)], "left")
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    cached, plain = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)
    for row, kept in zip(cached, mask):  # each as if alone
        prompt = row[: len(kept)][kept.bool()][None]
        alone = model.generate(prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert torch.equal(alone[0, prompt.shape[1] :], row[len(kept) :])


@pytest.mark.parametrize("layers", MIXES)
def test_beams_take_their_states_along(layers: list[int] | None) -> None:
    model = make_model(layers)
    ids = tokens(2, 6)
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cached, plain = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("layers", MIXES)
def test_a_prompt_in_pieces_is_one_prompt(layers: list[int] | None, with_config: bool) -> None:
    model = make_model(layers)
    ids, mask = padded([tokens(n) for n in (30, 13)], "left")
    ids, mask = (torch.nn.functional.pad(x, (4, 0)) for x in (ids, mask))  # the first piece is padding alone
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=positions).logits
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    pieces, end = [], 0
    for size in (3, 8, 1, 8, 1, 13):  # both single tokens of the second row are padding
        start, end = end, end + size
        part = slice(start, end)
        out = model(ids[:, part], attention_mask=mask[:, :end], position_ids=positions[:, part], cache=cache)
        pieces.append(out.logits)
        assert cache.get_seq_length() == end
    torch.testing.assert_close(torch.cat(pieces, 1)[mask.bool()], whole[mask.bool()], rtol=1e-9, atol=1e-10)


def test_a_cache_can_be_selected_repeated_copied_and_reset() -> None:
    model = make_model()
    ids, cache = tokens(2, 6), DynamicCache()
    with torch.no_grad():
        model(ids, cache=cache)
    expected = model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1]
    cases = {
        "copied": (lambda c: None, [0, 1]),
        "repeated": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
        "selected": (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        "masked": (lambda c: c.batch_select_indices(torch.tensor([False, True])), [1]),
        "reordered": (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    }
    for name, (change, rows) in cases.items():
        branch = copy.deepcopy(cache)
        change(branch)
        got = model(ids[rows, :1], cache=branch).logits[:, -1]
        torch.testing.assert_close(got, expected[rows], rtol=1e-9, atol=1e-10, msg=name)
    layer = cache.layers[0]
    assert isinstance(layer, KdaCacheLayer)
    adapter = model.model.layers[0].self_attn
    x, by_old_name = torch.randn(2, 1, 32).double(), copy.deepcopy(cache)
    assert torch.equal(adapter(x, past_key_values=by_old_name)[0], adapter(x, cache=copy.deepcopy(cache))[0])
    assert by_old_name.get_seq_length() == 7
    layer.reset()
    assert (layer.get_seq_length(), layer.past.lengths, layer.past.state) == (0, [0, 0], None)


def test_what_a_cache_cannot_do_is_refused() -> None:
    model = make_model()
    ids = tokens(1, 8)
    with pytest.raises(ShapeError, match="expected a DynamicCache, got layers of StaticLayer"):
        model(ids, cache=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ShapeError, match=r"one document a row, got 2 in 1; pass use_cache=False"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), use_cache=True)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, cache=cache)
    afresh = torch.ones(4, 12, dtype=torch.bool).tril(8)
    afresh[2:, :10] = False  # two tokens go on, two start anew
    with pytest.raises(ShapeError, match="one document a row"):
        model(ids[:, :4], attention_mask=afresh[None, None], cache=copy.deepcopy(cache))
    cache.layers[0].crop(0)
    with pytest.raises(ShapeError, match="cannot forget its last tokens"):
        cache.crop(-1)


def test_masks_that_a_recurrence_cannot_follow_are_refused() -> None:
    layer = KdaSelfAttention(KimiDeltaAttention(16, 2, 8), 0)
    x, causal = torch.randn(1, 6, 16), torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    x = torch.cat([x, x])
    torch.testing.assert_close(layer(x, attention_mask=causal)[0], layer.kda(x))
    x = x[:1]
    prefix = causal.clone()
    prefix[..., :3, :3] = True  # the first three see each other
    window = causal & ~torch.ones(6, 6, dtype=torch.bool).tril(-3)
    torch.testing.assert_close(layer(x, attention_mask=window)[0], layer.kda(x))  # a shorter reach is no other document
    jump = causal.clone()
    jump[..., 3:, :3] = False
    jump[..., 5, 1] = True  # back into the first document
    for mask, message in (
        (prefix, "got one that sees others"),
        (jump, "got one that sees others"),
        (object(), "attn_implementation='sdpa'"),
        (torch.ones(1, 5), "expected \\[1, S\\]"),
        (torch.ones(2, 6), "expected \\[1, S\\]"),
        (torch.ones(1, 1, 5, 6), "expected \\[1, S\\]"),
    ):
        with pytest.raises(ShapeError, match=message):
            layer(x, attention_mask=mask)
    with pytest.raises(ShapeError, match="position_ids: expected"):
        layer(x, position_ids=torch.zeros(3, 1, 6, dtype=torch.long))


def test_a_mask_is_read_once_until_it_changes() -> None:
    x, mask = torch.randn(2, 5, 4), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    first = pack_of(x, mask, None)
    assert first is not None
    assert first.cu == [0, 5, 8]
    assert pack_of(x, mask, None) is first
    mask[0, 0] = 0
    changed = pack_of(x, mask, None)
    assert changed is not None
    assert changed.cu == [0, 4, 7]
    with torch.inference_mode():  # nobody counts changes there
        other = torch.ones(2, 5)
        assert pack_of(x, other, None) is None
        other[1, 0] = 0
        again = pack_of(x, other, None)
        assert again is not None
        assert again.cu == [0, 5, 9]


def test_a_gap_in_a_mask_does_not_end_a_document() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1]])
    sees = (mask.bool()[:, None] & torch.ones(5, 5, dtype=torch.bool).tril())[:, None]
    for given in (mask, sees):
        pack = pack_of(torch.randn(1, 5, 4), given, None)
        assert pack is not None
        assert (pack.places.tolist(), pack.cu) == ([1, 3, 4], [0, 3])


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_have_the_same_gradients(reentrant: bool) -> None:
    """Two batches of unlike padding before one backward pass, as a preference loss has them."""
    model = make_model().train()
    batches = [padded([tokens(n) for n in lengths], "left") for lengths in ((9, 4), (2, 12))]

    def gradients() -> tuple[Tensor, ...]:
        model.zero_grad()
        sum(model(ids, attention_mask=mask, labels=ids).loss for ids, mask in batches).backward()
        return tuple(p.grad for p in model.parameters())

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.testing.assert_close(gradients(), plain, rtol=1e-12, atol=1e-14)


def test_a_step_of_training_in_bfloat16() -> None:
    model = make_model(dtype=torch.bfloat16).train()
    kda = model.model.layers[0].self_attn.kda
    assert (kda.q_proj.weight.dtype, kda.A_log.dtype, kda.o_norm.weight.dtype) == (torch.bfloat16, *[torch.float32] * 2)
    ids, mask = padded([tokens(n) for n in (20, 7)], "right")
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    wide = copy.deepcopy(model).float()
    expected = wide(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    torch.testing.assert_close(loss.float(), expected, rtol=0.02, atol=0)


def test_autocast_keeps_a_float32_model_running() -> None:
    model = make_model(dtype=torch.float32).train()
    ids, mask = padded([tokens(n) for n in (20, 7)], "left")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, model(ids, attention_mask=mask, labels=ids).loss, rtol=0.02, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_to_the_bit(tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    replace_attention(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.kda.A_log.fill_(1 + 2**-12)  # bfloat16 cannot hold it
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path)).to(torch.bfloat16)
    replace_attention(again)
    load_model(again, tmp_path / "model.safetensors")
    for (name, a), (other, b) in zip(model.state_dict().items(), again.state_dict().items()):
        assert name == other
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def test_a_model_that_chooses_masks_by_kind_of_layer() -> None:
    config = Qwen3Config(
        **SIZES, head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    assert len(set(config.layer_types)) == 2
    model = Qwen3ForCausalLM(config).double().eval()
    replace_attention(model, [0, 3])
    ids, mask = padded([tokens(n) for n in (20, 11)], "left")
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(*(model.generate(ids, use_cache=use, **options) for use in (True, False)))


def test_models_and_layers_that_do_not_fit_are_named() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for layers in ([4], [-5], [1, 1], [0, -4]):
        with pytest.raises(ConfigError, match="layers: expected different ones from 0 to 3"):
            replace_attention(model, layers)
    with pytest.raises(ConfigError, match=r"expected a decoder with layers\[i\].self_attn, got Linear"):
        replace_attention(torch.nn.Linear(2, 2))
    model.model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match=r"expected a decoder with layers\[i\].self_attn, got LlamaModel"):
        replace_attention(model)


def test_the_example_runs_and_its_loss_falls() -> None:
    command = [sys.executable, str(ROOT / "examples" / "kda_in_llama.py"), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] - 0.5

"""What training asks of the model: losses, recomputation, balancing, and a known treatment for every parameter."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from perilune.core.errors import ShapeError
from perilune.data.corpus import Corpus, Document
from perilune.models.k3 import K3Model, presets
from perilune.models.k3.model import shifted
from perilune.nn import StableLatentMoE
from perilune.nn.balancer import Balancer
from perilune.ops import quantile_bias
from perilune.ops.quantile_bias import Groups
from perilune.optim import PerHeadMuon
from perilune.train.config import DataConfig, OptimizerConfig, Run, Stage
from perilune.train.feed import Feed
from perilune.train.loop import Trainer
from tiny_k3 import assert_close, config, ids, model

CU = [0, 9, 10, 10, 12, 31]
TWO_LAYERS = config().linear_attn_config.replace(kda_layers=(1,), full_attn_layers=(2,))


def gradients(k3, loss):
    return dict(zip(dict(k3.named_parameters()), torch.autograd.grad(loss, list(k3.parameters()))))


def counts(k3):
    return torch.stack([balancer.counts for balancer in k3.balancers().values()])


# the stack


@pytest.mark.parametrize("size", [1, 2, 5, "full", None])
def test_sublayers_read_the_mixture_and_the_last_norm_comes_after_it(size):
    k3, tokens = model(attn_res_block_size=size), ids(2, 7)
    bank, live = [], k3.model.embed_tokens(tokens)
    for i, layer in enumerate(k3.model.layers):
        sublayers = [
            (layer.self_attention_res, layer.input_layernorm, layer.self_attn),
            (layer.mlp_res, layer.post_attention_layernorm, layer.mlp or layer.block_sparse_moe),
        ]
        for n, (mixer, norm, sublayer) in enumerate(sublayers):
            h = live if mixer is None else mixer([*bank, live])
            if size == "full" or (size is not None and n == 0 and i % size == 0):
                bank, live = [*bank, live], None
            y = sublayer(norm(h))
            live = y if live is None else live + y
    h = live if size is None else k3.model.output_attn_res([*bank, live])
    assert k3(tokens).logits.equal(k3.lm_head(k3.model.norm(h)))


# losses


def test_labels_are_shifted_and_targets_are_not():
    k3, tokens = model().eval(), ids(2, 9)
    out = k3(tokens, labels=tokens)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    by_targets = k3(tokens, targets=targets)
    assert by_targets.loss.equal(out.loss)
    assert by_targets.logits is None
    assert list(out.losses) == ["next_token"]
    targets[:, -1] = 3  # what a cut-off document goes on with can be learned too
    expected = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(k3(tokens, targets=targets).loss, expected)


def test_the_first_answer_token_is_learned_and_a_document_never_predicts_the_next():
    prompt_of_three = torch.tensor([[-100, -100, -100, 7, 8, 9]])
    assert shifted(prompt_of_three, None).tolist() == [[-100, -100, 7, 8, 9, -100]]
    assert shifted(torch.arange(6)[None], [0, 2, 2, 3, 6]).tolist() == [[1, -100, -100, 4, 5, -100]]
    k3, tokens = model().eval(), ids(1, CU[-1])
    logits = k3(tokens, cu_seqlens=CU).logits[0]
    nll = [F.cross_entropy(logits[a : b - 1], tokens[0, a + 1 : b], reduction="sum") for a, b in pairwise(CU) if b > a]
    torch.testing.assert_close(k3(tokens, cu_seqlens=CU, labels=tokens).loss, sum(nll) / (31 - 4))


def test_padding_changes_no_loss():
    k3, tokens = model().eval(), ids(2, 8)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])
    parts = [k3(row[m == 1][None], labels=row[m == 1][None]).loss for row, m in zip(tokens, mask)]
    torch.testing.assert_close(
        k3(tokens, attention_mask=mask, labels=tokens).loss, (4 * parts[0] + 5 * parts[1]) / 9
    )  # fmt: skip


def test_nothing_to_learn_is_a_loss_of_zero():
    k3 = model(num_nextn_predict_layers=1)
    out = k3(ids(1, 5), labels=torch.full((1, 5), -100))
    assert out.loss == 0
    assert all(g.eq(0).all() for g in gradients(k3, out.loss).values())


def test_loss_of_a_bfloat16_model_is_float32():
    k3, tokens = model(torch.bfloat16), ids(1, 9)
    out = k3(tokens, labels=tokens)
    assert (out.logits.dtype, out.loss.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[0, :-1].float(), tokens[0, 1:]))


def test_labels_and_targets_together_are_refused():
    k3, tokens = model(), ids(1, 4)
    with pytest.raises(ShapeError, match="labels or targets, got both"):
        k3(tokens, labels=tokens, targets=tokens)
    with pytest.raises(ShapeError, match="labels: expected"):
        k3(tokens, labels=tokens[:, 1:])


# further tokens


def mtp_by_hand(k3, tokens, learned):
    """Sum and number of one document's further predictions; `tokens, learned: [T]`.  Depth d sees positions that have
    d tokens after them, and predicts the one behind those."""
    h, total, number = k3.model(tokens[None], None, None)[0], 0.0, 0
    for depth, part in enumerate(k3.model.mtp, 1):
        n = len(tokens) - depth
        if n < 1:
            break
        embedded = k3.model.embed_tokens(tokens[depth:])
        x = part.eh_proj(torch.cat([part.hnorm(h[:n]), part.enorm(embedded)], -1))[None]
        x = x + part.layer.self_attn(part.layer.input_layernorm(x))
        h = (x + part.layer.block_sparse_moe(part.layer.post_attention_layernorm(x)))[0]
        logits = k3.lm_head(part.norm(h))[: n - 1]
        targets = tokens[depth + 1 :].masked_fill(~learned[depth + 1 :], -100)
        total = total + F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        number += int(learned[depth + 1 :].sum())
    return total, number


@pytest.mark.parametrize("masked", [False, True])
def test_further_predictions_are_those_of_single_documents(masked):
    """Also where a prompt is not learned: its tokens are still read."""
    k3, tokens = model(num_nextn_predict_layers=1), ids(1, CU[-1])
    learned = torch.rand(CU[-1]) < 0.5 if masked else torch.ones(CU[-1], dtype=torch.bool)
    labels = tokens.masked_fill(~learned, -100)
    out = k3(tokens, cu_seqlens=CU, labels=labels)
    parts = [mtp_by_hand(k3, tokens[0, a:b], learned[a:b]) for a, b in pairwise(CU)]
    expected = sum(total for total, _ in parts) / sum(number for _, number in parts)
    torch.testing.assert_close(out.losses["mtp"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.loss, out.losses["next_token"] + 0.1 * expected)
    assert set(k3.eval()(tokens, cu_seqlens=CU, labels=labels).losses) == {"next_token"}


def test_deeper_predictions_feed_on_each_other():
    k3, tokens = model(num_nextn_predict_layers=2, mtp_loss_weight=0.3), ids(1, 12)
    out = k3(tokens, labels=tokens)
    learned = torch.ones(12, dtype=torch.bool)
    both, n = mtp_by_hand(k3, tokens[0], learned)
    del k3.model.mtp[1]
    alone, m = mtp_by_hand(k3, tokens[0], learned)
    assert (m, n) == (10, 10 + 9)
    expected = (alone / 10 + (both - alone) / 9) / 2
    torch.testing.assert_close(out.losses["mtp"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.loss, out.losses["next_token"] + 0.3 * expected)


def test_answers_have_a_loss_of_their_own():
    """Their mean beside the text's, so that a few of them count as much among many tokens as among few."""
    k3, tokens = model(answer_loss_weight=0.5), ids(1, 12)
    targets, answers = shifted(tokens, None), torch.full((1, 12), -100)
    answers[0, [3, 7]] = targets[0, [3, 7]]
    text = torch.where(answers == -100, targets, -100)
    out = k3(tokens, targets=text, answers=answers)
    log_p = F.log_softmax(k3(tokens).logits[0], -1)
    wanted = -log_p[[3, 7], targets[0, [3, 7]]].mean()
    torch.testing.assert_close(out.losses["answers"], wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.losses["next_token"], k3(tokens, targets=text).loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(out.loss, out.losses["next_token"] + 0.5 * wanted)
    padded = F.pad(tokens, (0, 2), value=1)
    mask = F.pad(torch.ones_like(tokens), (0, 2))
    again = k3(padded, attention_mask=mask, targets=F.pad(text, (0, 2)), answers=F.pad(answers, (0, 2)))
    torch.testing.assert_close(again.loss, out.loss)
    with pytest.raises(ShapeError, match="answers: expected targets beside them, got none"):
        k3(tokens, answers=answers)
    with pytest.raises(ShapeError, match=r"answers: expected \[1, 12\], got \[1, 11\]"):
        k3(tokens, targets=text, answers=answers[:, 1:])


def test_targets_behind_the_row_are_read_by_the_further_prediction():
    """A row cut out of a longer document: its last target is known although it is no input of the row."""
    k3, longer = model(num_nextn_predict_layers=1), ids(12)
    loss = k3(longer[None, :11], targets=longer[None, 1:]).losses["mtp"]
    total, _ = mtp_by_hand(k3, longer, torch.arange(12) < 12)
    torch.testing.assert_close(loss, total / 10, rtol=1e-12, atol=0)


def test_positions_without_a_next_token_are_not_counted():
    k3, tokens = model(num_nextn_predict_layers=1), ids(1, CU[-1])
    k3(tokens, cu_seqlens=CU, labels=tokens)
    loads = {name: int(b.counts.sum()) // 2 for name, b in k3.balancers().items()}
    assert {n for name, n in loads.items() if ".mtp." not in name} == {31}
    assert [n for name, n in loads.items() if ".mtp." in name] == [31 - 4]


# what the backward pass keeps


def step(k3, tokens, cu=CU):
    """(loss, gradients, bytes kept for the backward pass)."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = k3(tokens, cu_seqlens=cu, labels=tokens).loss
    weights = {p.untyped_storage().data_ptr() for p in k3.parameters()}
    size = sum(n for pointer, n in kept.items() if pointer not in weights)
    return loss, gradients(k3, loss), size


@pytest.mark.parametrize("kind", ["quantile", "aux"])
def test_recomputation_keeps_less_counts_once_and_changes_nothing(kind):
    balance = config().balance.replace(kind=kind)
    k3, tokens = model(num_nextn_predict_layers=1, balance=balance), ids(1, 120)
    results = []
    for unit in ("none", "sublayers"):
        k3.recompute_activations(unit)
        loss, grads, size = step(k3, tokens, [0, 50, 120])
        results.append((loss, grads, size, counts(k3)))
        for balancer in k3.balancers().values():
            balancer.discard()
    (loss, grads, size, loads), (same_loss, same_grads, less, same_loads) = results
    assert same_loss.equal(loss)
    for name, grad in grads.items():
        assert same_grads[name].equal(grad), name
    assert same_loads.equal(loads)
    assert loads.sum() == 2 * (4 * 120 + 118)
    inputs = 12 * 120 * 32 * 8  # of the twelve sublayers, which checkpointing holds by itself
    assert less + inputs < 0.6 * size, (less, inputs, size)


def test_gradients_accumulate_and_balancers_pool_the_step():
    k3, tokens = model(), ids(4, 11)
    whole = gradients(k3, k3(tokens, labels=tokens).loss)
    pooled = counts(k3)
    for balancer in k3.balancers().values():
        balancer.discard()
    for part in tokens.split(1):
        (k3(part, labels=part).loss / 4).backward()
    for name, p in k3.named_parameters():
        assert_close(p.grad, whole[name], what=name)
    assert counts(k3).equal(pooled)


def test_reading_leaves_balancers_alone_and_a_step_moves_them_once():
    k3, tokens = model(), ids(2, 30)
    before = {name: b.bias.clone() for name, b in k3.balancers().items()}
    assert len(before) == 4
    k3.eval()(tokens, labels=tokens)
    with torch.no_grad():
        k3(tokens, cache=k3.new_cache(2))
    for name, balancer in k3.balancers().items():
        assert balancer.counts.sum() == 0
        balancer.update()
        assert balancer.bias.equal(before[name])
    k3.train()(tokens, labels=tokens)
    for name, balancer in k3.balancers().items():
        assert balancer.bias.equal(before[name])  # not before the step ends
        balancer.update()
        assert not balancer.bias.equal(before[name])
        assert balancer.loads.sum() == 2 * 60
        assert balancer.counts.sum() == 0
        assert balancer.bias.mean().abs() < 1e-6


def test_balancers_know_of_the_groups_that_limit_routing():
    """Every layer's bias is that of its own scores under two cutoffs, of the expert and of its group."""
    balance = config().balance.replace(options={"bins": None, "decay": None})
    k3, tokens, scores = model(num_expert_group=4, topk_group=2, balance=balance), ids(2, 60), []
    layers = [module for module in k3.modules() if isinstance(module, StableLatentMoE)]
    for moe in layers:
        moe.gate.register_forward_hook(lambda _, __, out: scores.append(out.detach()))
    k3(tokens, labels=tokens)
    assert len(layers) == len(scores) == 4
    for moe, seen in zip(layers, scores):
        before = moe.balancer.bias.clone()
        moe.balancer.update()
        assert_close(moe.balancer.bias, quantile_bias(seen, before, 2, groups=Groups(4, 2)))
        assert not moe.balancer.bias.allclose(quantile_bias(seen, before, 2))


def test_auxiliary_losses_are_summed_into_the_loss():
    balance = config().balance.replace(kind="aux", options={"coefficient": 0.01})
    k3, tokens = model(balance=balance, balance_loss_weight=2.0), ids(2, 30)
    out = k3(tokens, labels=tokens)
    assert set(out.losses) == {"next_token", "balance"}
    parts = [layer.block_sparse_moe.auxiliary_loss for layer in k3.model.layers if layer.block_sparse_moe]
    torch.testing.assert_close(out.losses["balance"], sum(parts))
    torch.testing.assert_close(out.loss, out.losses["next_token"] + 2 * sum(parts))
    assert set(k3.eval()(tokens, labels=tokens).losses) == {"next_token"}


# every parameter


@pytest.mark.parametrize("recompute", ["none", "sublayers", "layers", "blocks"])
def test_every_parameter_is_reached(recompute):
    """But for the first mixer, which has one source only: its gradients are zeros."""
    k3, tokens = model(num_nextn_predict_layers=1), ids(2, 60)
    k3.recompute_activations(recompute)
    k3(tokens, labels=tokens).loss.backward()
    idle = {name for name, p in k3.named_parameters() if p.grad.eq(0).all()}
    assert idle == {f"model.layers.0.self_attention_res.{name}" for name in ("query", "norm.weight")}
    experts = k3.model.layers[1].block_sparse_moe.experts
    assert all(w.grad.abs().amax((1, 2)).gt(0).all() for w in experts.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at tensors between its graphs
def test_torch_compile_changes_nothing():
    plain, tokens = model(num_hidden_layers=2, linear_attn_config=TWO_LAYERS), ids(2, 9)
    compiled = model(num_hidden_layers=2, linear_attn_config=TWO_LAYERS)
    compiled.load_state_dict(plain.state_dict())
    plain, compiled = plain.float(), compiled.float()
    torch.compiler.reset()
    expected = plain(tokens, labels=tokens).loss
    loss = torch.compile(compiled, backend="eager")(tokens, labels=tokens).loss
    assert_close(loss, expected, 1e-6)
    expected, got = gradients(plain, expected), gradients(compiled, loss)
    for name in expected:
        assert_close(got[name], expected[name], 1e-5, name)
    assert counts(compiled).equal(counts(plain))


def test_autocast_runs_the_whole_stack_and_keeps_its_islands():
    k3, tokens = model(torch.float32, num_nextn_predict_layers=1), ids(2, 40)
    exact = k3(tokens, labels=tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = k3(tokens, labels=tokens)
        cache = k3.eval().new_cache(2)
        k3(tokens, cache=cache)
    k3.train()
    assert abs(out.loss - exact.loss) <= 2e-2 * exact.loss
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in k3.parameters())
    assert cache.layers[0].state.dtype == torch.float32


def test_casting_keeps_the_float32_parameters():
    k3 = model(torch.float32).bfloat16()
    tensors = {**dict(k3.named_parameters()), **{f"{name}.bias": b.bias for name, b in k3.balancers().items()}}
    kept = {name for name, t in tensors.items() if t.dtype == torch.float32}
    ends = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "balancer.bias")
    assert kept == {name for name in tensors if name.endswith(ends)}
    assert len(kept) == 3 * 6 + 4


@pytest.mark.parametrize("tied", [False, True])
def test_initialisation_reaches_everything_also_after_the_meta_device(tied):
    options = config(
        tie_word_embeddings=tied, num_nextn_predict_layers=1, initializer_range=0.02, carried={"pad_token_id": 49}
    )
    with torch.device("meta"):
        k3 = K3Model(options)
    k3.to_empty(device="cpu").init_weights()
    built = K3Model(options)
    for made in (k3, built):
        assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied
        for name, t in [*made.named_parameters(), *made.named_buffers()]:
            assert t.isfinite().all(), name
            if name.endswith(("query", "A_log")) or "balancer" in name:
                assert t.eq(0).all(), name
            elif "norm" in name:
                assert t.eq(1).all(), name
            elif not name.endswith(("gate.weight", "conv1d.weight", "dt_bias")):
                assert t.std().item() == pytest.approx(0.02, rel=0.25), name
        assert made.model.embed_tokens.weight[49].eq(0).all()
        assert made.model.embed_tokens.weight[48].ne(0).all()


# the optimizer's table

MIXER = {"query": "adamw", "norm.weight": "adamw"}
EXPECTED = {  # treatment, and for Muon the matrices that are orthogonalised apart
    "model.embed_tokens.weight": "adamw decay",
    "lm_head.weight": "adamw decay",
    "model.norm.weight": "adamw",
    **{f"model.output_attn_res.{name}": how for name, how in MIXER.items()},
}
LAYER = {
    "input_layernorm.weight": "adamw",
    "post_attention_layernorm.weight": "adamw",
    **{f"{mixer}.{name}": how for mixer in ("self_attention_res", "mlp_res") for name, how in MIXER.items()},
}
KDA = {
    "q_proj.weight": "muon 4 x [32, 128]",
    "k_proj.weight": "muon 4 x [32, 128]",
    "v_proj.weight": "muon 4 x [32, 128]",
    "q_conv1d.weight": "adamw",
    "k_conv1d.weight": "adamw",
    "v_conv1d.weight": "adamw",
    "f_a_proj.weight": "muon [32, 128]",
    "f_b_proj.weight": "muon [128, 32]",
    "dt_bias": "adamw",
    "A_log": "adamw",
    "b_proj.weight": "muon [4, 128]",  # one row a head: never cut
    "g_proj.weight": "muon [128, 128]",
    "o_norm.weight": "adamw",
    "o_proj.weight": "muon [128, 128]",
}
MLA = {
    "q_a_proj.weight": "muon [64, 128]",
    "q_a_layernorm.weight": "adamw",
    "q_b_proj.weight": "muon 4 x [32, 64]",
    "kv_a_proj_with_mqa.weight": "muon [72, 128]",
    "kv_a_layernorm.weight": "adamw",
    "kv_b_proj.weight": "muon 4 x [24, 64] + 4 x [32, 64]",
    "g_proj.weight": "muon [128, 128]",
    "o_proj.weight": "muon [128, 128]",
}
DENSE = {
    "gate_proj.weight": "muon [256, 128]",
    "up_proj.weight": "muon [256, 128]",
    "down_proj.weight": "muon [128, 256]",
}
MOE = {
    "gate.weight": "muon [64, 128]",
    "experts.w1": "muon 64 x [32, 64]",
    "experts.w2": "muon 64 x [64, 32]",
    "experts.w3": "muon 64 x [32, 64]",
    "routed_expert_down_proj.weight": "muon [64, 128]",
    "routed_expert_norm.weight": "adamw",
    "routed_expert_up_proj.weight": "muon [128, 64]",
    "shared_experts.gate_proj.weight": "muon [32, 128]",
    "shared_experts.up_proj.weight": "muon [32, 128]",
    "shared_experts.down_proj.weight": "muon [128, 32]",
}
for i in range(4):
    parts = {"": LAYER, "self_attn.": MLA if i == 3 else KDA, **({"block_sparse_moe.": MOE} if i else {"mlp.": DENSE})}
    EXPECTED |= {f"model.layers.{i}.{part}{name}": how for part, rows in parts.items() for name, how in rows.items()}


def treatments(k3):
    rows = {}
    for name, _, kind, blocks, decay in k3.parameter_roles().table():
        if kind == "muon":
            assert decay == "decay", name
            rows[name] = f"muon {blocks}"
        else:
            rows[name] = f"{kind} {decay}".strip()
    return rows


def test_every_parameter_of_the_nano_model_is_treated_as_its_name_says():
    k3 = K3Model(presets.nano())
    assert treatments(k3) == EXPECTED
    k3.parameter_roles().check(k3)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nextn_predict_layers": 1},
        {"q_lora_rank": None, "mla_use_output_gate": False, "routed_expert_hidden_size": None},
        {"linear_attn_config": config().linear_attn_config.replace(use_full_rank_gate=False, gate_lower_bound=None)},
        {"attn_res_block_size": None, "tie_word_embeddings": True},
        {"num_experts": 0},
    ],
)
def test_every_variant_has_its_table(changes):
    k3 = model(**changes)
    roles = k3.parameter_roles()
    roles.check(k3)
    plain = ("norm", "query", "conv1d", "A_log", "dt_bias")
    for name, role in roles.items():
        if any(part in name for part in plain):
            assert (role.kind, role.weight_decay) == ("adamw", False), name
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert (role.kind, role.weight_decay) == ("adamw", True), name
        else:
            assert role.kind == "muon", name


def test_no_optimizer_holds_a_balancers_tensors():
    k3 = model()
    held = {
        p.untyped_storage().data_ptr() for g in PerHeadMuon(k3.parameter_roles(), 0.1).param_groups for p in g["params"]
    }
    assert held == {p.untyped_storage().data_ptr() for p in k3.parameters()}
    owned = [t for m in k3.modules() if isinstance(m, Balancer) for t in m.buffers()]
    assert owned
    assert not held & {t.untyped_storage().data_ptr() for t in owned}


def test_tied_embeddings_are_one_parameter_with_both_gradients():
    tied, tokens = model(tie_word_embeddings=True), ids(1, 9)
    untied = model()
    untied.load_state_dict(tied.state_dict())
    assert "lm_head.weight" not in tied.parameter_roles()
    grad = gradients(tied, tied(tokens, labels=tokens).loss)["model.embed_tokens.weight"]
    both = gradients(untied, untied(tokens, labels=tokens).loss)
    assert_close(grad, both["model.embed_tokens.weight"] + both["lm_head.weight"], what="gradient")


# QK-clip in the training step


def test_a_training_step_clips_logits_and_forgets_them():
    text = "the orbit of the moon and the point closest to it; " * 20
    corpus = Corpus((Document("a.txt", text),), (Document("b.txt", text),))
    run = Run(
        model=config(vocab_size=300),
        stages=(Stage(name="a", context=32, batch_tokens=64, tokens=256, lr=1e-9, lr_end=1e-9, warmup=0.0),),
        data=DataConfig(vocab_size=300),
        optimizer=OptimizerConfig(qk_clip=0.05, qk_clip_every=2, weight_decay=0.0),
    )
    trainer = Trainer(run, Feed(run, corpora={"text": corpus}))
    attention = next(iter(trainer.attentions.values()))
    before = attention.q_weight.detach().clone()
    batch = trainer.feed.next()
    trainer.step(batch)
    assert attention.max_logits is None
    once = attention.q_weight.detach().clone()
    assert (once - before).norm() > 0.1 * before.norm()
    trainer.step(batch)  # every second step only
    torch.testing.assert_close(attention.q_weight.detach(), once, rtol=1e-6, atol=1e-6)
    assert not attention.track_max_logits
    attention.track_max_logits = True
    trainer.model(batch.input_ids, cu_seqlens=batch.cu_seqlens)
    assert attention.max_logits.max().item() == pytest.approx(0.05, rel=1e-3)


def test_under_autocast_a_sublayers_input_is_cast_once_for_all_that_read_it():
    """The projections find it narrow; the router widens it again, and a gradient comes back through one cast."""
    k3, tokens = model(torch.float32), ids(1, 20)
    seen = {}
    for name, module in k3.model.layers[2].named_modules():
        if name.endswith(("q_proj", "f_a_proj", "b_proj", "gate", "gate_proj")):
            module.register_forward_pre_hook(lambda module, args, name=name: seen.update({name: args[0].dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        k3(tokens, labels=tokens).loss.backward()
    assert set(seen.values()) == {torch.bfloat16}
    assert len(seen) == 6  # f_b_proj too
    seen.clear()
    k3.double()(tokens, labels=tokens)
    assert set(seen.values()) == {torch.float64}


def test_a_row_without_tokens_has_a_gradient_of_zero_for_every_parameter():
    """What a rank without documents needs, so that it takes part in every exchange; nothing is observed."""
    k3 = model(num_nextn_predict_layers=1).train()
    none = torch.empty(1, 0, dtype=torch.int64)
    output = k3(none, targets=none, cu_seqlens=[0])
    output.loss.backward()
    assert output.loss == 0
    for name, parameter in k3.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert not counts(k3).any()

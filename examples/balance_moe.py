"""Quantile balancing in a small Mixtral, Qwen3-MoE or DeepSeek-V3, against the auxiliary loss, from a skewed start.

    python examples/balance_moe.py [mixtral | qwen | deepseek] [STEPS] [COEFFICIENT]

The same model is trained on pages of Python three times: without balancing, with the auxiliary loss (transformers' own;
DeepSeek-V3's class has none, so ours) of that coefficient, and with `balance(model)`.  Needs `transformers`, no network
and no GPU; 60 steps of all three take half a minute.
"""

import sys

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from perilune.data.corpus import standard_library
from perilune.integrations import balance

NAME = sys.argv[1] if len(sys.argv) > 1 else "mixtral"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 60
AUX = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02  # 0.001 is usual
BATCH, LENGTH, EVERY = 16, 64, 10

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MANY = {"num_experts_per_tok": 4, "moe_intermediate_size": 32}  # of 32
LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
GROUPS = {"n_routed_experts": 32, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2)),
    "qwen": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MANY, num_experts=32, head_dim=32)),
    "deepseek": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **MANY, **LATENT, **GROUPS)),
}
if NAME not in MODELS:
    sys.exit(f"expected one of {', '.join(MODELS)}, got {NAME}")
torch.set_num_threads(1)
text = torch.tensor(list("\n".join(d.text for d in standard_library().train[:60]).encode()))  # bytes are the tokens


def make_model():
    """Fresh, the same each time; what all tokens have in common points to some experts."""
    torch.manual_seed(0)
    model = MODELS[NAME]()
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.01 * torch.randn(SIZES["hidden_size"]))
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.1)
    return model


def train(kind):
    model = make_model()
    if kind == "aux" and NAME != "deepseek":
        model.config.output_router_logits, model.router_aux_loss_coef = True, AUX
        balancers = balance(model, "none")  # counts, and leaves the model's own loss alone
    else:
        balancers = balance(model, kind, **({"coefficient": AUX} if kind == "aux" else {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    batches = torch.Generator().manual_seed(0)
    ginis = []
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=batches)
        batch = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        output = model(input_ids=batch, use_cache=False)
        loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        extra = balancers.loss if balancers.loss is not None else 0
        if getattr(output, "aux_loss", None) is not None:
            extra = model.router_aux_loss_coef * output.aux_loss
        (loss + extra).backward()
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        balancers.update()  # the one line that balancing adds to a loop
        ginis.append(balancers.health(1).worst.gini)
        if step in (1, STEPS) or step % EVERY == 0:
            health = balancers.health(EVERY)
            print(f"{kind:8}  step {step:4d}  loss {loss.item():.3f}  Gini {health.worst.gini:.3f} in the worst layer")
    return sum(ginis[-EVERY:]) / len(ginis[-EVERY:]), health


ends = {kind: train(kind) for kind in ("none", "aux", "quantile")}
print(f"\nworst layer, single steps of {BATCH * LENGTH} tokens; over the last {EVERY} steps together")
for kind, (single, health) in ends.items():
    end = f"{health.worst.gini:.3f}, {health.worst.dead:.0%} dead (chance {health.chance:.3f})"
    print(f"{kind:8}  Gini {single:.3f}; {end}")

"""A run in small: what is written in a recipe, tried out in minutes on any machine before a cluster is asked for it."""

from perilune.data.source import TextSource
from perilune.models.k3.config import K3Config, hybrid_layers
from perilune.train.config import Run, Stage

SMALLER = 512
"""What lengths are divided by, down to `LEAST`: 8K to 1M become 512 to 2,048."""
LEAST = 512
"""Tokens, in which every task has room for what it says; shorter lengths become so long."""
VOCABULARY = 1024
STEPS = 2
"""Of each stage."""
PARTS = 2
"""Micro-batches of a step at most."""


def rehearsal(run: Run) -> Run:
    """The same run with two narrow layers, lengths divided by `SMALLER`, two steps a stage and this machine's text.

    The layers are one of each kind: KDA before a dense feed-forward, latent attention before experts; every switch of
    the model is as it was.  So are names and number of stages, what they mix (in equal shares, or two steps would not
    get to all of it), rates, precision, recomputation, steps in parts and the optimizer's options.  All sources are the
    standard library; name others to try those.
    """
    return run.replace(
        model=_small_model(run.model),
        stages=tuple(_short(stage) for stage in run.stages),
        data=run.data.replace(
            sources={name: TextSource(clean=source.clean) for name, source in run.data.sources.items()},
            vocab_size=VOCABULARY,
            tokenizer=None,
        ),
        init=None,
    )


def _small_model(model: K3Config) -> K3Config:
    linear, kinds = model.linear_attn_config, model.layer_types
    return model.replace(
        num_hidden_layers=2,
        layer_types=kinds and (kinds[0], kinds[-1]),
        linear_attn_config=linear.replace(num_heads=2, head_dim=32, **hybrid_layers(2)),
        hidden_size=64,
        vocab_size=VOCABULARY,
        intermediate_size=128,
        num_attention_heads=2,
        q_lora_rank=model.q_lora_rank and 32,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=min(model.qk_rope_head_dim, 8),
        v_head_dim=32,
        attn_res_block_size=1 if isinstance(model.attn_res_block_size, int) else model.attn_res_block_size,
        first_k_dense_replace=min(model.first_k_dense_replace, 1),
        moe_layer_freq=1,
        num_experts=min(model.num_experts, 16),
        num_experts_per_token=min(model.num_experts_per_token, 4),
        num_shared_experts=min(model.num_shared_experts, 1),
        moe_intermediate_size=32,
        routed_expert_hidden_size=model.routed_expert_hidden_size and 32,
        num_expert_group=1,
        topk_group=1,
    )


def _short(stage: Stage) -> Stage:
    context = _smaller(stage.context)
    micro = stage.micro_tokens and _smaller(stage.micro_tokens)
    step = max(context, min(_smaller(stage.batch_tokens), PARTS * (micro or context)))
    return stage.replace(
        context=context,
        batch_tokens=step,
        micro_tokens=micro,
        tokens=STEPS * step,
        mix={name: 1.0 for name, share in stage.mix.items() if share},
        min_document=stage.min_document * context // stage.context,
    )


def _smaller(tokens: int) -> int:
    return max(LEAST, tokens // SMALLER)

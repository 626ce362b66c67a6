"""A training run that takes a second: two layers, everything on, two context stages, repetitive text."""

import json
from pathlib import Path

from perilune.data.corpus import Corpus, Document
from perilune.data.tokenizer import ByteBPE
from perilune.train.config import DataConfig, Run, Stage
from perilune.train.feed import Feed
from perilune.train.loop import Trainer
from tiny_k3 import config

SMALL_MODEL = {
    "num_hidden_layers": 2, "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 12,
    "kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "intermediate_size": 32,
    "num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 12, "routed_expert_hidden_size": 16,
}  # fmt: skip
SMALL_ATTENTION = {"num_heads": 2, "head_dim": 8, "kda_layers": (1,), "full_attn_layers": (2,)}
DATA = DataConfig(vocab_size=300)
STAGES = (
    Stage(name="short", context=16, batch_tokens=96, tokens=960, lr=2e-2, lr_end=4e-3, warmup=0.2),
    Stage(name="long", context=48, batch_tokens=96, tokens=576, lr=8e-3, lr_end=1e-3, warmup=0.2),
)

OVERRIDES = [  # of the nano recipe: the same on a command line
    *(f"model.{key}={value}" for key, value in SMALL_MODEL.items()),
    *(f"model.linear_attn_config.{key}={list(v) if isinstance(v, tuple) else v}" for key, v in SMALL_ATTENTION.items()),
    f"stages={json.dumps([stage.to_dict() for stage in STAGES])}",
    "data.vocab_size=300",
]


def run(*, model=(), **changes) -> Run:
    nano = config()
    small = nano.replace(
        **{**SMALL_MODEL, "initializer_range": 0.02, **dict(model)},
        linear_attn_config=nano.linear_attn_config.replace(**SMALL_ATTENTION),
    )
    return Run(**{"model": small, "data": DATA, "stages": STAGES, **changes})


def text(i: int) -> str:
    """Repetitive, with characters of one to four bytes."""
    return "".join(f"def f{i}(x):  # naïve 漢字 😀\n    return x + {j % 3}\n" for j in range(i + 8))


def corpus() -> Corpus:
    documents = [Document(f"{i:02}.txt", text(i)) for i in range(12)]
    return Corpus(tuple(documents[:-2]), tuple(documents[-2:]))


def write_corpus(folder: Path) -> Path:
    """The files of `corpus()`, as a command reads them."""
    for document in (*corpus().train, *corpus().held_out):
        (folder / document.name).write_text(document.text, encoding="utf-8")
    return folder


def trainer(made: Run, *, checkpoint=None, **options) -> Trainer:
    """Of that run on `corpus()`; from `checkpoint` on, if there is one."""
    feed = Feed(made, checkpoint and ByteBPE.load(checkpoint), {"text": corpus()})
    return Trainer(made, feed, checkpoint=checkpoint, **options)

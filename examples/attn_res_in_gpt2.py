"""Attention residuals in a trained Hugging Face GPT-2: it goes on where it was, and learns to look back over depth.

    python examples/attn_res_in_gpt2.py [STEPS]

Needs `transformers`, no network and no GPU; 100 steps, and twice as many more, take some 30 seconds of one core.
"""

import copy
import sys
import textwrap

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from perilune.integrations import add_attn_res

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
BATCH, LENGTH = 4, 128

torch.manual_seed(0)
torch.set_num_threads(1)  # matrices this small gain nothing from more
with open(textwrap.__file__, "rb") as file:
    text = torch.tensor(list(file.read()))  # bytes are the tokens

config = GPT2Config(
    vocab_size=256, n_positions=256, n_embd=64, n_layer=6, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def train(model: GPT2LMHeadModel, what: str) -> None:
    """The same batches for every model."""
    draw = torch.Generator().manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0), []
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=draw)
        batch = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 24:
            print(f"{what}, step {step + 1:4d}  loss {sum(losses[-25:]) / 25:.3f}")


plain = GPT2LMHeadModel(config)
train(plain, "GPT-2")

model = copy.deepcopy(plain)
mixers = add_attn_res(model, block_size=2)
with torch.no_grad():
    page = text[None, :LENGTH]
    print("logits moved by", (model(page).logits - plain(page).logits).abs().max().item())

train(plain, "without")
train(model, "with")
print("length of the queries:", " ".join(f"{mixer.query.norm():.2f}" for mixer in mixers))

prompt = torch.tensor([list(b"    def _")])
model.eval()
written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)  # cached
print(bytes(written[0].tolist()).decode(errors="replace"))

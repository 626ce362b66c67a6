"""Kimi Delta Attention in a Hugging Face Llama: three layers in four, trained on a page of Python, then asked to go on.

    python examples/kda_in_llama.py [STEPS]

Needs `transformers`, no network and no GPU; 160 steps take some 20 seconds.
"""

import sys
import textwrap

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from perilune.integrations.transformers import replace_attention

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 160
BATCH, LENGTH = 4, 128

torch.manual_seed(0)
with open(textwrap.__file__, "rb") as file:
    text = torch.tensor(list(file.read()))  # bytes are the tokens

config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
model = LlamaForCausalLM(config)
print("KDA in layers", replace_attention(model), "of", config.num_hidden_layers)

losses = []
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    starts = torch.randint(len(text) - LENGTH, (BATCH,))
    batch = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 20 == 19:
        print(f"step {step + 1:4d}  loss {sum(losses[-20:]) / 20:.3f}")

prompt = torch.tensor([list(b"    def _")])
model.eval()
written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)  # cached
print(bytes(written[0].tolist()).decode(errors="replace"))

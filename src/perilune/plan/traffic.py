"""Bytes that work element by element moves through a GPU's memory for a token, as it is written: one kernel a step.

Each number is the sum over those steps of what is read and written for an element, in bfloat16 with float32 inside.
"""

from perilune.models.k3 import K3Config
from perilune.ops.blocks import DEVICE_BLOCK
from perilune.ops.cross_entropy.chunked import LEAST_ROWS

NORM = 6 + 8 + 4 + 8 + 6 + 4  # to float32, square, mean, scale, to bfloat16, weigh
GATED_NORM = 6 + 8 + 4 + 8 + 8 + 6 + 8 + 12 + 6  # the same, the gate to float32, sigmoid, product, to bfloat16
CONVOLUTION = 6 + 8 + 8 + 3 * 12 + 8 + 6  # to float32, padded, a tap, three added, SiLU, to bfloat16
SITU = 12 + 8 + 8 + 8 + 8 + 12 + 8 + 8 + 8 + 10  # two casts; quotient, tanh, factor of either; sigmoid, two products
GATED_ATTENTION = 6 + 6 + 8 + 12 + 6  # o and the gate to float32, sigmoid, product, to bfloat16
ADD = 6  # of two bfloat16 tensors
COPY = 4
BACKWARD = 2.5
"""Times what the forward pass moves: norms, SiTU and convolutions move 2.3 to 2.7 times that."""
LOGITS = 2 + 6 + 12 + 8 + 8 + 6 + 4  # written, to float32, logsumexp, minus it, exp, to bfloat16, read by two products
STATE = {"muon": 8 + 12 + 12 + 8 + 8 + 8 + 12, "adamw": 28}  # of the optimizer's step, without the iteration


def layer_traffic(config: K3Config, i: int) -> float:
    """Bytes a token moves in layer i's forward pass, without KDA's kernel, the experts', attention and mixers."""
    D, linear = config.hidden_size, config.linear_attn_config
    moved = 2.0 * (NORM + ADD) * D
    if config.attention(i) == "kda":
        moved += (3 * CONVOLUTION + GATED_NORM) * linear.num_heads * linear.head_dim
    else:
        key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        moved += NORM * ((config.q_lora_rank or 0) + config.kv_lora_rank)
        moved += config.num_attention_heads * (COPY * (key + (key if value < key else 0)) + GATED_ATTENTION * value)
    if not config.is_moe(i):
        return moved + SITU * config.intermediate_size
    moved += SITU * config.num_shared_experts * config.moe_intermediate_size + (6 + ADD) * D
    return moved + NORM * (config.routed_expert_hidden_size or 0)


def head_traffic(config: K3Config) -> float:
    """Bytes a token moves through the head: its logits' row, its share of a block's sum of weight gradients."""
    rows = max(LEAST_ROWS, DEVICE_BLOCK // config.vocab_size)
    return LOGITS * config.vocab_size + NORM * config.hidden_size + 12.0 * config.vocab_size * config.hidden_size / rows

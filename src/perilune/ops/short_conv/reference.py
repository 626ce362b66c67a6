"""The convolution as its equation reads, one document at a time: rows before the first come from the state."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu


def short_conv(
    x: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    cu: list[int] | None,
    activation: str | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """x [B, T, D], weight [D, W], state [N, W-1, D] -> y [B, T, D], final state [N, W-1, D] or None."""
    W = weight.shape[1]
    compute = torch.promote_types(x.dtype, torch.float32)
    documents = list(x) if cu is None else [x[0, a:b] for a, b in pairwise(cu)]
    if initial_state is None:
        initial_state = x.new_zeros(len(documents), W - 1, x.shape[-1])
    outputs, states = [], []
    for document, state in zip(documents, initial_state):
        rows = torch.cat([state.to(compute), document.to(compute)])  # [W-1+T, D]
        taps = [weight[:, j].to(compute) * rows[j : j + len(document)] for j in range(W)]
        outputs.append(torch.stack(taps).sum(0))
        states.append(torch.cat([state.to(x.dtype), document])[len(document) :])
    y = torch.stack(outputs) if cu is None else torch.cat(outputs).unsqueeze(0)
    if activation == "silu":
        y = silu(y)
    return y.to(x.dtype), torch.stack(states) if output_final_state else None

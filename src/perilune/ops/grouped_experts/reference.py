"""The oracle: one expert after another, in the dtype of the input."""

import torch
from torch import Tensor


def grouped_experts_reference(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: str = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
) -> Tensor:
    """See `grouped_experts`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape, dtype=wide)  # [M, D]
    # Unbound once: indexing one at a time would give each a gradient as large as all.
    for expert, (gate_e, up_e, down_e) in enumerate(zip(w_gate.unbind(), w_up.unbind(), w_down.unbind())):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        rows = x[token]  # [n, D]
        gate = (rows @ gate_e.T).to(wide)  # [n, F]
        up = (rows @ up_e.T).to(wide)
        if activation == "situ":
            gate = beta_gate * torch.tanh(gate / beta_gate) * torch.sigmoid(gate)
            up = beta_up * torch.tanh(up / beta_up)
        else:
            gate = gate * torch.sigmoid(gate)
        y = (gate * up).to(x.dtype) @ down_e.T  # [n, D]
        out = out.index_add(0, token, y.to(wide) * weights[token, slot, None].to(wide))
    return out.to(x.dtype)

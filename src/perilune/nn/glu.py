"""The feed-forward block: down( activation(gate(x), up(x)) )."""

from typing import Literal

from torch import Tensor, nn

from perilune.nn.project import project
from perilune.ops import situ_glu, swiglu

Activation = Literal["situ", "silu"]


class GLU(nn.Module):
    """A gated feed-forward block with SiTU-GLU (`situ`) or SwiGLU (`silu`), no biases.  `[..., D]` to `[..., D]`.

    SiTU caps both branches smoothly: 4 tanh(g/4) sigmoid(g) * 25 tanh(u/25), so that no activation passes 100.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        *,
        activation: Activation = "situ",
        beta_gate: float = 4.0,
        beta_up: float = 25.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.beta_gate = beta_gate
        self.beta_up = beta_up
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        inner = situ_glu(gate, up, self.beta_gate, self.beta_up) if self.activation == "situ" else swiglu(gate, up)
        return project(inner, self.down_proj)[0]


class SiTUGLU(GLU):
    """The feed-forward block with SiTU-GLU, for anybody's model.

    >>> ffn = SiTUGLU(64, 256)
    """

    def __init__(self, hidden_size: int, inner_size: int, beta_gate: float = 4.0, beta_up: float = 25.0) -> None:
        super().__init__(hidden_size, inner_size, activation="situ", beta_gate=beta_gate, beta_up=beta_up)

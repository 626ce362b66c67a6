"""How every parameter of a K3-class model is optimised: a table, not code (K3 report, section 2.5).

Matrices go to Muon: projections of queries, keys and values one head at a time, experts one by one, everything else
whole.  Embedding, head, norms, convolutions, decay and pseudo-queries go to AdamW, weight decay on the first two only.
"""

from typing import TYPE_CHECKING

from torch import nn

from perilune.models.k3.attention import kind_of
from perilune.models.k3.layer import DecoderLayer
from perilune.nn import GLU
from perilune.optim.roles import Blocks, Role, Roles

if TYPE_CHECKING:
    from perilune.models.k3.model import K3Model

MOE_BLOCKS = {
    "gate.weight": Blocks(),
    "experts.w1": Blocks(),
    "experts.w2": Blocks(),
    "experts.w3": Blocks(),
    "routed_expert_down_proj.weight": Blocks(),
    "routed_expert_up_proj.weight": Blocks(),
}
GLU_BLOCKS = {f"{name}.weight": Blocks() for name in ("gate_proj", "up_proj", "down_proj")}


def parameter_roles(model: "K3Model") -> Roles:
    """The role of every trainable parameter, by name."""
    blocks = _muon_blocks(model)
    decayed = {"model.embed_tokens.weight", "lm_head.weight"}
    roles = Roles()
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if name in blocks:
            roles[name] = Role(param, "muon", blocks[name])
        else:
            roles[name] = Role(param, "adamw", weight_decay=name in decayed)
    return roles


def _muon_blocks(model: "K3Model") -> dict[str, Blocks]:
    """Parameter name to blocks, for all that Muon takes."""
    table: dict[str, Blocks] = {}

    def add(prefix: str, part: dict[str, Blocks]) -> None:
        table.update({f"{prefix}.{name}": blocks for name, blocks in part.items()})

    config = model.config
    for prefix, module in model.named_modules():
        if isinstance(module, DecoderLayer):
            add(f"{prefix}.self_attn", kind_of(module.kind).blocks(config))
        elif isinstance(module, GLU):
            add(prefix, GLU_BLOCKS)
        elif prefix.endswith("block_sparse_moe"):
            add(prefix, MOE_BLOCKS)
        elif isinstance(module, nn.Linear) and prefix.endswith("eh_proj"):
            add(prefix, {"weight": Blocks()})
    return table

"""A model spread over the ranks of a mesh: every parameter in equal parts, put together where it is used.

PyTorch's FSDP does the work.  What it gathers and frees at a time are a layer's two sublayers, which take and return
tensors; a whole layer hands on a `DepthStream`, into which its hooks do not see.  Embedding, head, norms and mixers are
gathered when a step begins, until it ends.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from perilune.models.k3.layer import DecoderLayer
from perilune.models.k3.model import K3Model
from perilune.nn.moe import Experts


def shard_(
    model: K3Model, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None, *, balanced: bool = False
) -> K3Model:
    """Leaves of every parameter this rank's part, cut along its first dimension; returns `model`.

    expert_mesh: the same ranks in two dimensions, "dp_shard" and "ep": experts are spread over the latter's, where they
    stay and tokens travel to them, and each rank's are cut over the former's as other parameters are over all.
    balanced: crowded ones are copied for a step, so that every rank computes equally much.

    All ranks have drawn or loaded the same values.  mesh: one dimension, over whose ranks gradients are *summed*: each
    rank's loss is its part of the whole (`mean_over`).  Parameters, gradients and sums are float32 as without ranks,
    under autocast too; buffers stay whole on every rank.
    """
    if expert_mesh is not None:
        for experts in model.modules():
            if isinstance(experts, Experts):
                spread_(experts, expert_mesh["ep"])
                experts.balanced = balanced
                fully_shard(experts, mesh=expert_mesh["dp_shard"])
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            for sublayer in (layer.self_attn, layer.mlp, layer.block_sparse_moe):
                if sublayer is not None:
                    fully_shard(sublayer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum, which gloo has too
    return model


def spread_(experts: Experts, mesh: DeviceMesh) -> None:
    """Leaves this rank its run of the experts."""
    for name, whole in list(experts.named_parameters()):
        own = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(own))


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every rank that has a part of it, all of which call this; a plain tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if len(tensor.placements) > 1:  # spread experts: first those of one "ep" rank, in one gather each
        tensor = tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]])
    return tensor.full_tensor()


@torch.no_grad()
def whole_state(model: K3Model, keep: bool) -> dict[str, Tensor]:
    """Every parameter and saved buffer whole, on the CPU; nothing where `keep` is False.  Every rank has to call it."""
    state = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor)
        if keep:
            state[name] = tensor.to("cpu", copy=True)
    return state


def whole_copy(model: K3Model, state: dict[str, Tensor], device: torch.device | str = "cpu") -> K3Model:
    """The model in one piece, in its mode, of its `whole_state` (that of all its stages, if it has several)."""
    with torch.random.fork_rng(devices=[]):
        copy = K3Model(model.config)
    copy.load_state_dict(state)
    return copy.to(device).train(model.training)

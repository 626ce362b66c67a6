"""What goes on over depth in a net, read on a few rows of held-out text: sizes, gradients, likeness, who reads whom."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from perilune.data.packing import packed
from perilune.models.k3.layer import DecoderLayer
from perilune.train.evaluate import judging
from perilune.train.inspection import observe

if TYPE_CHECKING:
    from experiments.depth.train import Net


def by_depth(net: "Net", rows: Tensor) -> dict[str, Any]:
    """`rows: [N, T + 1]`.  One value a sublayer, attention and feed-forward of the lowest layer first:

    input_rms: root mean square of what it reads, mixed or summed, before its norm.  output_rms: of what it adds.
    gradient: norm of the loss' gradient in its parameters.  And `attention`: for every mixer, the output's last, the
    mean weight of each source; `likeness`: [L, L], mean cosine of what layers add, over tokens.
    """
    ids, targets = rows[:, :-1], rows[:, 1:]
    gradients = gradient_norms(net, ids, targets)
    N, T = ids.shape
    starts = torch.arange(0, N * T, T).numpy()
    batch = packed(ids.flatten().cpu().numpy(), targets.flatten().cpu().numpy(), starts)
    with net.place.autocast():
        readings = observe(net.model, batch)
    return {
        "input_rms": short(figures["input"] for figures in readings.activation_rms),
        "output_rms": short(figures["output"] for figures in readings.activation_rms),
        "gradient": short(gradients),
        "attention": [short(mixer["weights"]) for mixer in readings.depth_attention],
        "likeness": [short(row) for row in likeness(net, ids).tolist()],
    }


def short(values: Any) -> list[float]:
    """Four digits."""
    return [float(f"{value:.4g}") for value in values]


def layers_of(net: "Net") -> list[DecoderLayer]:
    return [module for module in net.model.modules() if isinstance(module, DecoderLayer)]


def bodies(layer: DecoderLayer) -> tuple[nn.Module, nn.Module]:
    feed_forward = layer.mlp if layer.block_sparse_moe is None else layer.block_sparse_moe
    assert feed_forward is not None
    return layer.self_attn, feed_forward


def gradient_norms(net: "Net", ids: Tensor, targets: Tensor) -> list[float]:
    """Of all parameters of every sublayer, its norm and mixer left out.  Balancers are left as they were."""
    net.zero_grad(set_to_none=True)
    modes = [(module, module.training) for module in net.modules()]
    net.eval()  # balancers observe training passes only
    net.loss(ids, targets).backward()
    norms = []
    for layer in layers_of(net):
        for body in bodies(layer):
            squares = [p.grad.double().square().sum() for p in body.parameters() if p.grad is not None]
            norms.append(math.sqrt(float(torch.stack(squares).sum())))
    net.zero_grad(set_to_none=True)
    for module, training in modes:
        module.training = training
    return norms


def likeness(net: "Net", ids: Tensor) -> Tensor:
    """The cosine of what two layers add (attention and feed-forward together), mean over tokens.  `[L, L]`."""
    added: list[Tensor] = []

    def attention(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        added.append(output.float())

    def feed_forward(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        added[-1] = added[-1] + output.float()

    handles = []
    for layer in layers_of(net):
        for body, hook in zip(bodies(layer), (attention, feed_forward)):
            handles.append(body.register_forward_hook(hook))
    try:
        with judging(net), net.place.autocast():
            net.model(ids)
    finally:
        for handle in handles:
            handle.remove()
    directions = nn.functional.normalize(torch.stack(added).flatten(1, 2), dim=-1)  # [L, tokens, D]
    return torch.einsum("itd,jtd->ij", directions, directions).cpu() / directions.shape[1]

"""A router that sends nearly all tokens to few experts, as a start to recover from."""

import shutil
from pathlib import Path

import torch
from torch import Tensor

from experiments.balancing.recipes import SKEWED_GINI, Scale, run
from perilune.data.packing import Batch
from perilune.models.k3 import K3Config, K3Model
from perilune.nn.load import gini
from perilune.nn.moe import Router
from perilune.train.loop import Trainer

STEADY = 1e-3  # of the mean square: keeps the direction sought from chasing single tokens
LARGEST = 8.0  # of logits: more would only saturate scores


def prepare(scale: Scale, seed: int, home: Path, device: str) -> None:
    """Writes the skewed model of that seed below `home`, unless it is there: what runs begin from, whatever their rule.

    `config.json` comes last and means that it is whole.
    """
    folder = home / "skewed" / f"seed{seed}"
    if (folder / "config.json").exists():
        return
    plain = run(scale, "normal", ("model.balance.kind=none",), seed, home)
    trainer = Trainer(plain, device=device)
    skew_routers_(trainer.model, trainer.feed.next(), SKEWED_GINI, seed)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    trainer.save(partial)
    partial.replace(folder)


def skew_routers_(model: K3Model, batch: Batch, target: float, seed: int) -> dict[str, float]:
    """Tilts every router in place until the batch's loads have the Gini `target`; returns what each layer has.

    Routers have no bias, so a popularity that all tokens share needs something that all inputs share, as they do in
    trained models and not in drawn ones: one random vector, as long as an embedding, is added to all embeddings.  To
    expert j's row then comes t p_j u: p_j is its popularity, drawn from N(0, 1), u the direction along which the
    router's inputs have most in common, by least squares u.x = 1 for all tokens, and t is found by bisection.
    """
    found: dict[str, float] = {}
    random = torch.Generator().manual_seed(seed)
    embeddings = model.model.embed_tokens.weight
    with torch.no_grad():
        shared = torch.randn(embeddings.shape[1], generator=random).to(embeddings)
        embeddings += shared * embeddings.square().mean().sqrt()
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, Router):
            popular = torch.randn(module.weight.shape[0], generator=random)

            def tilt(router: Router, inputs: tuple[Tensor], name: str = name, popular: Tensor = popular) -> None:
                found[name] = tilt_(router, inputs[0], popular.to(inputs[0].device), model.config, target)

            hooks.append(module.register_forward_pre_hook(tilt))
    model.eval()
    with torch.no_grad():
        device = model.lm_head.weight.device
        model(batch.input_ids.to(device), cu_seqlens=batch.cu_seqlens)
    for hook in hooks:
        hook.remove()
    return found


def tilt_(router: Router, x: Tensor, popular: Tensor, config: K3Config, target: float) -> float:
    """One router; layers below it are tilted already, so `x: [M, D]` are the inputs it will get."""
    x = x.reshape(-1, x.shape[-1]).double()
    second = x.mT @ x / len(x)
    second += STEADY * second.diagonal().mean() * torch.eye(len(second), dtype=x.dtype, device=x.device)
    common = torch.linalg.solve(second, x.mean(0))  # [D]
    direction = torch.outer(popular.double(), common)
    weight = router.weight.double()

    def uneven(amount: float) -> float:
        ids = (x @ (weight + amount * direction).mT).topk(config.num_experts_per_token).indices
        return gini(torch.bincount(ids.flatten(), minlength=len(popular)))

    low, high = 0.0, LARGEST
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if uneven(middle) < target else (low, middle)
    router.weight.copy_(weight + high * direction)
    return uneven(high)

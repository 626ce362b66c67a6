"""Muon, block by block, with AdamW for everything that is not a matrix."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from perilune.core.errors import ConfigError
from perilune.optim import fused
from perilune.optim.newton_schulz import DEVICE_BATCH, newton_schulz
from perilune.optim.roles import Blocks, Role
from perilune.optim.sharded import cuts_of_shard, is_sharded, local, on_owners_

UPDATE_RMS = 0.2
"""Root mean square of an update at learning rate 1: about that of AdamW, so that one learning rate serves both."""


class PerHeadMuon(torch.optim.Optimizer):
    """Muon on each head's and each expert's matrix on its own; AdamW on the parameters whose role says so.

    For a block W [n, m] with gradient G and momentum M (Per-Head Muon of the K3 report, update scale of the K2 report):

        M <- momentum M + G;   N = G + momentum M  (M without `nesterov`)
        W <- W - lr (0.2 sqrt(max(n, m)) newton_schulz(N) + weight_decay W)

    so no head's update depends on the size of another head's gradient.  AdamW is torch's.  Blocks of one shape go
    through one batched iteration, whatever parameter they come from.

    roles: `model.parameter_roles()`, `Roles.match(model, ...)` or any iterable of `Role`.
    lr: of every group; schedulers and loops may set `group["lr"]` of all groups to the same value.  What a group makes
    of it is in its `lr_scale`: a role's own, times `adamw_lr / lr` for AdamW where `adamw_lr` is given.
    weight_decay: of the roles that ask for it.  A parameter without a gradient is left alone, decay included; one with
    a zero gradient is not.  State exists from the start and has the parameter's dtype: keep masters in float32.
    DTensors sharded along one mesh dimension are updated as if they were whole; every other tensor is taken for whole,
    so a shard given as a plain tensor would be orthogonalised on its own.
    ns_steps, ns_dtype: see `newton_schulz`; directions are rounded to `ns_dtype` as they are made.
    """

    def __init__(
        self,
        roles: Mapping[str, Role] | Iterable[Role],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        named = dict(roles) if isinstance(roles, Mapping) else {str(i): role for i, role in enumerate(roles)}
        _check_hyperparameters(lr, adamw_lr, weight_decay, momentum=momentum, beta1=betas[0], beta2=betas[1])
        self._blocks: dict[Tensor, Blocks] = {role.param: role.blocks for role in named.values() if role.kind == "muon"}
        defaults: dict[str, Any] = {
            "lr": lr, "lr_scale": 1.0, "weight_decay": 0.0, "kind": "adamw", "momentum": momentum, "nesterov": nesterov,
            "ns_steps": ns_steps, "ns_dtype": ns_dtype, "betas": betas, "eps": eps,
        }  # fmt: skip
        adamw_scale = 1.0 if adamw_lr is None else adamw_lr / lr
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for name, role in named.items():
            group = groups.setdefault(
                (role.kind, role.weight_decay, role.lr_scale),
                {
                    "params": [],
                    "kind": role.kind,
                    "weight_decay": weight_decay if role.weight_decay else 0.0,
                    "lr_scale": role.lr_scale * (adamw_scale if role.kind == "adamw" else 1.0),
                },
            )
            group["params"].append((name, role.param))
        super().__init__(list(groups.values()), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; without a `kind` the group is AdamW's.  Its state is created here, not at the first step, so
        that whatever restores a checkpoint finds something to fill."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            if group["kind"] == "muon":
                self._blocks.setdefault(param, Blocks())
                self.state[param] = {"momentum": torch.zeros_like(param)}
            else:
                self.state[param] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                (self._muon if group["kind"] == "muon" else self._adamw)(group, params)
        return loss

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, mu = group["lr"] * group["lr_scale"], group["momentum"]
        rule = _Rule(lr, 1 - lr * group["weight_decay"], mu, group["nesterov"], group["ns_steps"], group["ns_dtype"])
        in_one_pass: list[_Matrices] = []
        others: list[_Matrices] = []
        begun: list[tuple[Tensor, ...]] = []  # all but the former, whose momentum and decay are made at once
        shards = []
        for param, grad in zip(params, _grads(params)):
            own = local(param), local(grad), local(self.state[param]["momentum"])
            cut = self._blocks[param]
            own_cut = cuts_of_shard(param, cut) if is_sharded(param) else cut
            if own_cut is None:
                shards.append((param, *own, cut))
            else:
                matrices = [_Matrices(*views) for views in zip(*map(own_cut.of, own))]
                if all(fused.serves(*one) for one in matrices):
                    in_one_pass += matrices
                    continue
                others += [one.lying() for one in matrices]
            begun.append(own)
        if begun:
            weights, grads, momenta = (list(tensors) for tensors in zip(*begun))
            torch._foreach_mul_(momenta, mu)
            torch._foreach_add_(momenta, grads)
            torch._foreach_mul_(weights, rule.keep)
        _move_in_one_pass_(in_one_pass, rule)
        _move_(others, rule)
        if shards:
            directions = [torch.add(g, m, alpha=mu) if rule.nesterov else m.clone() for _, _, g, m, _ in shards]
            on_owners_(
                partial(orthogonalize_, steps=rule.steps, dtype=rule.dtype),
                [(param, direction, cut) for (param, *_, cut), direction in zip(shards, directions)],
            )
            torch._foreach_add_([weight for _, weight, *_ in shards], directions, alpha=-lr)

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[param] for param in params]
        adamw(
            params,
            _grads(params),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"] * group["lr_scale"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class _Rule(NamedTuple):
    """A group's numbers for this step; see `PerHeadMuon`."""

    lr: float
    keep: float
    """What decay leaves of a weight."""
    mu: float
    nesterov: bool
    steps: int
    dtype: torch.dtype | None


class _Matrices(NamedTuple):
    """Some matrices of one shape [..., n, m]: views of a parameter, of its gradient and of its momentum."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor

    @property
    def tall(self) -> bool:
        return self.weight.shape[-2] > self.weight.shape[-1]

    @property
    def number(self) -> int:
        return self.weight.shape[:-2].numel()

    def lying(self) -> "_Matrices":
        """None taller than wide."""
        return _Matrices(*(x.mT for x in self)) if self.tall else self

    def split(self, numbers: int) -> "Iterator[_Matrices]":
        """In parts of so many numbers at most, or of one index of the first axis."""
        each = max(1, numbers // max(1, self.weight.shape[1:].numel()))
        return (_Matrices(*parts) for parts in zip(*(x.split(each) for x in self)))


def _move_in_one_pass_(matrices: Iterable[_Matrices], rule: _Rule) -> None:
    """W <- keep W - lr 0.2 sqrt(max(n, m)) newton_schulz(G + mu M), or of M alone without `nesterov`, M <- mu M + G.

    By the kernels, several tensors in a launch.  Matrices of one shape, up to transposition, go through batched
    iterations of DEVICE_BATCH numbers.  Directions are written where one begins, in its own dtype, and its result is
    added to the weights from there: nothing as large as the parameters is held.  Tall ones are turned on the way.
    """
    alike: dict[Any, list[_Matrices]] = defaultdict(list)
    for one in matrices:
        alike[tuple(sorted(one.weight.shape[-2:])), one.weight.device].append(one)
    for (shape, device), every in alike.items():
        every.sort(key=lambda one: (one.tall, one.number))  # so that a batch is few runs of as many numbers
        rate = rule.lr * UPDATE_RMS * max(shape) ** 0.5
        for some in _batches(every):
            runs = [list(run) for _, run in groupby(some, key=lambda one: (one.tall, one.number))]
            sizes = [sum(one.number for one in run) for run in runs]
            stacked = torch.empty(sum(sizes), *shape, dtype=rule.dtype or torch.float32, device=device)
            for run, part in zip(runs, stacked.split(sizes)):
                into = part.new_empty(part.mT.shape) if run[0].tall else part
                fused.directions_([x.momentum for x in run], [x.grad for x in run], into, rule.mu, rule.nesterov)
                if run[0].tall:
                    part.copy_(into.mT)
            for run, part in zip(runs, newton_schulz(stacked, rule.steps, dtype=rule.dtype).split(sizes)):
                updates = part.mT.contiguous() if run[0].tall else part
                fused.descend_([x.weight for x in run], updates, rule.keep, rate)


def _move_(matrices: Iterable[_Matrices], rule: _Rule) -> None:
    """The same by torch's operations, where the momentum is that of this step already, the weight has decayed, and none
    is taller than wide."""
    alike: dict[Any, list[_Matrices]] = defaultdict(list)
    for one in matrices:
        alike[one.weight.shape[-2:], one.weight.dtype, one.weight.device].append(one)
    for (shape, own, device), some in ((key, batch) for key, every in alike.items() for batch in _batches(every)):
        counts = [one.number for one in some]
        stacked = torch.empty(sum(counts), *shape, dtype=rule.dtype or own, device=device)
        for one, part in zip(some, stacked.split(counts)):
            into = part.view(one.weight.shape)
            if rule.nesterov:
                torch.add(one.grad, one.momentum, alpha=rule.mu, out=into)
            else:
                into.copy_(one.momentum)
        rate = rule.lr * UPDATE_RMS * max(shape) ** 0.5
        for one, part in zip(some, newton_schulz(stacked, rule.steps, dtype=rule.dtype).split(counts)):
            one.weight.add_(part.view(one.weight.shape), alpha=-rate)


def _batches(alike: Iterable[_Matrices]) -> Iterator[list[_Matrices]]:
    """Matrices of one shape, DEVICE_BATCH numbers at a time."""
    batch: list[_Matrices] = []
    room = DEVICE_BATCH
    for part in (part for one in alike for part in one.split(DEVICE_BATCH)):
        if batch and part.weight.numel() > room:
            yield batch
            batch, room = [], DEVICE_BATCH
        batch.append(part)
        room -= part.weight.numel()
    yield batch


def orthogonalize_(tensors: Iterable[tuple[Tensor, Blocks]], steps: int = 5, dtype: torch.dtype | None = None) -> None:
    """Replaces every block B [n, m] of the tensors by 0.2 sqrt(max(n, m)) newton_schulz(B).

    Blocks of one shape (up to transposition) go through one batched iteration.
    """
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor, cut in tensors:
        for block in cut.of(tensor):
            if block.shape[-2] > block.shape[-1]:
                block = block.mT
            alike[block.shape[-2:], block.dtype, block.device].append(block)
    for (shape, _, _), blocks in alike.items():
        stacked = torch.cat([block.reshape(-1, *shape) for block in blocks])
        updates = newton_schulz(stacked, steps, dtype=dtype).mul_(UPDATE_RMS * max(shape) ** 0.5)
        for block, update in zip(blocks, updates.split([block.shape[:-2].numel() for block in blocks])):
            block.copy_(update.view(block.shape))


def _grads(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _check_hyperparameters(lr: float, adamw_lr: float | None, weight_decay: float, **fractions: float) -> None:
    if not lr >= 0 or (adamw_lr is not None and not (lr > 0 and adamw_lr >= 0)):
        raise ConfigError(f"lr: expected >= 0, and > 0 beside adamw_lr, got {lr} and {adamw_lr}; adamw_lr / lr is kept")
    if not weight_decay >= 0:
        raise ConfigError(f"weight_decay: expected >= 0, got {weight_decay}; 0 turns it off")
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name}: expected a decay in [0, 1), got {value}; 0 turns it off")

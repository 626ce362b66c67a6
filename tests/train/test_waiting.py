"""A step does not wait for the device: it asks for no tensor's values but where it must, once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.core.backends import Backend, never
from perilune.models.k3.config import BalanceConfig
from perilune.ops.cross_entropy import chunked as cross_entropy
from perilune.ops.grouped_experts import api as grouped_experts
from perilune.train.config import OptimizerConfig, Stage
from perilune.train.host import Arrival
from tiny_run import STAGES, run
from tiny_run import trainer as tiny

aten = torch.ops.aten
ASKING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default, aten.masked_select.default,
    aten.equal.default, aten._unique2.default, aten.unique_dim.default, aten.bincount.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
}  # fmt: skip


class Refusing(TorchDispatchMode):
    """Collects the operations for which a host would wait; `known` tensors live on the host even where a GPU is."""

    def __init__(self, known=()):
        super().__init__()
        self.known = {id(t) for t in known}
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if (func in ASKING or by_mask) and not (args and id(args[0]) in self.known):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


STAGE = Stage(name="only", context=24, batch_tokens=96, tokens=960, lr=1e-2, lr_end=1e-3, mix={"text": 1, "needle": 1})


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    """What the library does otherwise on a CPU: it looks at ids and logits to check them, leaves out rows of the head,
    and sorts for experts by a look at the counts, where kernels of a GPU do without."""
    monkeypatch.setattr(cross_entropy, "GATHERED", ())
    monkeypatch.setattr(grouped_experts, "_check", lambda *arguments: None)
    monkeypatch.setattr(grouped_experts.BACKENDS, "_backends", {"reference": Backend("reference", every_expert, never)})


def every_expert(x, w_gate, w_up, w_down, ids, weights, **options):
    """All of them for every token, weighted by 0 where they were not chosen."""
    gate, up = (torch.einsum("md,efd->mef", x, w) for w in (w_gate, w_up))
    share = weights.new_zeros(len(x), len(w_gate)).scatter(1, ids, weights)
    return torch.einsum("mef,edf,me->md", gate.tanh() * up, w_down, share).to(x.dtype)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("kind", ["quantile", "sign", "band", "aux"])
@pytest.mark.parametrize("further", [0, 1])
@pytest.mark.parametrize(("micro", "recompute"), [(None, "none"), (48, "none"), (48, "layers")])
def test_a_step_asks_for_nothing(kind, further, micro, recompute, monkeypatch):
    model = {"balance": BalanceConfig(kind=kind), "num_nextn_predict_layers": further}
    stages = tuple(stage.replace(micro_tokens=micro, recompute=recompute) for stage in STAGES)
    trainer = tiny(run(model=model, stages=stages, optimizer=OptimizerConfig(qk_clip=None)))
    batches = [trainer.feed.next() for _ in range(3)]
    trainer.step(batches[0])  # tables that are made once
    steps = [state["step"] for state in trainer.optimizer.state.values() if "step" in state]  # AdamW counts on the host
    arrived = []
    monkeypatch.setattr(Arrival, "tensor", lambda self: (arrived.append(self), self._here)[1])
    with Refusing(steps) as refusing:
        for batch in batches[1:]:
            trainer.step(batch)
    assert refusing.seen == []
    assert len(arrived) == 2  # the loss and the norm of each step, before it is made good


def test_the_watch_sees_what_it_should():
    mask = torch.tensor([True, False])
    with Refusing() as refusing:
        x = torch.arange(2.0)
        float(x[0])
        x[mask]
        x.nonzero()
        x[mask] = 1
    assert len(refusing.seen) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("micro", "recompute"), [(None, "none"), (256, "sublayers"), (512, "blocks")])
def test_a_step_on_a_gpu_waits_once(precision, micro, recompute):
    """By the driver's own account: what waits by accident raises; the one wait that is meant is for an event."""
    from perilune.models.k3 import presets

    small = presets.small()
    linear = small.linear_attn_config.replace(kda_layers=(1, 2, 3), full_attn_layers=(4,))
    model = small.replace(num_hidden_layers=4, linear_attn_config=linear, attn_res_block_size=1, vocab_size=512)
    sizes = {"context": 256, "batch_tokens": 1024, "tokens": 10_240, "micro_tokens": micro, "recompute": recompute}
    stage = STAGE.replace(**sizes, mix={"text": 1.0})
    made = run(stages=(stage,), precision=precision).replace(model=model)
    if precision == "float32":  # the kernels of the experts multiply bfloat16; torch's products look at counts
        made = made.replace(model=made.model.replace(num_experts=0))
    trainer = tiny(made, device="cuda")
    batches = [trainer.feed.next() for _ in range(4)]
    for batch in batches[:2]:
        trainer.step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[2:]:
            trainer.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.steps_done == 4
